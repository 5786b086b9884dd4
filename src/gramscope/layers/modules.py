"""A user's modules: what wraps them, their names and their modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from gramscope.errors import LayerError
from gramscope.layers.compiled import outside_graphs, while_tracing


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
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class ModuleHook:
    """A hook on a user's module. Copies of the module, and files it is saved to, get one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @outside_graphs
    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class TracedHook(ModuleHook):
    """A hook that ``torch.compile`` calls while it traces the module, without arguments; nothing of it is in the graph."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)

        def traced() -> None:
            function()

        self._traced = while_tracing(traced)

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        if torch.compiler.is_compiling():
            self._traced()
            return None
        return self._function(*args)


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    return None


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and all its parts in eval mode, and give each part its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def names_in_code(module_type: type[nn.Module], method: str | None = None) -> frozenset[str]:
    """Names of attributes and functions that the methods of a module type use, or one of its methods.

    torch's own classes have none, and neither have the methods that make, initialise or tie weights.
    """
    return _names_in_code(module_type, method)  # type: ignore[arg-type]


@cache
def _names_in_code(module_type: Any, method: str | None) -> frozenset[str]:
    found: set[str] = set()
    for owner in module_type.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins", "abc"):
            continue
        for name, value in vars(owner).items():
            unused = name.startswith("__") or any(word in name for word in ("init", "tie", "reset", "resize", "prune"))
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and not unused and method in (None, name):
                found |= _names(function.__code__)
    return frozenset(found)


def _names(code: CodeType) -> set[str]:
    """Names in a code object and in the functions defined inside it."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)
