"""What whitening costs: a step of GramWhitened against torch.optim.Muon and against the SGD it wraps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Muon, Optimizer

from gramscope.bench.timing import Row, compare
from gramscope.optim.whitening import GramWhitened

#: (k, d) of the weight, and the most a step may cost relative to Muon's on the CPU and elsewhere
SHAPES = (((256, 3072), 1.0, 1.5), ((1024, 1024), 1.5, 1.5), ((64, 576), 1.5, 1.5))


def run(device: torch.device | str = "cpu", seconds: float = 4.0) -> list[Row]:
    """Time one optimizer step on one matrix of each shape, the ways in alternation.

    The weight starts as ``nn.Linear`` starts it, and the gradient is that of a batch of 64 random samples, redrawn from
    a few so that momentum does not freeze. Learning rates move the weight by about 1e-3 of its norm a step.

    Args:
        device: where to run.
        seconds: time for each shape.
    """
    rows: list[Row] = []
    for (k, d), cpu_goal, other_goal in SHAPES:
        ways: dict[str, Callable[[], object]] = {
            "Muon": _stepper(k, d, device, lambda W: Muon([W], lr=1e-3)),
            "GramWhitened(SGD)": _stepper(k, d, device, lambda W: GramWhitened(_sgd(W))),
            "SGD": _stepper(k, d, device, _sgd),
        }
        # so many calls have a decomposition or two among them
        took = compare(ways, device=device, seconds=seconds, warm_up=3, least=3, calls=24)
        goal = cpu_goal if torch.device(device).type == "cpu" else other_goal
        for name, time in took.items():
            ratio = time / took["Muon"]
            judged = name.startswith("GramWhitened")
            rows.append(
                Row(
                    case=f"{k}×{d}",
                    method=name,
                    milliseconds=1e3 * time,
                    baseline="Muon",
                    ratio=ratio,
                    goal=f"≤ {goal:.1f}" if judged else "",
                    met=ratio <= goal if judged else None,
                    note=f"Gram off by {_gram_error(k, d, device):.0e}" if judged else "",
                )
            )
    return rows


def _gram_error(k: int, d: int, device: torch.device | str) -> float:
    """``‖W⁺ᵀW⁺ − W₂ᵀW₂‖/‖W₂ᵀW₂‖`` of one whitened step, in float64."""
    seen: list[Tensor] = []

    def make(W: Tensor) -> Optimizer:
        inner = _sgd(W)
        inner.register_step_post_hook(lambda *_: seen.append(W.detach().double()))
        optimizer = GramWhitened(inner)
        optimizer.register_step_post_hook(lambda *_: seen.append(W.detach().double()))
        return optimizer

    _stepper(k, d, device, make)()
    wanted, got = (W.mT @ W for W in seen)
    return float((got - wanted).norm() / wanted.norm())


def _sgd(W: Tensor) -> SGD:
    return SGD([W], lr=1e-2, momentum=0.9)


def _stepper(k: int, d: int, device: torch.device | str, make: Callable[[Tensor], Optimizer]) -> Callable[[], object]:
    """A function that takes one optimizer step on a fresh weight with gradients of the size a mean loss has."""
    generator = torch.Generator().manual_seed(0)
    W = ((2 * torch.rand(k, d, generator=generator) - 1) / d**0.5).to(device).requires_grad_()
    gradients = []
    for _ in range(4):
        delta, h = torch.randn(64, k, generator=generator), torch.randn(64, d, generator=generator)
        D = delta.mT @ h
        gradients.append((D * (1e-2 * W.detach().cpu().norm() / D.norm())).to(device))
    optimizer = make(W)
    turn = 0

    def step() -> None:
        nonlocal turn
        W.grad = gradients[turn % len(gradients)]
        turn += 1
        optimizer.step()

    return step
