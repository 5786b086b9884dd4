"""Hide the package's own forward passes from captures and optimizers that already watch the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from weakref import WeakSet

from torch import nn

_WATCHERS: WeakSet[Watcher] = WeakSet()
#: the model whose measurement is under way here
_MEASURED: ContextVar[nn.Module | None] = ContextVar("measured", default=None)


class Watcher:
    """Something with hooks on ``model``, which must do nothing while :attr:`watching` is false."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._away = 0
        self._measured = _MEASURED.get()
        _WATCHERS.add(self)

    @property
    def watching(self) -> bool:
        """Whether to notice passes of the model."""
        return self._away == 0

    @contextmanager
    def ignoring_calls(self) -> Iterator[None]:
        """Ignore passes of the model inside this block."""
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1

    def is_foreign(self, model: nn.Module, modules: set[nn.Module]) -> bool:
        """Whether this watches one of ``modules`` for the user or for another measurement of ``model``.

        A measurement of two networks that share modules has a watcher for each, and leaves both alone.
        """
        return self._measured in (None, model) and not modules.isdisjoint(self.model.modules())


@contextmanager
def unseen(model: nn.Module, by_all_but: Watcher | None = None) -> Iterator[None]:
    """Hide passes of ``model`` inside this block from the watchers that exist already, except ``by_all_but``."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for watcher in list(_WATCHERS):
            if watcher is not by_all_but and watcher.is_foreign(model, modules):
                stack.enter_context(watcher.ignoring_calls())
        stack.callback(_MEASURED.reset, _MEASURED.set(model))
        yield
