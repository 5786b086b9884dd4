"""A user's modules: what wraps them, their names and their modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gramscope.errors import LayerError


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
    """Whether the model or a part of it runs through ``torch.compile``."""
    return any(
        isinstance(getattr(m, "_orig_mod", None), nn.Module) or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def public_name(name: str) -> str:
    """A module path without the parts that compiled sub-modules add."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


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
