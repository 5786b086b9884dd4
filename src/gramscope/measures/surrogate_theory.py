"""Statements of [Gram] about target linearity and its surrogate, each beside the true value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, Rows, as_float_tensor, check_pair, spans
from gramscope.linalg.ridge import check_ridge, fit_rows, singular_values
from gramscope.measures.linearity import checked, cross_product, fit_linear, target_rows


@dataclass(frozen=True)
class LinearityBound:
    """[Gram] Theorem 2: a lower bound of target linearity through the surrogate.

    Args:
        bound: ``1 − λ²(M+m)²‖Y‖⁴ / (4Mm²(S + λ‖Y‖²)‖Y−ȳ‖²)``; often negative, that is vacuous.
        target_linearity: the true value.
        slack: true value − bound ≥ 0.
        surrogate: ``S = tr(YᵀGY)``.
        smallest: m, the smallest eigenvalue of ``G + λI``.
        largest: M, the largest.
    """

    bound: float
    target_linearity: float
    slack: float
    surrogate: float
    smallest: float
    largest: float


def linearity_bound(H: Array, Y: Array, ridge: float) -> LinearityBound:
    """The bound of [Gram] Theorem 2 with ``G = HHᵀ``; for many targets with Frobenius norms, which it allows unchanged.

    Args:
        H: features ``[n, d]``.
        Y: labels or float targets.
        ridge: λ > 0.

    >>> result = linearity_bound(torch.eye(2), torch.tensor([1.0, -1.0]), ridge=1.0)
    >>> round(result.bound, 12), round(result.target_linearity, 12)
    (0.75, 0.75)
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    ridge = check_ridge(ridge)
    if ridge == 0.0:
        raise InputError("the bound needs ridge > 0: with ridge = 0 the smallest eigenvalue of G + λI may be zero")
    truth = float(checked(fit_rows(features, targets, ridge)).explained())
    eigenvalues = singular_values(features).square()
    # G is n×n: beyond the min(n, d) singular values of H its eigenvalues are zero.
    smallest = ridge + (float(eigenvalues[-1]) if features.n <= features.width else 0.0)
    largest = ridge + float(eigenvalues[0])
    S = float(cross_product(features, targets).square().sum())
    square = sum(float(block.square().sum()) for block in targets.blocks())
    total = square - targets.n * float(targets.mean().square().sum())
    # λ²(M+m)² / (4Mm²(S + λ‖Y‖²)), without large intermediate products
    ratio = (ridge / smallest * (1 + smallest / largest)) ** 2 / (4 * (S / largest + ridge / largest * square))
    bound = 1.0 - ratio * square * (square / total)
    return LinearityBound(bound, truth, truth - bound, S, smallest, largest)


@dataclass(frozen=True)
class MovingTarget:
    """[Gram] B.4: ``‖Y − Ŷ‖ ≤ ‖Y − Y_ols‖ + ‖Y_ols − Ŷ‖``, Y_ols the best linear fit from the penultimate features.

    Args:
        error: ``‖Y − Ŷ‖_F`` of the network.
        features: ``‖Y − Y_ols‖_F``, what the features cannot express linearly.
        chase: ``‖Y_ols − Ŷ‖_F``, how far the network is from its moving target.
    """

    error: float
    features: float
    chase: float

    @property
    def slack(self) -> float:
        """Right side minus left side, ≥ 0."""
        return self.features + self.chase - self.error


def moving_target(H: Array, Y: Array, yhat: Array, ridge: float = 0.0, intercept: bool = False) -> MovingTarget:
    """Split a network's error into what its features lack and what its readout has not fitted yet ([Gram] B.4).

    Args:
        H: penultimate features ``[n, d]``.
        Y: labels (centred one-hot, so the outputs should be trained on that) or float targets.
        yhat: the network's outputs ``[n, c]`` (or ``[n]``).
        ridge: λ of the linear fit (the paper uses 0.01).
        intercept: fit a constant too.

    >>> H = torch.tensor([[1.0], [2.0], [3.0]])
    >>> result = moving_target(H, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    >>> round(result.features, 9), round(result.chase, 4)
    (0.0, 3.7417)
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    given = as_float_tensor(yhat, "yhat")
    outputs = Rows(given[:, None] if given.dim() == 1 else given, "yhat")
    check_pair(features, outputs)
    if outputs.width != targets.width:
        raise InputError(f"yhat has {outputs.width} columns, Y has {targets.width}")
    fit = fit_linear(H, Y, ridge, intercept)
    sums = torch.zeros(3, dtype=torch.float64, device=fit.beta.device)
    for start, stop in spans(features.n, features.width + targets.width):
        y, f = targets.block(start, stop), outputs.block(start, stop)
        linear = fit.predict_block(features.block(start, stop))
        sums += torch.stack([(y - f).square().sum(), (y - linear).square().sum(), (linear - f).square().sum()])
    return MovingTarget(*sums.sqrt().tolist())
