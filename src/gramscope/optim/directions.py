"""The orthogonalised directions of many weights: equal shapes together, and in several processes a share of them in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange, balanced, is_sharded
from gramscope.optim.orthogonalise import in_pieces, orthogonalise_, working_dtype
from gramscope.optim.processes import by_processes, cost, gather, scatter, shards
from gramscope.optim.weight_matrix import WeightMatrix

#: gradient, mean and the weight of the mean: ``torch.lerp`` of the three is to be orthogonalised
Lead: TypeAlias = tuple[Tensor, Tensor, float]
Matrices: TypeAlias = Mapping[Tensor, Sequence[WeightMatrix]]


def directions(leads: Mapping[Tensor, Lead], matrices: Matrices, exchange: Exchange | None) -> list[Tensor]:
    """O of each parameter, or this process's part of it where the parameter is sharded.

    Args:
        leads: of the parameters, of the shape of O.
        matrices: of each parameter.
        exchange: processes that have the same parameters; those that share a sharded one are its own.
    """
    exchanges = {p: shards(p)[0] if is_sharded(p) else exchange for p in leads}
    owners = dict(_owners(exchanges, matrices))
    mine: dict[Tensor, Lead] = {}
    for p, lead in leads.items():
        own, group = True, exchanges[p]
        if group is not None:
            own = owners[p] == group.rank
            if is_sharded(p):
                whole = gather(torch.lerp(*lead), p, owners[p], group)
                lead = lead if whole is None else (whole, whole, 0.0)
        if own:
            mine[p] = lead
    found = _orthogonalised(mine, matrices)
    for p, lead in leads.items():
        group, first = exchanges[p], matrices[p][0]
        if group is None:
            continue
        dtype = working_dtype(first.shape, lead[0].dtype, lead[0].device)
        if is_sharded(p):
            found[p] = scatter(found.get(p), p, owners[p], group, dtype)
        else:
            if p not in found:
                found[p] = torch.empty(p.shape, dtype=dtype, device=p.device)
            group.send_from(owners[p], found[p])
    return [found[p] for p in leads]


def _owners(exchanges: Mapping[Tensor, Exchange | None], matrices: Matrices) -> Iterator[tuple[Tensor, int]]:
    """The process that orthogonalises each parameter."""
    for exchange, members in by_processes(exchanges.items()):
        costs = [sum(map(cost, matrices[p])) for p in members]
        yield from zip(members, balanced(costs, exchange.size), strict=True)


def _orthogonalised(leads: Mapping[Tensor, Lead], matrices: Matrices) -> dict[Tensor, Tensor]:
    """O of whole parameters."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[WeightMatrix]] = defaultdict(list)
    for p, (grad, _, _) in leads.items():
        for matrix in matrices[p]:
            alike[matrix.shape, grad.dtype, grad.device].append(matrix)
    found: dict[Tensor, Tensor] = {}
    for (shape, dtype, device), members in alike.items():
        k, d = shape[-2:]
        own = working_dtype(shape, dtype, device)
        X = torch.empty(len(members), *shape[:-2], min(k, d), max(k, d), dtype=own, device=device)
        for matrix, x in zip(members, X, strict=True):
            grad, mean, weight = leads[matrix.parameter]
            for into, g, m in in_pieces(x.mT if k > d else x, matrix.view(grad), matrix.view(mean)):
                into.copy_(torch.lerp(g, m, weight))
        stack = orthogonalise_(X.view(-1, *X.shape[-2:])).view(X.shape)
        for matrix, x in zip(members, stack, strict=True):
            p, O = matrix.parameter, x.mT if k > d else x
            if len(shape) == 3:  # an expert without tokens takes no step
                O = O * matrix.view(leads[p][0]).any(-1).any(-1)[:, None, None]
            if len(matrices[p]) == 1:
                found[p] = matrix.native(O)
                continue
            if p not in found:
                found[p] = torch.empty(p.shape, dtype=own, device=device)
            matrix.assign(O, found[p])
    return found
