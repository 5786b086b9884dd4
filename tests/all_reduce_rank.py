"""One of two processes that collect a part each, add up and compare with the whole: all_reduce_rank.py RANK STORE.

A process of its own, not a fork of the tests': a fork of a process with threads may find a lock taken for good.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import gramscope as gs
from cases import BY_NAME
from comparing import assert_same


def main(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, x, y = BY_NAME["mlp"].make()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    options = {"jacobians": True, "residuals": True, "outputs": "1"}
    reduced = gs.collect(model, (x[rows], y[rows]), F.cross_entropy, **options).all_reduce()
    assert_same(reduced, gs.collect(model, (x, y), F.cross_entropy, **options))
    print("same")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
