"""A second device for machines without one: its tensors compute on the CPU but refuse to meet tensors of the CPU.

``torch.device("second")`` behaves as CUDA does where devices meet: an operation may mix its tensors with CPU tensors of zero
dimensions where CUDA would accept them, and with nothing else; copies between devices are allowed. Each tensor of it is a
subclass that wraps a CPU tensor. :func:`register` enters the device under torch's key for devices from outside (PrivateUse1).
From then on torch takes it for the accelerator of the process, in ``fork_rng``, mixed precision and elsewhere, and there is no
way back: tests on it run in a process of their own (``test_second_device.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
#: operations that may read one device and write another
_COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default, aten.to.device}
#: operations for which CUDA takes no zero-dimensional CPU tensor either
_STRICT = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.cat.default,
    aten.stack.default,
    aten.ldexp.Tensor,
}


class SecondTensor(Tensor):
    """A tensor that says it is on the second device; ``held`` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> SecondTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device("second", 0), requires_grad=requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SecondTensor({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new: Any = SecondTensor(self.held.detach().clone(), self.requires_grad)
        memo[id(self)] = new = (
            torch.nn.Parameter(new, self.requires_grad) if isinstance(self, torch.nn.Parameter) else new
        )
        return new

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a tensor of the second device to numpy; copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_flatten(values)[0] if isinstance(value, Tensor))


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == "second"


def _check_devices(function: Any, values: list[Tensor], generator: torch.Generator | None) -> None:
    """Raise where CUDA would: a CPU tensor meets one of the second device."""
    ours = [value for value in values if isinstance(value, SecondTensor)]
    if ours and generator is not None:
        raise RuntimeError(f"Expected a 'second' device type for generator but found 'cpu': {function}")
    others = [value for value in values if not isinstance(value, SecondTensor)]
    if not ours or function in _COPIES:
        return
    if "index" in str(function):  # CUDA takes CPU indices
        others = [value for value in others if value.is_floating_point()]
    bad = [value for value in others if value.dim() or function in _STRICT]
    if bad:
        shapes = [tuple(value.shape) for value in bad]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, second:0 and cpu: {function} "
            f"of {[tuple(value.shape) for value in ours]} there and {shapes} on the CPU"
        )


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU tensors behind its arguments; results are on the device that torch would give them."""
    values = list(_tensors((args, kwargs)))
    _check_devices(function, values, kwargs.get("generator"))
    asked = kwargs.get("device")
    ours = _is_ours(asked) if asked is not None else any(isinstance(value, SecondTensor) for value in values)
    if function is aten.copy_.default or function is aten._copy_from.default:
        ours = isinstance(args[0], SecondTensor)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu") if ours or torch.device(asked).type == "cpu" else asked}
    wrapped = {id(value.held): value for value in values if isinstance(value, SecondTensor)}
    plain = tree_map(lambda value: value.held if isinstance(value, SecondTensor) else value, (args, kwargs))
    result = function(*plain[0], **plain[1])
    if torch.Tag.inplace_view in function.tags:  # the wrapper must learn its new shape too
        with no_dispatch():
            function(*args, **kwargs)

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or not ours:
            return value
        return wrapped.get(id(value)) if id(value) in wrapped else SecondTensor(value)

    return tree_map(back, result)


def _made(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor made on the second device, or copied to it."""
    return _compute(function, args, kwargs)


class _Module(_DummyBackendModule):  # type: ignore[misc]
    """What torch asks of ``torch.second``, for mixed precision as well."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_libraries: list[Any] = []


def register() -> None:
    """Make ``torch.device("second")`` known to torch, for the rest of this process."""
    _setup_privateuseone_for_python_backend("second", backend_module=_Module())
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[0].fallback(_made, "PrivateUse1")
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[1].impl("copy_", partial(_made, aten.copy_.default), "PrivateUse1")
