"""Everything that processes send each other goes through this class, so that it can be counted (docs/scale.md)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gramscope.errors import GramscopeError, ResultWarning

#: seconds after which a process that waits says for which others
PATIENCE = 30.0

Value = TypeVar("Value")


class Exchange:
    """The operations of one process group of at least two processes; ranks are numbers within the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def wait_for_all(self) -> None:
        """Wait until every process of the group is here; after :data:`PATIENCE` seconds a warning names those that are not.

        Each process counts its own calls in the group's store, so that the counts of all must reach this process's count. It
        goes on after the warning: the next operation of the group waits for the others, at most for the group's timeout.
        """
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store = PrefixStore(f"gramscope/{self.group.group_name}", _get_default_store())
        mine = store.add(str(self.rank), 1)
        end, pause = time.monotonic() + PATIENCE, 0.001
        while absent := [rank for rank in range(self.size) if store.add(str(rank), 0) < mine]:
            if time.monotonic() > end:
                warnings.warn(
                    f"process {self.rank} has waited {PATIENCE:g} s for processes {absent} of {self.size}: every process of "
                    "the group must make this call; process_group=False measures in one process alone",
                    ResultWarning,
                    stacklevel=2,
                )
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def read_together(self, read: Callable[[], Value], device: torch.device) -> Value:
        """``read()`` in every process; an error in one of them is raised in all (:meth:`raise_together`)."""
        try:
            value, error = read(), None
        except Exception as raised:
            value, error = None, raised
        self.wait_for_all()
        self.raise_together(error, device)
        return value  # type: ignore[return-value]

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        with _contiguous(tensor) as entries:
            dist.all_reduce(entries, dist.ReduceOp.SUM, group=self.group)

    def largest(self, tensor: Tensor) -> None:
        """Replace every number by the largest one of all processes."""
        with _contiguous(tensor) as entries:
            dist.all_reduce(entries, dist.ReduceOp.MAX, group=self.group)

    def add_on(self, owner: int, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes on ``owner``; elsewhere its values are lost."""
        with _contiguous(tensor) as entries:
            dist.reduce(entries, op=dist.ReduceOp.SUM, group=self.group, group_dst=owner)

    def send_from(self, owner: int, tensor: Tensor) -> None:
        """Replace a tensor by that of ``owner``."""
        with _contiguous(tensor) as entries:
            dist.broadcast(entries, group=self.group, group_src=owner)

    def gather_on(self, owner: int, tensor: Tensor, parts: Sequence[Tensor] | None) -> None:
        """Fill ``parts`` on ``owner`` with the tensors of all processes, which have one shape."""
        dist.gather(tensor, list(parts) if parts is not None else None, group=self.group, group_dst=owner)

    def scatter_from(self, owner: int, tensor: Tensor, parts: Sequence[Tensor] | None) -> None:
        """Fill ``tensor`` with this process's one of the ``parts`` that ``owner`` has."""
        dist.scatter(tensor, list(parts) if parts is not None else None, group=self.group, group_src=owner)

    def gather_objects(self, value: Value) -> list[Value]:
        """The values of all processes, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def object_from(self, owner: int, value: Value) -> Value:
        """The value of ``owner``."""
        holder = [value]
        dist.broadcast_object_list(holder, group=self.group, group_src=owner)
        return holder[0]

    def raise_together(self, error: Exception | None, device: torch.device) -> None:
        """Raise if any process has an error, so that no process waits for one that failed.

        Every process raises: the failed ones their own error, the others one of the same kind that names the process.
        """
        failed = torch.tensor(float(error is not None), device=device)
        self.largest(failed)
        if not failed.item():
            return
        kind = type(error) if isinstance(error, GramscopeError) else RuntimeError  # other types may not be sent
        errors = self.gather_objects(None if error is None else (kind, str(error)))
        if error is not None:
            raise error
        rank, kind, text = next((i, *found) for i, found in enumerate(errors) if found is not None)
        raise kind(f"process {rank}: {text}")


@contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in the order of its indices, written back at the end: operations of a group send memory as it lies."""
    entries = tensor.contiguous()
    yield entries
    if entries is not tensor:
        tensor.copy_(entries)
