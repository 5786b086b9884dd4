"""One of two processes with unequal parts of the data: parts_of_processes.py RANK STORE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from comparing import assert_same
from gramscope.distributed.exchange import leave_together


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def failing(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from batches[:2]
    raise OSError("the disk is gone")


def main(rank: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(12) % 3
    model = nn.parallel.DistributedDataParallel(network())
    whole = gs.collect(network(), (x, y), F.cross_entropy, process_group=False)
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 12, 2)]
    for name, split in (("unequal", 4), ("empty", 6)):
        mine = batches[:split] if rank == 0 else batches[split:]
        assert_same(replace(gs.collect(model, mine, F.cross_entropy), processes=1), whole)
        print(name)
    try:
        gs.collect(model, failing(batches) if rank == 1 else batches, F.cross_entropy)
    except (OSError, RuntimeError) as error:
        assert isinstance(error, OSError) == (rank == 1)  # noqa: PT017
        print("raises:", str(error).removeprefix("process 1: "))
    if rank == 0:
        gs.measure(model, (x, y), F.cross_entropy, process_group=False)
        gs.agop(model, x, process_group=False)
    torch.distributed.barrier()
    print("alone")
    F.cross_entropy(model(x), y).backward()
    print("trains")
    leave_together()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
