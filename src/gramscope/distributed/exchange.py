"""Processes of ``torch.distributed`` that work together: which they are, what they send, whole weights of sharded models.

Everything that processes send goes through :class:`Exchange`, so that it can be counted (docs/scale.md).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError, LayerError, ResultWarning

#: seconds after which a process that waits says for which others
PATIENCE = 30.0

#: a process group, ``None`` for that of the model or the default one, or ``False`` for this process alone
Group: TypeAlias = "dist.ProcessGroup | Literal[False] | None"

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

    def merged(self, part: Value | None, merge: Callable[[Value, Value], Value]) -> Value:
        """The parts of all processes merged in the order of their ranks, the same in each; ``None`` counts as no part.

        Pairs of processes merge at the same time, in as many rounds as the number of processes has binary digits. An error of
        ``merge`` is raised in all.
        """
        value: Any = part
        step = 1
        while step < self.size:
            if self.rank % (2 * step):
                dist.send_object_list([value], group=self.group, group_dst=self.rank - step)
                break
            if self.rank + step < self.size:
                holder: list[Any] = [None]
                dist.recv_object_list(holder, group=self.group, group_src=self.rank + step)
                value = _merged(value, holder[0], merge)
            step *= 2
        value = self.object_from(0, value)
        if isinstance(value, GramscopeError):
            raise value
        assert value is not None
        return value  # type: ignore[no-any-return]

    def raise_together(self, error: Exception | None, device: torch.device) -> None:
        """Raise if any process has an error, so that no process waits for one that failed.

        Every process raises: the failed ones their own error, the others one of the same kind that names the process.
        """
        failed = torch.tensor(float(error is not None), dtype=torch.float32, device=device)
        self.largest(failed)
        if not failed.item():
            return
        kind = type(error) if isinstance(error, GramscopeError) else RuntimeError  # other types may not be sent
        errors = self.gather_objects(None if error is None else (kind, str(error)))
        if error is not None:
            raise error
        rank, kind, text = next((i, *found) for i, found in enumerate(errors) if found is not None)
        raise kind(f"process {rank}: {text}")


def _merged(a: Any, b: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """Both merged, or the error that one of them is or that merging them raises."""
    if isinstance(b, GramscopeError) or a is None or b is None:
        return a if b is None else b
    if isinstance(a, GramscopeError):
        return a
    try:
        return merge(a, b)
    except GramscopeError as error:
        return error


@contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in the order of its indices, written back at the end: operations of a group send memory as it lies."""
    entries = tensor.contiguous()
    yield entries
    if entries is not tensor:
        tensor.copy_(entries)


def find_exchange(process_group: Group = None, model: nn.Module | None = None) -> Exchange | None:
    """The processes to work with; ``None`` where this process works alone.

    Args:
        process_group: the group itself; ``False`` for this process alone; ``None`` for the group of a
            ``DistributedDataParallel`` model, else the default group, else (without ``init_process_group``) none.
        model: looked at where neither is given.

    >>> find_exchange() is None
    True
    """
    if process_group is False or not dist.is_available() or not dist.is_initialized():
        return None
    if process_group is None:
        process_group = dist.group.WORLD
        if isinstance(model, nn.parallel.DistributedDataParallel):
            process_group = model.process_group
    if not isinstance(process_group, dist.ProcessGroup):
        raise InputError(
            f"process_group={process_group!r}: give a torch.distributed process group that this process belongs to, False "
            "for this process alone, or None for the default group; mesh['dp'].get_group() is that of a device mesh"
        )
    return Exchange(process_group) if dist.get_world_size(process_group) > 1 else None


def balanced(costs: Sequence[float], processes: int) -> list[int]:
    """The process that does each piece: the most costly pieces first, each given to the process with the least work.

    No process gets more than 4/3 of the work of the best division (Graham 1969). The answer depends on the costs alone, so that
    all processes agree.

    >>> balanced([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    work = [0.0] * processes
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(processes), key=lambda rank: (work[rank], rank))
        owners[piece] = owner
        work[owner] += costs[piece]
    return owners


def leave_together() -> NoReturn:
    """Wait until all processes of the default group are here, then end this one at once, with status 0.

    A process that ends in the usual way may be aborted (SIGABRT): threads of gloo still release tensors, for which they ask
    for Python's lock while the interpreter goes down (https://github.com/pytorch/pytorch/issues/190489).
    ``destroy_process_group`` ends these threads only where nothing else, such as DistributedDataParallel, refers to the group,
    and its destructors may wait for the group's timeout.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# --- sharded models ---------------------------------------------------------------------------------------------------

#: where modules keep their hooks
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process holds a part."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def check_not_flattened(model: nn.Module) -> None:
    """Raise if the model is wrapped by the first FSDP, whose parameters are pieces of flattened vectors."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel" and type(module).__module__.startswith("torch."):
            raise LayerError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which keeps pieces of vectors in "
                "place of weight matrices; shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )


@contextmanager
def gathered(model: nn.Module, exchange: Exchange | None = None) -> Iterator[None]:
    """Within this the model has whole weights and runs in this process alone; other models are left as they are.

    For models sharded by ``fully_shard`` or other ``DTensor`` parameters. Every process of the mesh must enter, as the weights
    are sent to all; then each may run any number of batches. It takes the memory of the whole model in every process.

    Args:
        model: the model.
        exchange: the processes that are expected to enter.
    """
    check_not_flattened(model)
    modules = list(model.modules())
    if not any(is_sharded(p) for p in (*model.parameters(), *model.buffers())):
        yield
        return
    if exchange is not None:
        exchange.wait_for_all()
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    hidden: list[tuple[nn.Module, str, OrderedDict[int, Callable[..., Any]]]] = []
    whole: dict[int, Tensor] = {}
    try:
        for module in modules:
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()  # type: ignore[operator]
        for module in modules:
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                for name, tensor in place.items():
                    if tensor is not None and is_sharded(tensor):
                        if id(tensor) not in whole:
                            whole[id(tensor)] = _whole(tensor)
                        replaced.append((place, name, tensor))
                        place[name] = whole[id(tensor)]
            for kind in _HOOKS:
                hooks = getattr(module, kind)
                if any(_is_of_torch_distributed(hook) for hook in hooks.values()):
                    hidden.append((module, kind, hooks.copy()))
                    for key in [key for key, hook in hooks.items() if _is_of_torch_distributed(hook)]:
                        del hooks[key]
        yield
    finally:
        for place, name, tensor in replaced:
            place[name] = tensor
        for module, kind, before in hidden:
            hooks = getattr(module, kind)
            now = OrderedDict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in before.items() if key in now or _is_of_torch_distributed(hook)})
            hooks.update({key: hook for key, hook in now.items() if key not in before})


def _whole(tensor: Any) -> Tensor:
    with torch.no_grad():
        full: Tensor = tensor.detach().full_tensor()
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _is_of_torch_distributed(hook: Any) -> bool:
    """Whether torch put this hook on a module to gather its weights or to distribute its inputs and outputs."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
