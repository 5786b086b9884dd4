"""Metrics in one of two processes: ``RANK STORE``; each process sees half of the batches, rank 1 of the second pass none."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from gramscope.distributed.exchange import leave_together
from gramscope.integrations.torchmetrics import LinearCKA, NeuralCollapse, Surrogate, TargetLinearity


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    return torch.randn(60, 4, generator=generator) + labels[:, None], labels


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    H, y = data()
    metrics = MetricCollection([TargetLinearity(4, 3), Surrogate(4, 3), NeuralCollapse(4, 3)])
    cka = LinearCKA(4, 2)
    batches = [(0, 7), (20, 60)] if rank == 0 else [(7, 20)]
    for i, j in batches:
        metrics.update(H[i:j], y[i:j])
        cka.update(H[i:j], H[i:j, :2] ** 2)
    values = {**metrics.compute(), "LinearCKA": cka.compute()}
    print(*(f"{float(value)!r}" for _, value in sorted(values.items())))
    alone = TargetLinearity(4, 3)
    if rank == 0:  # the other process has seen nothing
        alone.update(H, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics: compute before update
        print(float(alone.compute()))
    leave_together()


if __name__ == "__main__":
    main()
