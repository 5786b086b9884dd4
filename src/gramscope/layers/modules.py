"""A user's modules: what wraps them, their names and modes, and hooks that torch.compile and copies of a module leave alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

from gramscope.errors import InputError, LayerError

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Have a compiled function call this one as it is, with all it calls, between two graphs.

    Tracing a step of an optimizer or a measurement would give dozens of small graphs, and minutes of compiling.
    ``torch.compiler.disable`` does the same but loads the compiler as soon as it decorates, which takes a second. While a CUDA
    graph is recorded the function raises an InputError.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise InputError(
                f"{function.__qualname__} decides by numbers that a CUDA graph cannot record: record forward and backward "
                "passes alone, and call it after each replay()"
            )
        return function(*args, **kwargs)

    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(checked)  # type: ignore[no-any-return]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and (Distributed)DataParallel wrappers."""
    if not isinstance(model, nn.Module):
        raise LayerError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, a part of it, or the ``forward`` of one runs through ``torch.compile``."""
    return any(
        isinstance(getattr(m, "_orig_mod", None), nn.Module)
        or getattr(m, "_compiled_call_impl", None) is not None
        or hasattr(m.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for m in model.modules()
    )


def public_name(name: str) -> str:
    """A module path without the parts that compiled sub-modules add."""
    return ".".join(step for step in name.split(".") if step != "_orig_mod")


class ModuleHook:
    """A hook on a user's module. Copies of the module, and files it is saved to, get one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @outside_graphs
    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    return None


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and all modules inside it in eval mode, and give each its own mode back."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in modes:
            child.training = False
        yield
    finally:
        for child, training in modes:
            child.training = training


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Have accelerate bring a module's offloaded parameters for the length of the block."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None or not any(p.is_meta for p in module.parameters(recurse=False)):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from packing 4-bit weights for inference on a CPU, in a form that passes no gradients on."""
    known: list[Any] = [
        module
        for module in model.modules()
        if getattr(module, "support_avx512bf16_for_cpu", False) and any(p.is_cpu for p in module.parameters())
    ]
    for module in known:
        module.state_dict()  # takes a packed weight apart
        module.support_avx512bf16_for_cpu = False
    try:
        yield
    finally:
        for module in known:
            module.support_avx512bf16_for_cpu = True


def names_in_code(module_type: type[nn.Module], method: str | None = None) -> frozenset[str]:
    """Names of attributes and functions that the methods of a module type use, or one of its methods.

    torch's own classes have none, and neither have the methods that make, initialise or tie weights.
    """
    return _names_in_code(module_type, method)  # type: ignore[arg-type]


@functools.cache
def _names_in_code(module_type: Any, method: str | None) -> frozenset[str]:
    names: set[str] = set()
    for owner in module_type.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins", "abc"):
            continue
        for name, value in vars(owner).items():
            unused = name.startswith("__") or any(word in name for word in ("init", "tie", "reset", "resize", "prune"))
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and not unused and method in (None, name):
                names |= _names(function.__code__)
    return frozenset(names)


def _names(code: CodeType) -> set[str]:
    """Names in a code object and in the functions defined inside it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
