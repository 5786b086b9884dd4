"""Steps of FreeMuon and VCL beside SGD, AdamW and Muon: time, memory, and on a GPU whether CUDA graphs take them.

It needs torch and numpy alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.optimizer_peers import muon
from benchmarks.optimizer_tasks import CharacterGPT, VisionTransformer
from benchmarks.timing import Row, compare, peak_extra_bytes, ratio_row
from benchmarks.training import Pair, train
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
        seconds: time for the methods on each net; the exact solver takes three steps more.
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
    steps = {method: _stepper(case, make, device)[1] for method, make in methods.items()}
    took = compare(steps, device=device, seconds=seconds, warm_up=2, least=2, calls=32)
    if vcl:
        slow = {method: _stepper(case, make, device)[1] for method, make in EXACT.items()}
        took |= compare(slow, device=device, seconds=0.0, warm_up=1, least=3)
    label = f"step, {name}, batch {case.batch}"
    yield from (ratio_row(label, method, took, "Muon") for method in took if method != "FreeMuon")
    yield ratio_row(label, "FreeMuon", took, "Muon", at_most=TIME_GOAL)


def _memory(name: str, case: Case, device: torch.device | str) -> Iterator[Row]:
    """The peak of memory in a step above what was in use before, over the memory of the weights."""
    for method in ("Muon", "FreeMuon"):
        net, step = _stepper(case, METHODS[method], device, keep_gradients=True)
        for _ in range(3):
            step()
        optimizers = step.optimizers
        sizes = [p.numel() * p.element_size() for p in net.parameters()]
        extra = peak_extra_bytes(lambda own=optimizers: [o.step() for o in own], device)  # type: ignore[misc]
        goal = max(MEMORY_GOAL, max(sizes) / sum(sizes))
        share = extra / sum(sizes)
        met = {"goal": f"≤ {goal:.2f}", "met": share <= goal} if method == "FreeMuon" else {}
        note = f"weights {sum(sizes) / 1e6:.1f} MB, the largest {max(sizes) / 1e6:.1f} MB"
        yield Row(f"memory of an update, {name}", method, extra / 1e6, "weights", share, note=note, unit="MB", **met)  # type: ignore[arg-type]


def _graphs(device: torch.device | str) -> Iterator[Row]:
    """Whether an update can be captured in a CUDA graph, and whether its replay does what the update itself does."""
    ways: dict[str, Make] = {
        "FreeMuon": METHODS["FreeMuon"],
        "VCL recursive": RECURSIVE["VCL recursive"],
        "GramWhitened(SGD)": lambda net: [GramWhitened(SGD(net.parameters(), lr=0.05), net)],
    }
    for method, make in ways.items():
        net, step = _stepper(CASES["3072→256"], make, device)
        for _ in range(3):
            step()
        try:
            off, note = _replayed(net, step), ""
        except Exception as error:  # whatever forbids the capture is the result
            off, note = float("inf"), str(error).splitlines()[0]
        note = note or f"replayed and usual steps differ by {off:.0e} of the step"
        yield Row("CUDA graph of an update, 3072→256", method, 0.0, "", 0.0, "captured", off < 1e-3, note)


def _replayed(net: nn.Module, step: Step) -> float:
    """Distance of a replayed update from the usual one, over the length of the usual one."""
    weights = [p.detach().clone() for p in net.parameters()]
    states = [copy.deepcopy(o.state_dict()) for o in step.optimizers]
    for optimizer in step.optimizers:
        optimizer.step()
    usual = torch.cat([(p - w).flatten() for p, w in zip(net.parameters(), weights, strict=True)]).detach()
    with torch.no_grad():
        for p, w in zip(net.parameters(), weights, strict=True):
            p.copy_(w)
    for optimizer, state in zip(step.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for optimizer in step.optimizers:
            optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    replayed = torch.cat([(p - w).flatten() for p, w in zip(net.parameters(), weights, strict=True)]).detach()
    return float((replayed - usual).norm() / usual.norm())
