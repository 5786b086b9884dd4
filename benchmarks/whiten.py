"""What whitening costs: a step of GramWhitened against torch.optim.Muon and against the SGD it wraps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import SGD, Muon, Optimizer

from benchmarks.timing import Row, compare
from gramscope.optim.orthogonalise import has_bfloat16
from gramscope.optim.procrustes import nearest_with_gram
from gramscope.optim.whitening import GramWhitened


@dataclass(frozen=True)
class Case:
    """A weight ``[k, d]`` and the most a step may cost relative to Muon's, on the CPU and elsewhere."""

    k: int
    d: int
    cpu_goal: float = 1.5
    other_goal: float = 1.5


CASES = (Case(256, 3072), Case(1024, 1024), Case(64, 576), Case(4096, 4096, cpu_goal=2.0, other_goal=3.0))
#: by how much of its norm a step moves the weight: late in training, and early at large learning rates
STEPS = (5e-4, 2e-2)
#: larger matrices are left out where bfloat16 is emulated
_EMULATED = 256
#: larger matrices are not decomposed to find the least distance
_DECOMPOSED = 1024


def run(device: torch.device | str = "cpu", seconds: float = 10.0) -> Iterator[Row]:
    """Time one optimizer step on one matrix of each shape, the ways in alternation.

    A CPU without bfloat16 instructions emulates Muon's products, which takes minutes for large matrices: these are left out.
    The weight starts as ``nn.Linear`` starts it. The gradients are those of four batches of 64 random samples, in turn.

    Args:
        device: where to run.
        seconds: time for each shape and size of step; a warm-up and one step of each way are taken in any case.
    """
    cpu = torch.device(device).type == "cpu"
    emulated = cpu and not has_bfloat16(torch.device(device))
    for case, step in itertools.product(CASES, STEPS):
        if not (emulated and case.k > _EMULATED):
            yield from _compared(case, step, device, seconds, case.cpu_goal if cpu else case.other_goal)


def _compared(case: Case, step: float, device: torch.device | str, seconds: float, goal: float) -> Iterator[Row]:
    W, gradients = _problem(case, step, device)
    whitened = _Stepper(W, gradients, lambda W: GramWhitened(SGD([W], lr=1.0)))
    ways = {
        "Muon": _Stepper(W, gradients, lambda W: Muon([W], lr=1e-3)),
        "GramWhitened(SGD)": whitened,
        "SGD": _Stepper(W, gradients, lambda W: SGD([W], lr=1.0)),
    }
    calls = 1 if case.k > 1024 else 4  # in one measurement, so that waiting for the device counts less
    took = compare(ways, device=device, seconds=seconds, warm_up=calls, least=1, calls=calls)
    for name, time in took.items():
        ratio, label = time / took["Muon"], f"{case.k}×{case.d}, step {step:g} ‖W‖"
        row = Row(label, name, 1e3 * time, "Muon", ratio)
        if ways[name] is whitened:
            row = replace(row, goal=f"≤ {goal:.1f}", met=ratio <= goal, note=_accuracy(whitened))
        yield row


class _Stepper:
    """Takes one optimizer step at each call, on a weight of its own and with the gradients in turn."""

    def __init__(self, W: Tensor, gradients: Sequence[Tensor], make: Callable[[Tensor], Optimizer]) -> None:
        self.W = W.clone().requires_grad_()
        self.optimizer = make(self.W)
        self._gradients = itertools.cycle(gradients)

    def __call__(self) -> None:
        self.W.grad = next(self._gradients)
        self.optimizer.step()


def _accuracy(whitened: _Stepper) -> str:
    """By how much one more step is longer than the shortest with its Gram, and the Gram's error."""
    before = whitened.W.detach().clone()
    whitened()
    assert whitened.W.grad is not None
    proposed, after = before - whitened.W.grad, whitened.W.detach().double()
    wanted = proposed.double().mT @ proposed.double()
    error = float((after.mT @ after - wanted).norm() / wanted.norm())
    measured = ""
    if len(before) <= _DECOMPOSED:
        least = (nearest_with_gram(before.double(), proposed.double(), "svd") - before).norm()
        measured = f"excess distance {100 * float((after - before).norm() / least - 1):.2f} %; "
    return f"{measured}Gram off by {error:.0e}"


def _problem(case: Case, step: float, device: torch.device | str) -> tuple[Tensor, list[Tensor]]:
    """A weight, and gradients that move it by ``step`` of its norm and, in four steps, back to about where it was."""
    generator = torch.Generator().manual_seed(0)
    W = (2 * torch.rand(case.k, case.d, generator=generator) - 1) / case.d**0.5
    batches = [[torch.randn(64, n, generator=generator) for n in (case.k, case.d)] for _ in range(4)]
    gradients = torch.stack([delta.mT @ h for delta, h in batches])
    gradients -= gradients.mean(0)
    gradients *= step * W.norm() / torch.linalg.matrix_norm(gradients, keepdim=True)
    return W.to(device), list(gradients.to(device))
