"""Training a net by one or several optimizers: the loop of the comparisons of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Pair = tuple[Tensor, Tensor]


def train(
    net: nn.Module,
    optimizers: Sequence[Optimizer],
    loss: Callable[[nn.Module, Pair], Tensor],
    pair: Pair,
    batch: int,
    steps: int,
    generator: torch.Generator,
    falling: int | None = None,
) -> Iterator[int]:
    """Train on whole batches in random order and yield the number of steps after each.

    With ``falling`` all rates fall linearly to 0 over this many steps.
    """
    schedules = [LambdaLR(o, lambda step: max(0.0, 1 - step / falling)) for o in optimizers if falling is not None]
    order: list[Tensor] = []
    for step in range(steps):
        order = order or shuffled(pair[0], batch, generator)
        index = order.pop()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(net, (pair[0][index], pair[1][index])).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        yield step + 1


def shuffled(x: Tensor, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Indices of whole batches in random order."""
    whole = len(x) // batch * batch
    return list(torch.split(torch.randperm(len(x), generator=generator)[:whole].to(x.device), batch))
