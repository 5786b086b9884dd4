"""The cost of a step of VCL and FreeMuon against SGD, AdamW and Muon, and the time VCL takes to SGD's best accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from benchmarks.timing import Row, compare, ratio_row, synchronize
from benchmarks.training import Pair, shuffled, train
from gramscope.errors import InputError
from gramscope.optim.free_muon import FreeMuon
from gramscope.optim.vcl import VCL
from gramscope_lab.data.named_sets import load

_BATCH = 64
Make = Callable[[nn.Sequential], list[Optimizer]]


def _linear(d: int, k: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d, k, bias=False), nn.GELU(), nn.Linear(k, 10))


def _conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


#: name of a net with one hidden layer → the net, and the shape of its inputs
SHAPES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "784→256": (partial(_linear, 784, 256), (784,)),
    "3072→256": (partial(_linear, 3072, 256), (3072,)),
    "3072→1024": (partial(_linear, 3072, 1024), (3072,)),
    "conv 3×3 64→64": (_conv, (64, 16, 16)),
}
#: what is timed; the exact solver apart, because it is slow
FAST: dict[str, Make] = {
    "SGD": lambda net: [SGD(net.parameters(), lr=0.05)],
    "AdamW": lambda net: [AdamW(net.parameters(), lr=1e-3)],
    "FreeMuon": lambda net: [FreeMuon(net)],
    "VCL recursive": lambda net: [VCL(net, gamma=0.1, solver="recursive")],
    "Muon": lambda net: [Muon(net[0].parameters(), lr=0.005), AdamW(net[2].parameters(), lr=1e-3)],
}
EXACT: dict[str, Make] = {"VCL exact": lambda net: [VCL(net, gamma=0.1, solver="exact")]}
#: on a CPU or not: goals for 3072→256 as (method, baseline, at most so many times the baseline)
_GOALS = {
    True: (("VCL recursive", "Muon", 1.2), ("VCL recursive", "VCL exact", 1 / 80), ("FreeMuon", "Muon", 1.0)),
    False: (("VCL recursive", "SGD", 6.0), ("VCL recursive", "VCL exact", 1 / 10), ("FreeMuon", "Muon", 1.3)),
}


def run(device: torch.device | str = "cpu", seconds: float = 20.0) -> Iterator[Row]:
    """Time whole training steps (forward, backward, update) of every method on every shape, the methods in alternation.

    Args:
        device: where to run.
        seconds: time for the fast methods of each shape; the exact solver gets as much again for three steps.
    """
    for shape in SHAPES:
        yield from _steps(shape, device, seconds)
    yield from _time_to_accuracy(device)


def _steps(shape: str, device: torch.device | str, seconds: float) -> list[Row]:
    case = f"step, {shape}, batch {_BATCH}"
    matrices = len(SHAPES[shape][1]) == 1
    fast = {
        name: _stepper(shape, device, make)
        for name, make in FAST.items()
        if matrices or name != "Muon"  # torch's Muon takes matrices only
    }
    exact = {name: _stepper(shape, device, make) for name, make in EXACT.items()}
    took = compare(fast, device=device, seconds=seconds, warm_up=2, least=2, calls=32)
    took |= compare(exact, device=device, seconds=0.0, warm_up=1, least=3)
    rows = [ratio_row(case, name, took, "SGD") for name in took]
    if shape == "3072→256":
        goals = _GOALS[torch.device(device).type == "cpu"]
        rows += [ratio_row(case, name, took, baseline, at_most=limit) for name, baseline, limit in goals]
    return rows


def _stepper(shape: str, device: torch.device | str, make: Make) -> Callable[[], object]:
    """A function that trains one step on a new batch each time; the inputs have few directions, as natural images do."""
    build, inputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    net = _initialised(build(), generator).to(device)
    pair = _samples(24 * _BATCH, inputs, generator, device)
    return train(net, make(net), _loss, pair, _BATCH, 10**9, generator).__next__


def _loss(net: nn.Module, pair: Pair) -> Tensor:
    return F.cross_entropy(net(pair[0]), pair[1])


@torch.no_grad()
def _initialised(net: nn.Sequential, generator: torch.Generator) -> nn.Sequential:
    """Weights uniform within ±1/√inputs, as in ``nn.Linear``, from a given generator."""
    for module in net:
        for parameter in module.parameters(recurse=False):
            bound = module.weight[0].numel() ** -0.5  # type: ignore[index]
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    return net


def _samples(n: int, inputs: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Pair:
    """Inputs in [0, 1] whose variances fall like those of images, and labels that depend on them."""
    size = int(torch.tensor(inputs).prod())
    waves = torch.arange(1, size + 1).reciprocal().sqrt()
    x = torch.fft.irfft(torch.fft.rfft(torch.randn(n, size, generator=generator)) * waves[: size // 2 + 1], n=size)
    x = (0.5 + 2 * x).clamp(0, 1).reshape(n, *inputs)
    return x.to(device), (x.flatten(1)[:, :5] > 0.5).long().sum(1).to(device)


# --- time to SGD's best ------------------------------------------------------------------------------------------

_EPOCHS = 20
#: epochs over which VCL's rates fall linearly to 0
_FALLING = (1, 2)


def _time_to_accuracy(device: torch.device | str) -> Iterator[Row]:
    """Seconds of training, tests not counted, until the test accuracy first reaches SGD's best of 20 epochs.

    There are no rows where CIFAR-10 is not found (``GRAMSCOPE_DATA``).
    """
    images = _cifar10(device)
    if images is None:
        return
    trace = _trace(*images, lambda net: SGD(net.parameters(), lr=0.05), _EPOCHS)
    best = max(accuracy for _, accuracy in trace)
    sgd_time = next(seconds for seconds, accuracy in trace if accuracy == best)
    case = f"time to {100 * best:.1f} % on CIFAR-10, 3072→256"
    yield Row(case, "SGD", 1e3 * sgd_time, "SGD", 1.0, note=f"best of {_EPOCHS} epochs")
    for falling in (None, *_FALLING):
        name = "VCL recursive" if falling is None else f"VCL recursive, γ falling over {falling} epochs"
        seconds, accuracy = _trace(*images, lambda net: VCL(net, gamma=1.0, solver="recursive"), falling, best)[-1]
        met = accuracy >= best and seconds <= 0.4 * sgd_time
        note = f"{100 * accuracy:.1f} % with one warm-up epoch counted"
        yield Row(case, name, 1e3 * seconds, "SGD", seconds / sgd_time, goal="≤ 0.4", met=met, note=note)


def _trace(
    pair: Pair, test: Pair, make: Callable[[nn.Sequential], Optimizer], epochs: int | None, target: float | None = None
) -> Sequence[tuple[float, float]]:
    """``(seconds so far, test accuracy)`` about four times an epoch, until the target is reached.

    VCL starts with a warm-up epoch, and with ``epochs`` its rates fall to 0 over so many.
    """
    x, y = pair
    generator = torch.Generator().manual_seed(0)
    net = _initialised(_linear(3072, 256), generator).to(x.device)
    optimizer = make(net)
    length = len(x) // _BATCH
    total = (epochs or _EPOCHS) * length
    spent, trace = 0.0, []
    start = time.perf_counter()
    if isinstance(optimizer, VCL):
        optimizer.warm_up(((x[i], y[i]) for i in shuffled(x, _BATCH, generator)), F.cross_entropy)
    falling = total if isinstance(optimizer, VCL) and epochs else None
    for step in train(net, [optimizer], _loss, pair, _BATCH, total, generator, falling):
        if step % (length // 4) == 0 or step == total:
            synchronize(x.device)
            spent += time.perf_counter() - start
            with torch.no_grad():
                accuracy = float((net(test[0]).argmax(1) == test[1]).float().mean())
            trace.append((spent, accuracy))
            if target is not None and accuracy >= target:
                break
            start = time.perf_counter()
    return trace


def _cifar10(device: torch.device | str) -> tuple[Pair, Pair] | None:
    """Training and test images as vectors in [0, 1], if the files are there; nothing is downloaded."""
    try:
        data = load("cifar10", download=False)
    except InputError:
        return None
    train = data.x_train.flatten(1).to(device), data.y_train.to(device)
    return train, (data.x_test.flatten(1).to(device), data.y_test.to(device))
