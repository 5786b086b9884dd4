"""Time per step of the CIFAR-10 MLP (3072–256–10) in one process and in several, with SGD and with VCL.

GRAMSCOPE_DATA=folder OMP_NUM_THREADS=2 python studies/vcl_processes.py
GRAMSCOPE_DATA=folder OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 studies/vcl_processes.py

Every run sees the same global batches of 64 samples, so that the losses must agree. Times are medians over the steps after
the first ones; "update" is the optimizer's part, in which VCL exchanges sums and weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gramscope as gs
from gramscope.distributed.exchange import leave_together
from gramscope_lab.data import load


def main() -> None:
    """Time every method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = load("cifar10", download=False)
    count = given.steps * given.batch
    x, y = data.x_train[:count].flatten(1), data.y_train[:count]
    share = given.batch // size
    rows = [slice(i + rank * share, i + (rank + 1) * share) for i in range(0, count, given.batch)]
    methods: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        "FreeMuon": gs.FreeMuon,
        "VCL": gs.VCL,
    }
    for name, make in methods.items():
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(3072, 256), nn.GELU(), nn.Linear(256, 10))
        model = DistributedDataParallel(model) if size > 1 else model
        whole, update, loss = run(model, make(model), [(x[part], y[part]) for part in rows])
        if size > 1:
            dist.all_reduce(loss)
        if rank == 0:
            text = f"{size} process{'es' * (size > 1)} × {torch.get_num_threads()} threads  {name:<13}"
            print(
                f"{text} step {whole:6.2f} ms, update {update:6.2f} ms, last loss {loss.item() / size:.6f}", flush=True
            )
    if size > 1:
        leave_together()


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
) -> tuple[float, float, Tensor]:
    """Median milliseconds of a step and of its update, and the last loss."""
    steps, updates = [], []
    loss = torch.zeros(())
    for x, y in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        steps.append(1e3 * (end - start))
        updates.append(1e3 * (end - middle))
    skipped = len(steps) // 4
    return statistics.median(steps[skipped:]), statistics.median(updates[skipped:]), loss.detach()


if __name__ == "__main__":
    main()
