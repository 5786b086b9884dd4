"""VCL in several processes: each computes the steps of the layers that it owns and sends the new weights to the others.

Every process sees a part of the batch, and ``DistributedDataParallel`` averages the gradients. So D comes from ``.grad``, and a
step sends, for a matrix of k outputs, 2k numbers to tell how the gradient was scaled, ``Σ δδᵀ`` (k²) to the owner where the γ²
term is wanted, and the new weights (k·d) from the owner to all. Only the owner keeps the state of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange, balanced
from gramscope.errors import LayerError, NumericalError
from gramscope.optim.vcl.gradients import Gatherer, Reduced, relative_distance
from gramscope.optim.vcl.matrix_step import Proposal
from gramscope.optim.vcl.matrix_trainer import MatrixTrainer, propose_all

#: gradients of two processes may differ by this many roundings before they count as different
_ROUNDINGS = 1e4


def owners(units: Sequence[MatrixTrainer], processes: int) -> list[int]:
    """The process that owns each unit, balanced by the cost of its step; the parts of one packed parameter stay together."""
    cost: dict[int, float] = {}
    for unit in units:
        key = id(unit.weight.parameter)
        cost[key] = cost.get(key, 0.0) + step_cost(unit)
    owner = dict(zip(cost, balanced(list(cost.values()), processes), strict=True))
    return [owner[id(unit.weight.parameter)] for unit in units]


def step_cost(unit: MatrixTrainer) -> float:
    """Multiplications of a full step, up to a constant: a decomposition of m directions and products with k × d matrices."""
    k, d = unit.weight.shape[-2:]
    m = d if unit.solver == "exact" else unit.rank
    return unit.weight.shape[:-2].numel() * (float(m) ** 3 + float(k) * d * m)


def active_units(units: Sequence[MatrixTrainer], exchange: Exchange) -> list[MatrixTrainer]:
    """The units that some process has a gradient for, with the sums over processes that do not need an owner.

    Raises:
        LayerError: gradients are not averaged over processes, or their batches differ in size. All processes raise it.
    """
    gatherers = [unit.gatherer for unit in units]
    responses = [gatherer.responses() for gatherer in gatherers]
    averages = _averages(responses, exchange)
    numbers = torch.tensor([_numbers(gatherer) for gatherer in gatherers], dtype=torch.float64)
    apart = [
        relative_distance(now, mean).double().cpu() for (_, now), (_, mean) in zip(responses, averages, strict=True)
    ]
    apart_or_zero = torch.stack(apart).nan_to_num(0.0)  # the owner reports gradients that are not finite
    numbers = torch.cat([numbers, apart_or_zero.unsqueeze(1)], 1).to(gatherers[0].weight.parameter.device)
    exchange.largest(numbers)
    found = []
    for unit, (then, _), (busy, seen, most, least, odd, rows, distance) in zip(
        units, averages, numbers.tolist(), strict=True
    ):
        if not busy:
            continue
        _check(unit.weight.name, unit.gatherer, seen, most, -least, distance)
        correction = None
        if odd:
            correction = unit.gatherer.correction(most)
            if correction is None:
                correction = torch.zeros(unit.weight.shape, dtype=unit.gatherer.dtype, device=then.device)
        unit.gatherer.reduced = Reduced(
            most * exchange.size, int(rows) * exchange.size, then, unit.gatherer.sigma(), correction
        )
        found.append(unit)
    if not found:
        raise LayerError(
            f"VCL layer {units[0].weight.name!r} has no gradient in any process, and no other has: run backward() of a loss "
            "that depends on the layers before step()"
        )
    return found


def propose_own(
    units: Sequence[MatrixTrainer],
    owner: Sequence[int],
    states: Sequence[Mapping[str, Any]],
    gamma: float,
    exchange: Exchange,
    problem: NumericalError | None,
) -> dict[MatrixTrainer, Proposal]:
    """The steps of the units that this process owns, computed but not written; ``problem`` is why it can take none.

    Raises:
        NumericalError: a step failed in some process; all raise this or its own error, and nothing has been changed.
    """
    for unit, rank in zip(units, owner, strict=True):
        assert unit.gatherer.reduced is not None
        for part in (unit.gatherer.reduced.sigma, unit.gatherer.reduced.correction):
            if part is not None:
                exchange.add_on(rank, part)
    own = [(unit, state) for unit, state, rank in zip(units, states, owner, strict=True) if rank == exchange.rank]
    proposals: list[Proposal] = []
    error: Exception | None = problem
    try:
        proposals = propose_all([unit for unit, _ in own], [state for _, state in own], gamma)
    except Exception as raised:  # the others would wait for this process
        error = raised
    exchange.raise_together(error, units[0].weight.parameter.device)
    return {unit: proposal for (unit, _), proposal in zip(own, proposals, strict=True)}


def send_weights(units: Sequence[MatrixTrainer], owner: Sequence[int], exchange: Exchange) -> None:
    """Give all processes the weights of the owners, each parameter once."""
    sent: set[int] = set()
    for unit, rank in zip(units, owner, strict=True):
        for parameter in unit.weight.parameters:
            if id(parameter) not in sent:
                sent.add(id(parameter))
                exchange.send_from(rank, parameter.data)


def _averages(responses: Sequence[tuple[Tensor, Tensor]], exchange: Exchange) -> list[tuple[Tensor, Tensor]]:
    """The means over all processes of pairs of tensors, sent together."""
    dtype = torch.promote_types(responses[0][0].dtype, torch.float32)
    flat = torch.cat([part.flatten().to(dtype) for pair in responses for part in pair])
    exchange.add(flat)
    parts = iter(torch.split(flat / exchange.size, [part.numel() for pair in responses for part in pair]))
    return [
        (next(parts).reshape(then.shape).to(then.dtype), next(parts).reshape(now.shape).to(now.dtype))
        for then, now in responses
    ]


def _numbers(gatherer: Gatherer) -> list[float]:
    """Whether there is a gradient, whether it was seen, the first factor, its negative, whether another one differs, rows."""
    factors = gatherer.factors
    first = factors[0] if factors else None
    return [
        float(not gatherer.idle),
        float(bool(factors)),
        -torch.inf if first is None else first,
        -torch.inf if first is None else -first,
        float(any(factor != first for factor in factors)),
        float(gatherer.count),
    ]


def _check(name: str, gatherer: Gatherer, seen: float, most: float, least: float, distance: float) -> None:
    if not seen:
        raise LayerError(
            f"VCL layer {name!r} has a gradient but no process saw it in a forward pass. VCL must be made before the model "
            "runs, and the layer must be called, or its weight used by F.linear, a product or a convolution"
        )
    tolerance = _ROUNDINGS * torch.finfo(torch.promote_types(gatherer.weight.parameter.dtype, torch.float32)).eps
    if not distance <= tolerance:
        raise LayerError(
            f"VCL layer {name!r}: the gradients of the processes differ (by {distance:.1e} of their size). Train the model in "
            "torch.nn.parallel.DistributedDataParallel, whose last backward pass before step() is outside no_sync(), or make "
            "gs.VCL(..., process_group=False) where every process trains a model of its own"
        )
    if most != least:
        raise LayerError(
            f"VCL layer {name!r}: the processes' batches have different sizes (factors from {least:g} to {most:g}), so the "
            "average of their mean losses is not the mean over all samples. Give every process equally many samples, or divide "
            "summed losses by one number and give that number as reduction="
        )
