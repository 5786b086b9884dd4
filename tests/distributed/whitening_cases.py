"""gs.GramWhitened and gs.GramFixed under DistributedDataParallel against one process on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from vcl_cases import assert_same_bits, error, global_batches, mine, train, weights

import gramscope as gs
from gramscope.errors import NumericalError


class Net(nn.Module):
    """A wide, a square and a tall matrix, and an attention layer with a packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(7, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.square, self.tall, self.out = nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(x)).unsqueeze(1)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        result: torch.Tensor = self.out(torch.tanh(self.tall(torch.tanh(self.square(h[:, 0])))))
        return result


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(2)
    return Net().to(dtype)


def wrapped(kind: Any, model: nn.Module, **options: Any) -> Any:
    root = model.module if isinstance(model, DistributedDataParallel) else model
    return kind(torch.optim.SGD(root.parameters(), lr=0.1, momentum=0.9), model, **options)


def case_equals_one_process(folder: Path) -> None:
    data = global_batches(6)
    groups = [data[:1], data[1:3], data[3:]]  # the later ones accumulate under no_sync
    for kind in (gs.GramWhitened, gs.GramFixed):
        for method in ("auto", "svd"):
            alone, ddp = network(), DistributedDataParallel(network())
            train(alone, wrapped(kind, alone, method=method, process_group=False), groups)
            several = wrapped(kind, ddp, method=method)
            train(ddp, several, [[mine(*batch) for batch in group] for group in groups])
            assert_same_bits(weights(ddp.module))
            assert error(weights(ddp.module), weights(alone)) < 1e-10


def case_processes_divide_the_work(folder: Path) -> None:
    """Each matrix is corrected in one process alone."""
    ddp = DistributedDataParallel(network())
    optimizer = wrapped(gs.GramWhitened, ddp)
    done = 0
    corrected = optimizer.corrected

    def counting(before: torch.Tensor, proposed: torch.Tensor) -> Any:
        nonlocal done
        done += len(proposed)
        return corrected(before, proposed)

    optimizer.corrected = counting
    train(ddp, optimizer, [[mine(*batch)] for batch in global_batches(1)])
    counts = torch.tensor(done)
    dist.all_reduce(counts)
    assert int(counts) == 8
    assert done < 8


def case_a_failed_step_changes_nothing_anywhere(folder: Path) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = wrapped(gs.GramWhitened, ddp)
    x, y = mine(*global_batches(1)[0])
    F.cross_entropy(ddp(x), y).backward()
    with torch.no_grad():
        ddp.module.tall.weight.grad.fill_(1e307)
    optimizer.param_groups[0]["lr"] = 1e300
    with pytest.raises(NumericalError):
        optimizer.step()
    chosen = [p for p in ddp.module.parameters() if p.dim() > 1]
    now = torch.cat([p.detach().flatten() for p in chosen])
    old = torch.cat([p.detach().flatten() for p in network().parameters() if p.dim() > 1])
    assert torch.equal(now, old)


def case_a_gradient_that_is_not_finite_in_one_process(folder: Path) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = wrapped(gs.GramWhitened, ddp)
    x, y = mine(*global_batches(1)[0])
    F.cross_entropy(ddp(x), y).backward()
    if dist.get_rank() == 0:
        ddp.module.tall.weight.grad[0, 0] = torch.nan
    with pytest.raises(NumericalError, match=r"the gradient of tall\.weight has NaN"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ddp.module.parameters(), network().parameters(), strict=True))
