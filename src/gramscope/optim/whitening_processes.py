"""Whitened updates in several processes: whole matrices divided among them, and matrices that are sharded over them.

whole (DistributedDataParallel)   the owner corrects a matrix and sends it to all: k·d numbers
rows sharded, ``Shard(0)``        the parts before and after the step are gathered on an owner, which corrects the matrix and
                                  sends each process its part back: 3·k·d numbers, also in the owner's memory
columns sharded, ``Shard(1)``     for k ≤ d, ``S = W₂W₂ᵀ`` and ``(W₁ − W₂)W₂ᵀ`` are summed on an owner (2k² numbers), which
                                  finds the rotation and sends it to all (k²), so that all have the same bits; the product with
                                  it is local

Owners are balanced by cost. Matrices sharded otherwise are gathered as if their rows were.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange, balanced, is_sharded
from gramscope.errors import NumericalError
from gramscope.layers.kinds import TransposedLinearLayer
from gramscope.optim.polar import PolarMethod, polar
from gramscope.optim.procrustes import Nearest
from gramscope.optim.weight_matrix import WeightMatrix


class Correction(NamedTuple):
    """How to write the corrected weights of a matrix, and by how much the step exceeds the shortest one."""

    name: str
    write: Callable[[], object]
    excess: float


class Roles(NamedTuple):
    """The matrix to be near to, and the one whose Gram is kept."""

    target: Tensor
    source: Tensor


#: from the weights before and after the wrapped optimizer's step to their roles
Assign = Callable[[Tensor, Tensor], Roles]
#: the nearest matrices of two stacks ``[count, k, d]``
Solve = Callable[[Tensor, Tensor], Nearest]


def why_not_sharded(matrix: WeightMatrix) -> str | None:
    """Why the matrix of a sharded parameter cannot be corrected, or None."""
    placements: Sequence[Any] = matrix.parameter.placements  # type: ignore[attr-defined]
    if matrix.part:
        return "is a projection of attention whose parameter is sharded; its rows belong to several matrices"
    if sum(p.is_shard() for p in placements) > 1 or any(p.is_partial() for p in placements):
        return f"is sharded as {placements}; one sharded dimension is supported, Shard(0) or Shard(1), beside replicas"
    return None


def shards(parameter: Any) -> tuple[Exchange | None, int]:
    """The processes over which a ``DTensor`` is sharded (None where every process has all of it), and the sharded axis."""
    for index, placement in enumerate(parameter.placements):
        if placement.is_shard():
            group = parameter.device_mesh.get_group(index)
            return (Exchange(group) if group.size() > 1 else None), placement.dim
    return None, 0


def local(tensor: Any) -> Tensor:
    """This process's part of a tensor, without a copy."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found.detach()


def divided(
    matrices: Sequence[WeightMatrix],
    correct: Callable[[Sequence[WeightMatrix]], list[tuple[WeightMatrix, Tensor, float]]],
    exchange: Exchange,
) -> list[Correction]:
    """Corrections of whole matrices, each computed by its owner; writing them sends them to all processes."""
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
    device = matrices[0].parameter.device
    exchange.raise_together(error, device)
    place = {id(matrix): i for i, matrix in enumerate(matrices)}
    excess = torch.full((len(matrices),), -math.inf, dtype=torch.float32, device=device)
    for matrix, _, value in found:
        excess[place[id(matrix)]] = value
    exchange.largest(excess)
    weights = {id(matrix): new for matrix, new, _ in found}

    def write(matrix: WeightMatrix, last: bool) -> None:
        if id(matrix) in weights:
            matrix.assign(weights[id(matrix)])
        if last:
            exchange.send_from(owner[id(matrix.parameter)], matrix.parameter.data)

    last = {id(matrix.parameter): matrix for matrix in matrices}
    return [
        Correction(matrix.name, lambda m=matrix: write(m, last[id(m.parameter)] is m), value)  # type: ignore[misc]
        for matrix, value in zip(matrices, excess.tolist(), strict=True)
    ]


def sharded(
    matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor], roles: Assign, solve: Solve, method: PolarMethod
) -> list[Correction]:
    """Corrections of matrices whose parameters are sharded."""
    found: list[Correction] = []
    groups: dict[str, tuple[Exchange, list[WeightMatrix], list[WeightMatrix]]] = {}
    for matrix in matrices:
        exchange, axis = shards(matrix.parameter)
        if exchange is None:
            new = solve(*(matrix.view(local(x)).unsqueeze(0) for x in (before[matrix.parameter], matrix.parameter)))
            found.append(_local(matrix, matrix.native(new.matrix[0]), max(new.excess)))
            continue
        _, columns, rows = groups.setdefault(exchange.group.group_name, (exchange, [], []))
        (columns if _has_columns(matrix, axis) else rows).append(matrix)
    for exchange, columns, rows in groups.values():
        found += _by_columns(columns, before, roles, method, exchange)
        found += _gathered(rows, before, solve, exchange)
    return found


def cost(matrix: WeightMatrix) -> float:
    """Multiplications of a correction, up to a constant."""
    k, d = matrix.shape[-2:]
    return float(matrix.shape.numel()) * min(k, d)


def _has_columns(matrix: WeightMatrix, axis: int) -> bool:
    """Whether processes hold columns of a wide matrix."""
    k, d = matrix.shape[-2:]
    transposed = bool(matrix.layers) and isinstance(matrix.layers[0], TransposedLinearLayer)
    return matrix.parameter.dim() == 2 and k <= d and axis == (0 if transposed else 1)


def _by_columns(
    matrices: Sequence[WeightMatrix],
    before: dict[Tensor, Tensor],
    roles: Assign,
    method: PolarMethod,
    exchange: Exchange,
) -> list[Correction]:
    if not matrices:
        return []
    owners = balanced([float(matrix.shape[-2]) ** 3 for matrix in matrices], exchange.size)
    sources, products = [], []
    for matrix, owner in zip(matrices, owners, strict=True):
        old, new = (matrix.view(local(x)).double() for x in (before[matrix.parameter], matrix.parameter))
        target, source = roles(old, new)
        both = torch.stack([source @ source.mT, (target - source) @ source.mT])
        exchange.add_on(owner, both)
        sources.append(source)
        products.append(both)
    turns: list[Tensor] = []
    error: Exception | None = None
    for matrix, owner, (S, cross) in zip(matrices, owners, products, strict=True):
        turn = torch.zeros_like(S)
        if owner == exchange.rank and error is None:
            try:
                turn = _rotation(S + cross, method, matrix.name)
            except Exception as raised:
                error = raised
        turns.append(turn)
    exchange.raise_together(error, products[0].device)
    found = []
    for matrix, owner, turn, source in zip(matrices, owners, turns, sources, strict=True):
        exchange.send_from(owner, turn)
        found.append(_local(matrix, matrix.native(source + turn @ source, local(matrix.parameter).shape), 0.0))
    return found


def _rotation(A: Tensor, method: PolarMethod, name: str) -> Tensor:
    """``polar(A) − I`` in float64."""
    if not bool(A.isfinite().all()):
        raise NumericalError(
            f"the step of {name} left NaN or infinite values; all parameters have their old values again. Lower the "
            "learning rate"
        )
    scaled = torch.ldexp(A, -torch.frexp(A.abs().amax()).exponent)
    return polar(scaled, method) - torch.eye(len(A), dtype=A.dtype, device=A.device)


def _gathered(
    matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor], solve: Solve, exchange: Exchange
) -> list[Correction]:
    """Each owner corrects one matrix at a time, all owners at once."""
    owners = balanced([cost(matrix) for matrix in matrices], exchange.size)
    queues = [[m for m, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in range(exchange.size)]
    found: list[Correction] = []
    for number in range(max(map(len, queues))):
        turn = [(rank, queue[number]) for rank, queue in enumerate(queues) if number < len(queue)]
        whole: tuple[WeightMatrix, list[Tensor]] | None = None
        for owner, matrix in turn:
            parts = [_gather(x, owner, exchange) for x in (before[matrix.parameter], matrix.parameter)]
            if owner == exchange.rank:
                whole = matrix, [part for part in parts if part is not None]
        result: Nearest | None = None
        error: Exception | None = None
        if whole is not None:
            matrix, parts_of_all = whole
            stacks = [matrix.view(x) for x in parts_of_all]
            try:
                result = solve(*(x.unsqueeze(0) if x.ndim == 2 else x for x in stacks))
            except NumericalError as raised:
                error = NumericalError(f"{matrix.name}: {raised}; all parameters have their old values again")
            except Exception as raised:
                error = raised
        device = turn[0][1].parameter.device
        exchange.raise_together(error, device)
        excess = torch.full((len(turn),), -math.inf, dtype=torch.float32, device=device)
        news = []
        for place, (owner, matrix) in enumerate(turn):
            native = None
            if owner == exchange.rank and result is not None:
                native = matrix.native(result.matrix.reshape(matrix.shape))
                excess[place] = max(result.excess)
            news.append(_scatter(native, matrix.parameter, owner, exchange))
        exchange.largest(excess)
        found += [_local(m, new, e) for (_, m), new, e in zip(turn, news, excess.tolist(), strict=True)]
    return found


def _gather(tensor: Any, owner: int, exchange: Exchange) -> Tensor | None:
    """The whole of a sharded tensor on ``owner``, None elsewhere."""
    axis, part = shards(tensor)[1], local(tensor)
    n = tensor.shape[axis]
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


def _scatter(whole: Tensor | None, like: Any, owner: int, exchange: Exchange) -> Tensor:
    """This process's part of a tensor that ``owner`` has, sharded as ``like``."""
    axis, part = shards(like)[1], local(like)
    n = like.shape[axis]
    length = -(-n // exchange.size)
    rows = part.movedim(axis, 0)
    mine = rows.new_empty(length, *rows.shape[1:])
    pieces = None
    if whole is not None:
        padded = rows.new_zeros(exchange.size * length, *rows.shape[1:])
        padded[:n] = whole.movedim(axis, 0)
        pieces = torch.split(padded, length)
    exchange.scatter_from(owner, mine, pieces)
    return mine[: len(rows)].movedim(0, axis)


def _local(matrix: WeightMatrix, part: Tensor, excess: float) -> Correction:
    """A correction of this process's part of a sharded parameter."""
    return Correction(matrix.name, lambda: local(matrix.parameter).copy_(part), excess)
