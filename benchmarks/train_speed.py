"""Training speed: an epoch against its pure arithmetic, and many runs against one by one.

The data have the shapes of CIFAR-10 and random content; speed does not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Row, compare, ratio_row
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, prepare
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.stacking import StackedEngine, stack_obstacle
from gramscope_lab.training.trainer import SingleEngine, Trainer

BATCH = 64
RUNS = 25


def run(device: str = "cpu", seconds: float = 10.0) -> Iterator[Row]:
    """All comparisons; ``seconds`` for each."""
    small = torch.device(device).type == "cpu"
    data = _images(2_560 if small else 12_800, device)
    yield from _epoch(data, device, seconds)
    for method in ("sgd", "adamw", "muon", "whiten-sgd"):
        yield from _many(method, data, device, seconds)


# -- one run ------------------------------------------------------------------------------------------------------
def _epoch(data: DataSet, device: str, seconds: float) -> list[Row]:
    """An epoch of the loop, evaluation included, against the same steps on one batch that is ready."""
    ours, pure = _job("sgd", data, device), _job("sgd", data, device)
    ready = data.x_train[:BATCH].clone(), data.y_train[:BATCH].clone()
    ways = {"gramscope": lambda: Trainer(SingleEngine(ours)).run(), "arithmetic": _plain(pure, ready)}
    times = compare(ways, device=device, seconds=seconds, warm_up=1)
    note = f"CIFAR-10 MLP 3072-256-10, batch {BATCH}, {len(data.x_train):,} samples"
    return [
        ratio_row("epoch", "gramscope", times, "arithmetic", at_most=1.3, note=note),
        ratio_row("epoch", "arithmetic", times, "arithmetic", note=note),
    ]


def _plain(job: Job, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Forward, backward and optimizer step on a batch, as often as an epoch has steps, and nothing else."""
    (optimizer,) = build_method(job.config.method, job.model).optimizers

    def epoch() -> None:
        for _ in range(job.plan.steps):
            optimizer.zero_grad()
            F.cross_entropy(job.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return epoch


# -- many runs ----------------------------------------------------------------------------------------------------
def _many(method: str, data: DataSet, device: str, seconds: float) -> list[Row]:
    """One step of 25 runs stacked, against 25 steps one by one."""
    jobs = [_job(method, data, device, seed) for seed in range(RUNS)]
    obstacle = stack_obstacle(jobs)
    case = f"{RUNS} runs, {method}"
    singles = [SingleEngine(job) for job in jobs]
    last = singles[0].plan.steps - 1  # full batches only
    steps = {"one by one": _repeat(last, lambda step: [engine.advance(step) for engine in singles])}
    if not obstacle:
        stack = StackedEngine([_job(method, data, device, seed) for seed in range(RUNS)])
        steps["stacked"] = _repeat(last, stack.advance)
    times = compare(steps, device=device, seconds=seconds, warm_up=3)
    note = f"not stacked: {obstacle}" if obstacle else f"CIFAR-10 MLP, batch {BATCH}"
    rows = [ratio_row(case, name, times, "one by one", note=note) for name in times]
    if torch.device(device).type == "cuda" and not obstacle and method != "whiten-sgd":
        rows[1] = replace(rows[1], goal="≤ 0.1", met=rows[1].ratio <= 0.1)
    return rows


def _repeat(steps: int, advance: Callable[[int], Any]) -> Callable[[], None]:
    """A function that takes one of the steps at each call, from the first again after the last."""
    numbers = itertools.cycle(range(steps))
    return lambda: advance(next(numbers)) and None


# -- pieces -------------------------------------------------------------------------------------------------------
def _images(n: int, device: str) -> DataSet:
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(n, 3, 32, 32, generator=g), torch.randint(10, (n,), generator=g)
    held = n // 5  # CIFAR-10 has one test image for five to train on
    return DataSet("random images", x, y, x[:held], y[:held], classes=10).to(device)


def _job(method: str, data: DataSet, device: str, seed: int = 0) -> Job:
    tables: dict[str, Any] = {
        "data": {"name": "cifar10"},
        "model": {"name": "mlp", "hidden": [256]},
        "method": {"name": method},
    }
    tables |= {"measure": {"samples": 0}}
    config = TrainConfig.from_dict({**tables, "seeds": [seed], "batch_size": BATCH, "device": device})
    return prepare(config, f"seed-{seed}", data=data)
