"""Steps in several processes: whole matrices divided among them, and matrices that are sharded over them.

whole (DistributedDataParallel)   the owner corrects a matrix and sends it to all: k·d numbers
sharded                           the parts before and after the step are gathered on an owner, which corrects the matrix and
                                  sends each process its part back: 3·k·d numbers, also in the owner's memory

So are the directions of FreeMuon, for which the mean of gradients is gathered in place of the two. Owners are balanced by cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange, balanced, is_sharded
from gramscope.errors import GramscopeError, InputError, NumericalError
from gramscope.optim.checks import check_gradients
from gramscope.optim.weight_matrix import WeightMatrix

Item = TypeVar("Item")


def why_not_sharded(matrix: WeightMatrix) -> str:
    """Why the matrix of a sharded parameter cannot be worked on; empty where it can."""
    placements: Sequence[Any] = matrix.parameter.placements  # type: ignore[attr-defined]
    if matrix.part:
        return "is a projection of attention whose parameter is sharded; its rows belong to several matrices"
    if sum(p.is_shard() for p in placements) > 1 or any(p.is_partial() for p in placements):
        return f"is sharded as {placements}; one sharded dimension is supported, Shard(0) or Shard(1), beside replicas"
    return ""


def shards(parameter: Any) -> tuple[Exchange | None, int]:
    """The processes over which a ``DTensor`` is sharded (None where every process has all of it), and the sharded axis."""
    for index, placement in enumerate(parameter.placements):
        if placement.is_shard():
            group = parameter.device_mesh.get_group(index)
            return (Exchange(group) if group.size() > 1 else None), placement.dim
    return None, 0


def local(tensor: Any) -> Tensor:
    """This process's part of a tensor, without a copy."""
    found: Tensor = tensor.to_local().detach() if is_sharded(tensor) else tensor
    return found


def by_processes(exchanges: Iterable[tuple[Item, Exchange | None]]) -> list[tuple[Exchange, list[Item]]]:
    """The items of each group of processes; those without one are left out."""
    groups: dict[str, tuple[Exchange, list[Item]]] = {}
    for item, exchange in exchanges:
        if exchange is not None:
            groups.setdefault(exchange.group.group_name, (exchange, []))[1].append(item)
    return list(groups.values())


def over_shards(
    values: Tensor, parameters: Sequence[Tensor], reduce: Callable[[Exchange, Tensor], None] = Exchange.add
) -> Tensor:
    """One value per parameter, reduced over the processes that hold parts of it."""
    found = ((i, shards(p)[0] if is_sharded(p) else None) for i, p in enumerate(parameters))
    for exchange, places in by_processes(found):
        index = torch.tensor(places, dtype=torch.int64, device=values.device)
        part = values[index]
        reduce(exchange, part)
        values = values.index_copy(0, index, part)
    return values


def check_together(
    gradients: Mapping[Tensor, str], exchanges: Sequence[Exchange], device: torch.device
) -> dict[str, float]:
    """The norms of this process's parts of gradients, by name; an error in one process is raised in all.

    Args:
        gradients: the names of parameters, those without a gradient too.
        exchanges: the groups of processes.
        device: of what they send.
    """
    norms: dict[str, float] = {}
    error: GramscopeError | None = None
    try:
        norms = check_gradients((name, local(p.grad)) for p, name in gradients.items() if p.grad is not None)
    except (NumericalError, InputError) as raised:
        error = raised
    for exchange in exchanges:
        exchange.raise_together(error, device)
    if error is not None:
        raise error
    return norms


def divided(
    matrices: Sequence[WeightMatrix],
    correct: Callable[[Sequence[WeightMatrix]], list[tuple[WeightMatrix, Tensor]]],
    exchange: Exchange,
) -> list[Callable[[], object]]:
    """Corrections of whole matrices, each computed by its owner; the functions write them and send them to all processes."""
    costs: dict[int, float] = defaultdict(float)
    for matrix in matrices:
        costs[id(matrix.parameter)] += cost(matrix)
    owner = dict(zip(costs, balanced(list(costs.values()), exchange.size), strict=True))
    mine = [matrix for matrix in matrices if owner[id(matrix.parameter)] == exchange.rank]
    found, error = [], None
    try:
        found = correct(mine)
    except Exception as raised:  # the others would wait for this process
        error = raised
    exchange.raise_together(error, matrices[0].parameter.device)

    def write() -> None:
        for matrix, weights in found:
            matrix.assign(weights)
        for p in dict.fromkeys(matrix.parameter for matrix in matrices):
            exchange.send_from(owner[id(p)], p.data)

    return [write]


def sharded(
    matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor], solve: Callable[[Tensor, Tensor], Tensor]
) -> list[Callable[[], object]]:
    """Functions that write the corrections of matrices whose parameters are sharded."""
    found: list[Callable[[], object]] = []
    exchanges = [(matrix, shards(matrix.parameter)[0]) for matrix in matrices]
    for matrix, exchange in exchanges:
        if exchange is None:
            stacks = [_stack(matrix, local(x)) for x in (before[matrix.parameter], matrix.parameter)]
            found.append(_write(matrix, matrix.native(solve(*stacks).reshape(matrix.shape))))
    for exchange, members in by_processes(exchanges):
        found += _gathered(members, before, solve, exchange)
    return found


def cost(matrix: WeightMatrix) -> float:
    """Multiplications of a correction, up to a constant."""
    k, d = matrix.shape[-2:]
    return float(matrix.shape.numel()) * min(k, d)


def _gathered(
    matrices: Sequence[WeightMatrix],
    before: dict[Tensor, Tensor],
    solve: Callable[[Tensor, Tensor], Tensor],
    exchange: Exchange,
) -> list[Callable[[], object]]:
    """Each owner corrects one matrix at a time, all owners at once."""
    owners = balanced([cost(matrix) for matrix in matrices], exchange.size)
    queues = [[m for m, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in range(exchange.size)]
    found: list[Callable[[], object]] = []
    for number in range(max(map(len, queues))):
        turn = [(rank, queue[number]) for rank, queue in enumerate(queues) if number < len(queue)]
        stacks: list[Tensor] = []
        for owner, matrix in turn:
            parts = [gather(local(x), x, owner, exchange) for x in (before[matrix.parameter], matrix.parameter)]
            stacks += [_stack(matrix, part) for part in parts if part is not None]
        new: Tensor | None = None
        error: Exception | None = None
        try:
            new = solve(*stacks) if stacks else None
        except NumericalError as raised:
            name = queues[exchange.rank][number].name
            error = NumericalError(f"{name}: {raised}; all parameters have their old values again")
        except Exception as raised:  # the others would wait for this process
            error = raised
        exchange.raise_together(error, turn[0][1].parameter.device)
        for owner, matrix in turn:
            own = new if owner == exchange.rank else None
            native = None if own is None else matrix.native(own.reshape(matrix.shape))
            found.append(_write(matrix, scatter(native, matrix.parameter, owner, exchange)))
    return found


def _stack(matrix: WeightMatrix, whole: Tensor) -> Tensor:
    """A parameter's values as a stack of matrices."""
    values = matrix.view(whole)
    return values.unsqueeze(0) if values.ndim == 2 else values


def gather(part: Tensor, like: Any, owner: int, exchange: Exchange) -> Tensor | None:
    """The whole tensor on ``owner``, None elsewhere, from every process's part of it, sharded as ``like``."""
    axis = shards(like)[1]
    n = like.shape[axis]
    rows = part.movedim(axis, 0)
    length = -(-n // exchange.size)  # DTensor gives the last processes fewer rows, or none
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    if owner != exchange.rank:
        exchange.gather_on(owner, padded, None)
        return None
    whole = rows.new_empty(exchange.size * length, *rows.shape[1:])
    exchange.gather_on(owner, padded, torch.split(whole, length))
    return whole[:n].movedim(0, axis)


def scatter(
    whole: Tensor | None, like: Any, owner: int, exchange: Exchange, dtype: torch.dtype | None = None
) -> Tensor:
    """This process's part of a tensor that ``owner`` has, sharded as ``like`` and of its dtype unless given."""
    axis, part = shards(like)[1], local(like)
    n = like.shape[axis]
    length = -(-n // exchange.size)
    rows = part.movedim(axis, 0)
    mine = rows.new_empty(length, *rows.shape[1:], dtype=dtype)
    pieces = None
    if whole is not None:
        padded = rows.new_zeros(exchange.size * length, *rows.shape[1:], dtype=dtype)
        padded[:n] = whole.movedim(axis, 0)
        pieces = torch.split(padded, length)
    exchange.scatter_from(owner, mine, pieces)
    return mine[: len(rows)].movedim(0, axis)


def _write(matrix: WeightMatrix, part: Tensor) -> Callable[[], object]:
    """Writes this process's part of a sharded parameter."""
    return lambda: local(matrix.parameter).copy_(part)
