"""Steps of FreeMuon and VCL beside SGD, AdamW and Muon: time, memory, and on a GPU whether CUDA graphs take them.

It needs torch and numpy alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.optimizer_peers import muon
from benchmarks.optimizer_tasks import CharacterGPT, VisionTransformer
from benchmarks.timing import Row, compare, peak_extra_bytes, ratio_row
from benchmarks.training import Pair
from gramscope.errors import InputError
from gramscope.optim.free_muon import FreeMuon
from gramscope.optim.vcl import VCL
from gramscope.optim.whitening import GramWhitened
from gramscope_lab.nets import build

Make = Callable[[nn.Module], Sequence[Optimizer]]
#: what is timed on every net
METHODS: dict[str, Make] = {
    "SGD": lambda net: [SGD(net.parameters(), lr=0.05)],
    "AdamW": lambda net: [AdamW(net.parameters(), lr=1e-3)],
    "Muon": partial(muon, rate=0.005),
    "FreeMuon": lambda net: [FreeMuon(net)],
}
#: on 3072→256 alone; the exact solver apart, because it is slow
RECURSIVE: dict[str, Make] = {"VCL recursive": lambda net: [VCL(net, gamma=0.1, solver="recursive")]}
EXACT: dict[str, Make] = {"VCL exact": lambda net: [VCL(net, gamma=0.1, solver="exact")]}
#: FreeMuon's step over Muon's, and its transient memory over that of the weights
TIME_GOAL, MEMORY_GOAL = 1.15, 0.5
_CHARACTERS = 94


@dataclass(frozen=True)
class Case:
    """A net and the data it is trained on."""

    build: Callable[[torch.Generator], nn.Module]
    inputs: tuple[int, ...]
    batch: int
    text: bool = False


def _hidden_layer(generator: torch.Generator, d: int = 3072, k: int = 256) -> nn.Module:
    return build("mlp", (d,), 10, generator=generator, hidden=(k,), bias=(False, True))


#: the nets of the comparison of optimizers, and one layer
CASES = {
    "3072→256": Case(_hidden_layer, (3072,), 64),
    "GPT": Case(lambda g: CharacterGPT(_CHARACTERS, 32, g), (32,), 16, text=True),
    "ViT": Case(lambda g: VisionTransformer((1, 8, 8), 10, g), (1, 8, 8), 32),
    "ResNet": Case(lambda g: build("resnet", (1, 8, 8), 10, generator=g, widths=(8, 16), norm="batch"), (1, 8, 8), 32),
}
#: nets large enough to see memory
LARGE = {
    "3072→1024": Case(partial(_hidden_layer, k=1024), (3072,), 64),
    "GPT, width 512": Case(lambda g: CharacterGPT(_CHARACTERS, 32, g, width=512, depth=4), (32,), 16, text=True),
}


def run(device: torch.device | str = "cpu", seconds: float = 10.0) -> Iterator[Row]:
    """Time whole training steps (forward, backward, update) of every method on every net, the methods in alternation.

    Args:
        device: where to run.
        seconds: time for the methods on each net; the exact solver takes two steps more.
    """
    for name, case in CASES.items():
        yield from _times(name, case, device, seconds)
    for name, case in LARGE.items():
        yield from _memory(name, case, device)
    if torch.device(device).type == "cuda":
        yield from _graphs(device)


def _times(name: str, case: Case, device: torch.device | str, seconds: float) -> Iterator[Row]:
    vcl = name == "3072→256"
    methods = METHODS | (RECURSIVE if vcl else {})
    steps = {method: _Step(case, make, device) for method, make in methods.items()}
    took = compare(steps, device=device, seconds=seconds, warm_up=2, least=2, calls=32)
    if vcl:
        slow = {method: _Step(case, make, device) for method, make in EXACT.items()}
        took |= compare(slow, device=device, seconds=0.0, warm_up=1, least=1)
    label = f"step, {name}, batch {case.batch}"
    yield from (ratio_row(label, method, took, "Muon") for method in took if method != "FreeMuon")
    yield ratio_row(label, "FreeMuon", took, "Muon", at_most=TIME_GOAL)


class _Step:
    """A training step on the next batch at each call."""

    def __init__(self, case: Case, make: Make, device: torch.device | str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.net = case.build(generator).to(device)
        self.optimizers = make(self.net)
        x, y = _samples(case, 24 * case.batch, generator, device)
        self._batches = itertools.cycle(zip(torch.split(x, case.batch), torch.split(y, case.batch), strict=True))

    def __call__(self) -> None:
        self.gradients()
        self.update()

    def gradients(self) -> None:
        """Forward and backward."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        x, y = next(self._batches)
        F.cross_entropy(self.net(x).flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """The optimizers' part."""
        for optimizer in self.optimizers:
            optimizer.step()


def _samples(case: Case, n: int, generator: torch.Generator, device: torch.device | str) -> Pair:
    """Random characters, or inputs in [0, 1] whose variances fall like those of images, and labels that depend on them."""
    if case.text:
        x = torch.randint(_CHARACTERS, (n, *case.inputs), generator=generator)
        return x.to(device), x.roll(1, 1).to(device)
    size = math.prod(case.inputs)
    waves = torch.arange(1, size + 1).reciprocal().sqrt()
    x = torch.fft.irfft(torch.fft.rfft(torch.randn(n, size, generator=generator)) * waves[: size // 2 + 1], n=size)
    x = (0.5 + 2 * x).clamp(0, 1).reshape(n, *case.inputs)
    return x.to(device), (x.flatten(1)[:, :5] > 0.5).long().sum(1).to(device)


def _memory(name: str, case: Case, device: torch.device | str) -> Iterator[Row]:
    """The peak of memory in an update above what was in use before, over the memory of the weights."""
    for method in ("Muon", "FreeMuon"):
        step = _Step(case, METHODS[method], device)
        for _ in range(3):
            step()
        step.gradients()
        sizes = [p.numel() * p.element_size() for p in step.net.parameters()]
        extra = peak_extra_bytes(step.update, device)
        goal, share = max(MEMORY_GOAL, max(sizes) / sum(sizes)), extra / sum(sizes)
        note = f"weights {sum(sizes) / 1e6:.1f} MB, the largest {max(sizes) / 1e6:.1f} MB"
        row = Row(f"memory of an update, {name}", method, extra / 1e6, "weights", share, note=note, unit="MB")
        yield replace(row, goal=f"≤ {goal:.2f}", met=share <= goal) if method == "FreeMuon" else row


def _graphs(device: torch.device | str) -> Iterator[Row]:
    """Whether an update can be captured in a CUDA graph, and whether its replay does what the update itself does."""
    ways: dict[str, Make] = {
        "FreeMuon": METHODS["FreeMuon"],
        **RECURSIVE,
        "GramWhitened(SGD)": lambda net: [GramWhitened(SGD(net.parameters(), lr=0.05), net)],
    }
    for method, make in ways.items():
        try:
            off = _replayed(make, device)
            note = f"replayed and usual update differ by {off:.0e} of its length"
        except (RuntimeError, InputError) as error:  # whatever forbids the capture is the result
            off, note = math.inf, f"not captured: {str(error).splitlines()[0]}"
        yield Row("CUDA graph, 3072→256", method, off, "", off, "captured", off < 1e-3, note, "")


@torch.no_grad()
def _replayed(make: Make, device: torch.device | str) -> float:
    """Distance of an update that a CUDA graph replays from the usual one, over the length of the usual one."""
    usual, graphed = (_Step(CASES["3072→256"], make, device) for _ in range(2))
    with torch.enable_grad():
        for step in (usual, graphed):
            for _ in range(3):
                step()
            step.gradients()
    before = [p.clone() for p in usual.net.parameters()]
    usual.update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.update()
    graph.replay()
    both = zip(usual.net.parameters(), graphed.net.parameters(), strict=True)
    off = sum(float((a - b).square().sum()) for a, b in both)
    length = sum(float((a - b).square().sum()) for a, b in zip(usual.net.parameters(), before, strict=True))
    return math.sqrt(off / length)
