"""Full-batch gradient descent on bias-free ReLU nets ([NFA] §2), many nets at once, with what the NFA needs at each step.

Nets are plain stacks of weights with leading axes, here ``[scales, seeds]``; a seed has its own data and its own draw of
the initial weights, which the initialisation scales share up to their factor. Training is in float32, measuring in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramscope.theory.montecarlo import AppliedMLP
from gramscope.theory.montecarlo import apply_mlp as apply_mlp
from gramscope_lab.data import load
from gramscope_lab.data.seeds import generator

Weights = list[Tensor]


@dataclass(frozen=True)
class Task:
    """Inputs and targets of every seed: ``x [seeds, n, d]``, ``y [seeds, n]``, and a test part."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def chain_monomials(
    seeds: Sequence[int], *, n: int, n_test: int, d: int, rank: int, alpha: float | None, device: torch.device
) -> Task:
    """The chain monomial of unit deviation on Gaussian inputs, one draw per seed; ``alpha`` as in λ_k = 1/(1+k^α)."""
    options: dict[str, Any] = {"n_train": n, "n_test": n_test, "d": d, "rank": rank, "alpha": alpha}
    sets = [load("chain-monomial", seed=seed, **options) for seed in seeds]
    parts = ("x_train", "y_train", "x_test", "y_test")
    tensors = [torch.stack([getattr(data, part) for data in sets]).to(device) for part in parts]
    return Task(tensors[0], tensors[1].squeeze(-1), tensors[2], tensors[3].squeeze(-1))


def initial_weights(
    d: int,
    width: int,
    depth: int,
    scales: Sequence[float],
    seeds: Sequence[int],
    device: torch.device,
    *,
    scaled: int = 1,
) -> Weights:
    """``W_ij ~ N(0, s/fan-in)``: ``[scales, seeds, fan-out, fan-in]`` a layer.

    s is one of ``scales`` in the first ``scaled`` layers and 1 above.
    """
    sizes = [d, *[width] * depth, 1]
    weights = []
    for layer in range(depth + 1):
        shape = (sizes[layer + 1], sizes[layer])
        draws = [
            torch.randn(shape, generator=generator(seed, "nfa", layer), dtype=torch.float64) * sizes[layer] ** -0.5
            for seed in seeds
        ]
        factors = torch.tensor(scales if layer < scaled else [1.0] * len(scales), dtype=torch.float64).sqrt()
        weights.append((factors[:, None, None, None] * torch.stack(draws)).to(device, torch.float32))
    return weights


def losses(weights: Weights, passed: AppliedMLP, task: Task) -> dict[str, Tensor]:
    """Mean squared errors of every net on the training set, whose pass is given, and on the test set."""
    return {
        "train_loss": (passed.outputs - task.y).square().mean(-1),
        "test_loss": (apply_mlp(weights, task.x_test).outputs - task.y_test).square().mean(-1),
    }


def descend(weights: Weights, passed: AppliedMLP, y: Tensor, lr: float) -> Weights:
    """One step of gradient descent on ``(1/2n) Σ (f − y)²``: ``D = (1/n) Jᵀ diag(f − y) H``.

    With the ½ the loss derivative is the residual, as in [NFA] §3.1. Without it the published step size 0.05 is beyond
    the stability limit for initialisation scales near 1.
    """
    slope = (passed.outputs - y).unsqueeze(-1) / y.shape[-1]
    return [w - lr * ((j * slope).mT @ h) for w, j, h in zip(weights, passed.tangents, passed.inputs, strict=True)]


def covariance(tangents: Tensor, reference: Tensor | None = None) -> Tensor:
    """``K = (1/n) Σ J_iᵀJ_i``, or with the tangents at initialisation K̄ of the differences: ``[…, k, k]``."""
    j = tangents.double() if reference is None else tangents.double() - reference
    return j.mT @ j / j.shape[-2]
