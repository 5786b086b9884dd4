"""Arrays as checked tensors, their precision and scale, and tall matrices read block by block in float64.

A measure of 1,000,000 × 256 float32 features must not make a float64 copy of them. It reads :class:`Rows` instead:
every block is converted, checked for NaN and infinity, used and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, NumericalError

#: a torch tensor, a NumPy array or anything NumPy can read
Array: TypeAlias = Tensor | ArrayLike
#: entries outside 1e±70 have products of four, as inner products of Gram matrices take, near the ends of float64
LIMIT = 1e70


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


def common_part(A: Tensor, B: Tensor) -> tuple[slice, ...] | None:
    """The entries that two matrices both have where one has more rows or more columns; ``None`` where they differ more.

    >>> common_part(torch.ones(3, 2), torch.ones(5, 2)), common_part(torch.ones(3, 2), torch.ones(2, 3))
    ((slice(None, 3, None), slice(None, 2, None)), None)
    """
    if A.dim() != B.dim() or sum(a != b for a, b in zip(A.shape, B.shape, strict=True)) > 1:
        return None
    return tuple(slice(min(a, b)) for a, b in zip(A.shape, B.shape, strict=True))


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
    if x.dtype != torch.float64 or not x.numel() or x.is_meta:
        return x  # products of the smaller types are within the range of float64
    largest = max(abs(float(extreme)) for extreme in torch.aminmax(x))  # a tenth of the time of a norm
    if limit <= largest < math.inf or 0 < largest <= 1 / limit:
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


#: entries of one block (8 MB in float64)
BLOCK_ENTRIES = 1_000_000


def spans(length: int, width: int, least: int = 1, entries: int | None = None) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive blocks of ``length`` rows, each of about ``entries`` entries (1,000,000).

    Work that costs width² a block, such as merging Gram matrices, asks for ``least`` rows in each.

    >>> list(spans(5, BLOCK_ENTRIES // 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, least, (BLOCK_ENTRIES if entries is None else entries) // max(1, width))
    for start in range(0, length, step):
        yield start, min(length, start + step)


class Rows:
    """The rows of a real matrix ``[n, width]``, read as finite float64 blocks.

    >>> Rows(torch.ones(3, 2), "H").block(1, 3)
    tensor([[1., 1.],
            [1., 1.]], dtype=torch.float64)
    """

    def __init__(self, x: Array, name: str) -> None:
        self.name = name
        self.data = as_nonempty_floats(x, name)
        if self.data.dim() != 2:
            hint = f"; for one feature pass {name}[:, None]" if self.data.dim() == 1 else f"; pass {name}.flatten(1)"
            raise InputError(f"{name} must be a matrix [samples, features], got shape {tuple(self.data.shape)}{hint}")
        check_size(self.data, name)

    @property
    def n(self) -> int:
        """Number of rows."""
        return int(self.data.shape[0])

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.data.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the data lie."""
        return self.data.device

    @property
    def eps(self) -> float:
        """Rounding of the entries as they came, relative to their size: 1.2e-7 for float32."""
        return float(torch.finfo(self.data.dtype).eps)

    def block(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` in float64."""
        block = to_double(self.data[start:stop])
        check_finite(block, self.name)
        return block

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns ``start`` to ``stop`` of all rows, in float64."""
        block = to_double(self.data[:, start:stop])
        check_finite(block, self.name)
        return block

    def mean(self) -> Tensor:
        """Mean row, ``[width]``."""
        return torch.stack([block.sum(0) for block in self.blocks()]).sum(0) / self.n

    def blocks(self, width: int = 0) -> Iterator[Tensor]:
        """All rows in order, in blocks sized for ``max(width, self.width)`` columns."""
        for start, stop in spans(self.n, max(width, self.width)):
            yield self.block(start, stop)


class MappedRows(Rows):
    """The rows ``(h − shift) Wᵀ`` of other rows h, formed block by block; either part may be left out.

    Args:
        rows: ``[n, d]``.
        W: float64 ``[k, d]``.
        shift: float64 ``[d]``.
    """

    def __init__(self, rows: Rows, W: Tensor | None = None, shift: Tensor | None = None) -> None:
        if W is not None and W.shape[-1] != rows.width:
            raise InputError(f"W of shape {tuple(W.shape)} does not act on {rows.name} with {rows.width} features")
        self.name = rows.name
        self.data = rows.data
        self.rows = rows
        self.W = W
        self.shift = shift

    @property
    @override
    def width(self) -> int:
        return self.rows.width if self.W is None else int(self.W.shape[0])

    @override
    def block(self, start: int, stop: int) -> Tensor:
        block = self.rows.block(start, stop)
        if self.shift is not None:
            block = block - self.shift
        return block if self.W is None else block @ self.W.mT

    @override
    def columns(self, start: int, stop: int) -> Tensor:
        if self.W is not None:
            return MappedRows(self.rows, self.W[start:stop], self.shift).block(0, self.n)
        block = self.rows.columns(start, stop)
        return block if self.shift is None else block - self.shift[start:stop]


class OneHotRows(Rows):
    """One-hot rows of integer labels minus a constant row (their mean, when centred), never formed as a whole.

    Args:
        labels: ``[n]`` of any integer dtype.
        classes: the ``[c]`` sorted label values, one column each.
        shift: the ``[c]`` row that is subtracted.
    """

    def __init__(self, labels: Tensor, classes: Tensor, shift: Tensor, name: str = "Y") -> None:
        self.name = name
        self.data = labels
        self.classes = classes
        self.shift = shift

    @property
    @override
    def width(self) -> int:
        return int(self.classes.numel())

    def index(self, start: int, stop: int) -> Tensor:
        """Column of each label."""
        labels = self.data[start:stop].to(torch.int64).contiguous()
        column = torch.searchsorted(self.classes, labels).clamp_(max=self.width - 1)
        known = self.classes[column] == labels
        if not bool(known.all()):
            unknown = sorted(set(labels[~known].tolist()))[:5]
            raise InputError(f"{self.name} has labels {unknown} that are not among the classes {self.classes.tolist()}")
        return column

    @override
    def block(self, start: int, stop: int) -> Tensor:
        one_hot = self.shift.neg().expand(stop - start, -1).clone()
        column = self.index(start, stop).to(one_hot.device)[:, None]
        return one_hot.scatter_add_(1, column, one_hot.new_ones(1, 1).expand_as(column))

    @override
    def columns(self, start: int, stop: int) -> Tensor:
        return self.block(0, self.n)[:, start:stop]


def check_pair(first: Rows, second: Rows) -> None:
    """Raise :class:`InputError` unless both have the same number of rows and the same device."""
    if first.n != second.n:
        raise InputError(
            f"{first.name} has {first.n} rows and {second.name} has {second.n}; they must describe the same samples"
        )
    check_same_device(**{first.name: first.data, second.name: second.data})


def row_norm(A: Tensor, B: Tensor | None = None) -> Tensor:
    """``‖A‖_F``, or ``‖A − B‖_F``, in float64, read in blocks.

    >>> row_norm(torch.tensor([[3.0], [4.0]])).item()
    5.0
    """
    rows, others = A.reshape(-1, A.shape[-1]), None if B is None else B.reshape(-1, A.shape[-1])
    total = to_double(A[..., :0]).sum()
    for i, j in spans(len(rows), rows.shape[1], entries=2**16):
        block = to_double(rows[i:j])
        total += (block if others is None else block - to_double(others[i:j])).square().sum()
    return total.sqrt()


def row_gram(A: Tensor, B: Tensor | None = None) -> Tensor:
    """``AᵀA``, or ``AᵀB``, in float64 for ``A [..., k, d]`` of any floating dtype, converted in blocks of rows.

    >>> row_gram(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """

    def part(i: int, j: int) -> Tensor:
        block = to_double(A[..., i:j, :])
        return block.mT @ (block if B is None else to_double(B[..., i:j, :]))

    width = A.shape[:-2].numel() * A.shape[-1]
    return reduce(torch.Tensor.add_, (part(i, j) for i, j in spans(A.shape[-2], width, least=A.shape[-1])))


def row_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` in float64 for ``A [..., k, d]`` of any floating dtype, converted in blocks of rows.

    >>> row_product(torch.ones(2, 3), torch.ones(3, 1, dtype=torch.float64)).flatten()
    tensor([3., 3.], dtype=torch.float64)
    """
    width = A.shape[:-2].numel() * A.shape[-1]
    parts = [to_double(A[..., start:stop, :]) @ B for start, stop in spans(A.shape[-2], width)]
    return torch.cat(parts, -2)
