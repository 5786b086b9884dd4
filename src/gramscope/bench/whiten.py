"""What whitening costs: a step of GramWhitened against torch.optim.Muon and against the SGD it wraps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Muon, Optimizer

from gramscope.bench.timing import Row, compare
from gramscope.linalg.procrustes import nearest_with_gram
from gramscope.linalg.products import has_bfloat16
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


def run(device: torch.device | str = "cpu", seconds: float = 4.0) -> list[Row]:
    """Time one optimizer step on one matrix of each shape, the ways in alternation.

    A CPU without bfloat16 instructions emulates Muon's products, which takes minutes for large matrices: these are left out.
    The weight starts as ``nn.Linear`` starts it. The gradients are those of four batches of 64 random samples, in turn.

    Args:
        device: where to run.
        seconds: time for each case.
    """
    rows: list[Row] = []
    emulated = torch.device(device).type == "cpu" and not has_bfloat16(torch.device(device))
    for case in CASES:
        if emulated and case.k > _EMULATED:
            continue
        goal = case.cpu_goal if torch.device(device).type == "cpu" else case.other_goal
        for step in STEPS:
            ways: dict[str, Callable[[], object]] = {
                "Muon": _stepper(case, step, device, lambda W: Muon([W], lr=1e-3)),
                "GramWhitened(SGD)": _stepper(case, step, device, lambda W: GramWhitened(_sgd(W))),
                "SGD": _stepper(case, step, device, _sgd),
            }
            few = emulated or case.k > 1024
            took = compare(
                ways,
                device=device,
                seconds=seconds,
                warm_up=1 if few else 3,
                least=1 if few else 3,
                calls=1 if few else 24,
            )
            for name, time in took.items():
                whitened, ratio = name.startswith("GramWhitened"), time / took["Muon"]
                rows.append(
                    Row(
                        case=f"{case.k}×{case.d}, step {step:g} ‖W‖",
                        method=name,
                        milliseconds=1e3 * time,
                        baseline="Muon",
                        ratio=ratio,
                        goal=f"≤ {goal:.1f}" if whitened else "",
                        met=ratio <= goal if whitened else None,
                        note=_accuracy(case, step, device) if whitened else "",
                    )
                )
    return rows


def _accuracy(case: Case, step: float, device: torch.device | str) -> str:
    """How exact the Gram of the tenth whitened step is, and by how much the step exceeds the shortest one with that Gram."""
    seen: list[Tensor] = []
    optimizers: list[GramWhitened] = []

    def make(W: Tensor) -> Optimizer:
        inner = _sgd(W)
        inner.register_step_pre_hook(lambda *_: seen.append(W.detach().clone()))
        inner.register_step_post_hook(lambda *_: seen.append(W.detach().clone()))
        optimizers.append(GramWhitened(inner))
        optimizers[0].register_step_post_hook(lambda *_: seen.append(W.detach().clone()))
        return optimizers[0]

    once = _stepper(case, step, device, make)
    for _ in range(10):
        seen.clear()
        once()
    before, proposed, after = seen
    wanted, got = (W.double().mT @ W.double() for W in (proposed, after))
    (estimate,) = optimizers[0].excess.values()
    note = f"Gram off by {(got - wanted).norm() / wanted.norm():.0e}, excess distance estimated {100 * estimate:.2f} %"
    if case.k > _DECOMPOSED:
        return note
    least = (nearest_with_gram(before.double(), proposed.double(), "svd") - before).norm()
    return f"{note}, measured {100 * ((after.double() - before).norm() / least - 1):.2f} %"


def _sgd(W: Tensor) -> SGD:
    return SGD([W], lr=1.0)


def _stepper(
    case: Case, step: float, device: torch.device | str, make: Callable[[Tensor], Optimizer]
) -> Callable[[], object]:
    """A function that takes one optimizer step on a fresh weight, with gradients that move it by ``step`` of its norm."""
    generator = torch.Generator().manual_seed(0)
    W = ((2 * torch.rand(case.k, case.d, generator=generator) - 1) / case.d**0.5).to(device).requires_grad_()
    gradients = []
    for _ in range(4):
        delta, h = (torch.randn(64, n, generator=generator) for n in (case.k, case.d))
        gradients.append((delta.mT @ h).to(device))
    mean = torch.stack(gradients).mean(0)  # without it the weight comes back after every four steps
    size = step * float(W.detach().norm())
    gradients = [(D - mean) * (size / (D - mean).norm()) for D in gradients]
    optimizer = make(W)
    turn = 0

    def once() -> None:
        nonlocal turn
        W.grad = gradients[turn % len(gradients)]
        turn += 1
        optimizer.step()

    return once
