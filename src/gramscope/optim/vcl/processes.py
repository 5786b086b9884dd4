"""Algorithm 1 in several processes, each of which sees a part of the batch.

``DistributedDataParallel`` averages the gradients, so D comes from ``.grad``. For a matrix of k outputs a step sends 2k numbers
to tell how the gradient was scaled, and ``Σ δδᵀ`` (k²). Every process then takes the same step; the weights of the first one
are sent to all (k·d numbers), so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import LayerError
from gramscope.optim.vcl.gradients import Batch, GradientCollector, unseen_gradient

#: gradients of two processes may differ by this many roundings before they count as different
_ROUNDINGS = 1e4


def batches_of_all(collectors: Sequence[GradientCollector], exchange: Exchange) -> dict[GradientCollector, Batch]:
    """The gradients of all samples, of the matrices that some process has one for.

    Raises:
        LayerError: gradients are not averaged over processes, or their batches differ in size. All processes raise it.
    """
    error, factors = None, [0.0] * len(collectors)
    try:
        factors = [collector.factor or 0.0 for collector in collectors]
    except LayerError as raised:
        error = raised
    device = collectors[0].matrix.parameter.device
    exchange.raise_together(error, device)
    own = [collector.responses() for collector in collectors]
    averages = _averages(own, exchange)
    numbers = []
    for collector, factor, response, average in zip(collectors, factors, own, averages, strict=True):
        size = torch.linalg.vector_norm(average[1]).clamp_min(torch.finfo(average.dtype).tiny)
        apart = float(torch.linalg.vector_norm(response[1] - average[1]) / size)
        least = -factor if factor else -torch.inf
        numbers.append([float(not collector.idle), factor, least, float(collector.count), apart])
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    exchange.largest(shared)
    found = {}
    for collector, response, (busy, most, least, count, apart) in zip(
        collectors, averages, shared.tolist(), strict=True
    ):
        if busy:
            _check(collector, most, -least, apart)
            sigma = collector.sigma()
            exchange.add(sigma)
            found[collector] = collector.batch(most * exchange.size, response, sigma, int(count) * exchange.size)
    if not found:
        raise LayerError(
            f"{collectors[0].matrix.name} has no gradient in any process, and no other matrix has: run backward() of a loss "
            "that depends on them before step()"
        )
    return found


def _averages(responses: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """The means over all processes, sent together."""
    dtype = torch.promote_types(responses[0].dtype, torch.float32)
    flat = torch.cat([response.flatten().to(dtype) for response in responses])
    exchange.add(flat)
    parts = torch.split(flat / exchange.size, [response.numel() for response in responses])
    return [part.reshape(response.shape).to(response.dtype) for part, response in zip(parts, responses, strict=True)]


def _check(collector: GradientCollector, most: float, least: float, apart: float) -> None:
    name, dtype = collector.matrix.name, torch.promote_types(collector.matrix.parameter.dtype, torch.float32)
    if not most:
        raise LayerError(unseen_gradient(name))
    if not apart <= _ROUNDINGS * torch.finfo(dtype).eps:
        raise LayerError(
            f"{name}: the gradients of the processes differ (by {apart:.1e} of their size). Train the model in "
            "torch.nn.parallel.DistributedDataParallel, whose last backward pass before step() is outside no_sync(), or make "
            "gs.VCL(..., process_group=False) where every process trains a model of its own"
        )
    if most != least:
        raise LayerError(
            f"{name}: the processes' batches have different sizes (factors from {least:g} to {most:g}), so the average of "
            "their mean losses is not the mean over all samples. Give every process equally many samples, or divide summed "
            "losses by one number and give that number as reduction="
        )
