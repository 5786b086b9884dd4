"""What whitening costs: a step of GramWhitened against torch.optim.Muon and against the SGD it wraps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Muon, Optimizer

from gramscope.bench.timing import Row, compare
from gramscope.optim.whitening import GramWhitened


@dataclass(frozen=True)
class Case:
    """A weight ``[k, d]``, how fast it moves, and the most a step may cost relative to Muon's, on the CPU and elsewhere."""

    k: int
    d: int
    speed: int = 1
    cpu_goal: float | None = 1.5
    other_goal: float | None = 1.5

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.k}×{self.d}" + ("" if self.speed == 1 else f", {self.speed} × as fast")


CASES = (
    Case(256, 3072, cpu_goal=1.0),
    Case(1024, 1024),
    Case(64, 576),
    Case(1024, 1024, speed=8, cpu_goal=None, other_goal=None),
)


def run(device: torch.device | str = "cpu", seconds: float = 4.0) -> list[Row]:
    """Time one optimizer step on one matrix of each shape, the ways in alternation.

    The weight starts as ``nn.Linear`` starts it, and the gradient is that of a batch of 64 random samples, redrawn from
    a few so that momentum does not freeze. A step moves the weight by 5e-4 of its norm, in the last case by eight times that,
    as early in training at large learning rates.

    Args:
        device: where to run.
        seconds: time for each case.
    """
    rows: list[Row] = []
    for case in CASES:
        ways: dict[str, Callable[[], object]] = {
            "Muon": _stepper(case, device, lambda W: Muon([W], lr=1e-3)),
            "GramWhitened(SGD)": _stepper(case, device, lambda W: GramWhitened(_sgd(W))),
            "SGD": _stepper(case, device, _sgd),
        }
        # so many calls have renewals of the basis, or a decomposition or two, among them
        took = compare(ways, device=device, seconds=seconds, warm_up=3, least=3, calls=24)
        goal = case.cpu_goal if torch.device(device).type == "cpu" else case.other_goal
        for name, time in took.items():
            ratio = time / took["Muon"]
            whitened = name.startswith("GramWhitened")
            rows.append(
                Row(
                    case=case.name,
                    method=name,
                    milliseconds=1e3 * time,
                    baseline="Muon",
                    ratio=ratio,
                    goal=f"≤ {goal:.1f}" if whitened and goal else "",
                    met=ratio <= goal if whitened and goal else None,
                    note=f"Gram off by {_gram_error(case, device):.0e}" if whitened else "",
                )
            )
    return rows


def _gram_error(case: Case, device: torch.device | str) -> float:
    """``‖W⁺ᵀW⁺ − W₂ᵀW₂‖/‖W₂ᵀW₂‖`` of one whitened step, in float64."""
    seen: list[Tensor] = []

    def make(W: Tensor) -> Optimizer:
        inner = _sgd(W)
        inner.register_step_post_hook(lambda *_: seen.append(W.detach().double()))
        optimizer = GramWhitened(inner)
        optimizer.register_step_post_hook(lambda *_: seen.append(W.detach().double()))
        return optimizer

    _stepper(case, device, make)()
    wanted, got = (W.mT @ W for W in seen)
    return float((got - wanted).norm() / wanted.norm())


def _sgd(W: Tensor) -> SGD:
    return SGD([W], lr=1e-2, momentum=0.9)


def _stepper(case: Case, device: torch.device | str, make: Callable[[Tensor], Optimizer]) -> Callable[[], object]:
    """A function that takes one optimizer step on a fresh weight with gradients of the size a mean loss has."""
    generator = torch.Generator().manual_seed(0)
    W = ((2 * torch.rand(case.k, case.d, generator=generator) - 1) / case.d**0.5).to(device).requires_grad_()
    gradients = []
    for _ in range(4):
        delta, h = (torch.randn(64, n, generator=generator) for n in (case.k, case.d))
        D = delta.mT @ h
        gradients.append((D * (1e-2 * case.speed * W.detach().cpu().norm() / D.norm())).to(device))
    optimizer = make(W)
    turn = 0

    def step() -> None:
        nonlocal turn
        W.grad = gradients[turn % len(gradients)]
        turn += 1
        optimizer.step()

    return step
