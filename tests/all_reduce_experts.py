"""One of two processes that see different experts, weights or options: all_reduce_experts.py RANK STORE.

A process of its own, not a fork of the tests': a fork of a process with threads may find a lock taken for good.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from comparing import assert_same
from gramscope.errors import InputError
from gramscope.statistics.result import Statistics

OPTIONS = {"jacobians": True, "residuals": True, "outputs": ["experts.1", "embed"]}


class Experts(nn.Module):
    """Each sample goes to the expert that its last input names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.r = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.embed(x[:, :4]), x.new_zeros(x.shape[0], 5)
        for index, expert in enumerate(self.experts):
            mine = x[:, 4] == index
            if mine.any():
                z = z.index_put((mine.nonzero()[:, 0],), expert(h[mine]))
        return self.r(torch.tanh(z))


def routed() -> tuple[nn.Module, Tensor, Tensor]:
    """Twelve samples: the first five all of expert 0, the last three of expert 2 and 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x[:, 4] = torch.tensor([0.0] * 5 + [1, 0, 1, 1] + [2, 2, 0])
    model = Experts().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    return model, x, torch.arange(12) % 3


def attempt(statistics: Statistics) -> None:
    """Print the error that adding up these statistics ends in."""
    try:
        statistics.all_reduce()
        print("no error")
    except InputError as error:
        print("InputError", *(what for what in ("different weights", "different options") if what in str(error)))


def main(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, x, y = routed()
    rows = slice(0, 7) if rank == 0 else slice(7, 12)
    reduced = gs.collect(model, (x[rows], y[rows]), F.cross_entropy, **OPTIONS).all_reduce()
    assert_same(reduced, gs.collect(model, (x, y), F.cross_entropy, **OPTIONS))
    print("same")
    other = gs.collect(model, (x[rows], y[rows]), F.cross_entropy, features=rank == 0)
    with torch.no_grad():
        model.r.weight += rank
    attempt(gs.collect(model, (x[rows], y[rows]), F.cross_entropy))
    attempt(other)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
