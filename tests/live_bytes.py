"""Count the bytes of the tensors that are alive while some code runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this context ``now`` is the size of the tensors that were made in it and are alive, ``peak`` the largest so far.

    Workspaces inside a torch function are not seen.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     x = torch.ones(1000) + torch.ones(1000)
    >>> live.now, live.peak
    (4000, 12000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {_storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage_id(leaf) not in before:
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
