"""Training speed: an epoch against its pure arithmetic and against a DataLoader, and many runs against one by one.

The data have the shapes of CIFAR-10 and random content; speed does not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.timing import Row, compare, ratio_row
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, prepare
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.stacking import StackedEngine, stack_obstacle
from gramscope_lab.training.trainer import SingleEngine, Trainer

BATCH = 64
RUNS = 25
LOADER = "DataLoader with transforms"


def run(device: str = "cpu", seconds: float = 10.0) -> Iterator[Row]:
    """All comparisons; ``seconds`` for each."""
    small = torch.device(device).type == "cpu"
    data = _images(2_560 if small else 12_800, device)
    yield from _epoch(data, device, seconds)
    for method in ("sgd", "adamw", "muon", "whiten-sgd"):
        yield from _many(method, data, device, seconds)


# -- one run ------------------------------------------------------------------------------------------------------
def _epoch(data: DataSet, device: str, seconds: float) -> list[Row]:
    """An epoch of the loop, evaluation included, against the same steps on one batch that is ready, and a loader."""
    ours, pure, loaded = _job("sgd", data, device), _job("sgd", data, device), _job("sgd", data, device)
    ready = data.x_train[:BATCH].clone(), data.y_train[:BATCH].clone()
    loader = DataLoader(_Images(data), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    times = compare(
        {
            "gramscope": lambda: Trainer(SingleEngine(ours)).run(),
            "arithmetic": _plain(pure, lambda: [ready] * pure.plan.steps),
            LOADER: _plain(loaded, lambda: loader),
        },
        device=device,
        seconds=seconds,
        warm_up=1,
    )
    note = f"CIFAR-10 MLP 3072-256-10, batch {BATCH}, {len(data.x_train):,} samples"
    bound = f"{note}; {times[LOADER] / times['arithmetic']:.1f} would be no overhead at all"
    return [
        ratio_row("epoch", "gramscope", times, "arithmetic", at_most=1.3, note=note),
        ratio_row("epoch", "arithmetic", times, "arithmetic", note=note),
        ratio_row("epoch", LOADER, times, "gramscope", at_least=4, note=bound),
    ]


def _plain(job: Job, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Callable[[], None]:
    """Forward, backward and optimizer step on each batch, nothing else."""
    (optimizer,) = build_method(job.config.method, job.model).optimizers

    def epoch() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(job.model(x.to(job.device)), y.to(job.device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return epoch


class _Images(Dataset[tuple[Tensor, int]]):
    """Images as bytes, made tensors one by one: the operations of torchvision's CIFAR10, ToTensor and Normalize."""

    MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)

    def __init__(self, data: DataSet) -> None:
        pixels = (data.x_train.cpu().clamp(0, 1) * 255).to(torch.uint8)
        self._images = pixels.permute(0, 2, 3, 1).contiguous().numpy()
        self._labels = data.y_train.tolist()
        try:
            from PIL.Image import fromarray
        except ImportError:
            fromarray = np.asarray  # type: ignore[assignment]
        self._open: Callable[[Any], Any] = fromarray

    def __len__(self) -> int:
        return len(self._labels)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        array = np.array(self._open(self._images[index]), np.uint8, copy=True)
        image = torch.from_numpy(array).permute((2, 0, 1)).contiguous().to(torch.float32).div(255).clone()
        mean, std = torch.as_tensor(self.MEAN), torch.as_tensor(self.STD)
        return image.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)), self._labels[index]


# -- many runs ----------------------------------------------------------------------------------------------------
def _many(method: str, data: DataSet, device: str, seconds: float) -> list[Row]:
    """One step of 25 runs stacked, against 25 steps one by one, after seeing that they agree."""
    jobs = [_job(method, data, device, seed) for seed in range(RUNS)]
    obstacle = stack_obstacle(jobs)
    case = f"{RUNS} runs, {method}"
    stack = None if obstacle else StackedEngine([_job(method, data, device, seed) for seed in range(RUNS)])
    singles = [SingleEngine(job) for job in jobs]
    last = singles[0].plan.steps - 1  # full batches only
    steps = {"one by one": _repeat(last, lambda step: [engine.advance(step) for engine in singles])}
    note = f"not stacked: {obstacle}"
    if stack is not None:
        difference = _difference(stack, singles, min(10, last))
        note = f"CIFAR-10 MLP, batch {BATCH}; ratio of throughputs; weights agree to {difference:.0e} after 10 steps"
        steps["stacked"] = _repeat(last, stack.advance)
    times = compare(steps, device=device, seconds=seconds, warm_up=3)
    rows = [ratio_row(case, "one by one", times, "one by one", note=note)]
    if stack is not None:
        goal = torch.device(device).type == "cuda" and method in ("sgd", "adamw", "muon")
        ratio = times["one by one"] / times["stacked"]
        facts = {"goal": "≥ 10", "met": ratio >= 10} if goal else {}
        rows.append(Row(case, "stacked", times["stacked"] * 1e3, "one by one", ratio, note=note, **facts))  # type: ignore[arg-type]
    return rows


def _difference(stack: StackedEngine, singles: Sequence[SingleEngine], steps: int) -> float:
    """Relative difference of all weights after a few steps of both."""
    for step in range(steps):
        stack.advance(step)
        for engine in singles:
            engine.advance(step)
    alone = [parameters_to_vector(engine.job.model.parameters()).detach() for engine in singles]
    together = [parameters_to_vector(job.model.parameters()).detach() for job in stack.jobs]
    ours, theirs = torch.stack(together), torch.stack(alone)
    return float((ours - theirs).norm() / theirs.norm())


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
    tables = {"data": {"name": "cifar10"}, "model": {"name": "mlp", "hidden": [256]}, "method": {"name": method}}
    config = TrainConfig.from_dict({**tables, "seeds": [seed], "batch_size": BATCH, "device": device})
    return prepare(config, f"seed-{seed}", data=data)
