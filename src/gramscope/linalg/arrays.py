"""Arrays as checked tensors, and their precision and scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gramscope.errors import InputError, NumericalError

#: a torch tensor, a NumPy array or anything NumPy can read
Array: TypeAlias = Tensor | ArrayLike
#: entries outside 1e±150 have squares near the ends of float64
LIMIT = 1e150


def as_tensor(x: Array, name: str) -> Tensor:
    """``x`` as a real tensor of its own dtype, without its autograd graph and, where possible, without a copy.

    Numbers of 8 bits (float8) become float32.
    """
    if not isinstance(x, Tensor):
        if isinstance(x, np.ma.MaskedArray):
            raise InputError(f"{name} is a masked array; pass its rows without masked entries, or {name}.filled(value)")
        try:
            array: np.ndarray[Any, Any] = np.asarray(x)
        except ValueError as error:
            raise InputError(f"{name} is no array of numbers: its rows have different lengths") from error
        if array.dtype.kind not in "biufc":
            raise InputError(f"{name} has dtype {array.dtype}; pass numbers")
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        if not (array.flags.writeable and array.dtype.isnative) or any(stride < 0 for stride in array.strides):
            array = np.array(array, dtype=array.dtype.newbyteorder("="))
        x = torch.from_numpy(array)
    if x.is_complex():
        raise InputError(f"{name} is complex ({x.dtype}); pass real numbers, for example its real and imaginary parts")
    if x.layout is not torch.strided:
        raise InputError(f"{name} is sparse ({x.layout}); pass {name}.to_dense()")
    return wide_enough(x.detach(), name)


def wide_enough(x: Tensor, name: str) -> Tensor:
    """``x``, in float32 if its dtype is a floating-point one of 8 bits or less, in which torch cannot compute."""
    if not x.is_floating_point() or x.element_size() > 1:
        return x
    try:
        return x.float()
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(f"{name} has dtype {x.dtype}, which torch cannot convert; pass float32") from error


def as_float_tensor(x: Array, name: str, dim: int | None = None) -> Tensor:
    """``x`` as a non-empty floating-point tensor (with ``dim`` axes, if given), finite, in its own dtype."""
    tensor = as_nonempty_floats(x, name)
    if dim is not None and tensor.dim() != dim:
        raise InputError(f"{name} must have {dim} axes, got shape {tuple(tensor.shape)}")
    check_finite(tensor, name)
    check_size(tensor, name)
    return tensor


def as_matrices(x: Array, name: str) -> Tensor:
    """A matrix or a stack of matrices ``[..., rows, columns]``, finite, in its own floating dtype."""
    tensor = as_float_tensor(x, name)
    if tensor.dim() < 2:
        raise InputError(f"{name} must be a matrix [rows, columns] or a stack of them, got shape {tuple(tensor.shape)}")
    return tensor


def as_weight(W: Array) -> Tensor:
    """A weight ``[k, d]`` or ``[groups, k, d]``; a convolution's of four or five axes in patch space ``[out, in · kernel]``."""
    tensor = as_matrices(W, "W")
    return tensor.flatten(1) if tensor.dim() > 3 else tensor


def to_double(x: Tensor) -> Tensor:
    """``x`` in float64, on the CPU if its device has none (Apple's MPS)."""
    return x.to("cpu" if x.device.type == "mps" else x.device, torch.float64)


def unit_scale(x: Tensor) -> Tensor:
    """``x`` times the power of two that brings its largest entry near 1: exact, and safe to square at any scale.

    >>> unit_scale(torch.tensor([3e-200, -1e-200], dtype=torch.float64)).abs().max().item() > 0.5
    True
    """
    return torch.ldexp(x, -binary_exponent(x))


def binary_exponent(x: Tensor) -> Tensor:
    """The e for which the largest entry of ``|x|`` lies in [2^(e−1), 2^e), kept where 2^±e is a normal float32."""
    limit = 126 if x.dtype == torch.float32 else 1022
    largest = torch.linalg.vector_norm(x, torch.inf) if x.numel() else x.new_zeros(())
    if not bool(torch.isfinite(largest)):
        largest = torch.where(torch.isfinite(x), x.abs(), 0.0).amax()
    return torch.frexp(largest).exponent.clamp(-limit, limit)


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Dtype of a matrix computed from ``tensors``: their common type, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def shapes_of(part: Any) -> str:
    """A dataclass in one line for people: tensors by their shapes, without fields that are None."""
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    texts = {
        name: str(tuple(v.shape)) if isinstance(v, Tensor) else repr(v) for name, v in found.items() if v is not None
    }
    return f"{type(part).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise :class:`InputError` naming the arguments if they lie on different devices."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"arguments lie on different devices: {places}; move them to one with .to(device)")


def as_nonempty_floats(x: Array, name: str) -> Tensor:
    """``x`` as a floating-point tensor with entries, not yet checked to be finite."""
    tensor = as_tensor(x, name)
    if not tensor.is_floating_point():
        raise InputError(f"{name} has integer dtype {tensor.dtype}; convert it with .float() if these are numbers")
    if tensor.numel() == 0:
        raise InputError(f"{name} is empty: shape {tuple(tensor.shape)}")
    return tensor


def check_range(x: Tensor, name: str) -> Tensor:
    """``x``; raises :class:`NumericalError` where a result computed from finite numbers is too large for its dtype."""
    if not bool(torch.isfinite(x).all()):
        raise NumericalError(
            f"{name} exceeds the range of {x.dtype}; divide the arguments by a constant, or pass float64"
        )
    return x


def check_size(x: Tensor, name: str, limit: float = LIMIT) -> Tensor:
    """``x``; raises :class:`NumericalError` where its largest entry is above ``limit`` or below its inverse."""
    if x.dtype != torch.float64 or not x.numel():
        return x  # products of the smaller types are within the range of float64
    largest = float(torch.linalg.vector_norm(x, torch.inf))
    if largest and not 1 / limit < largest < limit:
        raise NumericalError(
            f"{name} has entries up to {largest:.1e}, and their products exceed the range of float64; multiply it (or the "
            "loss) by a constant"
        )
    return x


def check_finite(x: Tensor, name: str) -> None:
    """Raise :class:`InputError` if ``x`` has NaN or infinite entries."""
    if x.is_meta:
        raise InputError(f"{name} lies on the meta device and holds no numbers")
    # A finite sum proves finite entries, cheaply; a sum that is not finite may still be an overflow.
    if bool(torch.isfinite(x.sum())):
        return
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise InputError(f"{name} has {bad} NaN or infinite entries of {x.numel()}; remove or repair those samples")


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations on ``device`` keep the dtype of their inputs; it does nothing where autocast is off."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
