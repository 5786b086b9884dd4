"""Statements of [Gram] about target linearity and its surrogate, each beside the true value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, Rows, as_float_tensor, check_pair, check_range, spans
from gramscope.linalg.ridge import check_ridge, fit_rows, singular_values
from gramscope.measures.linearity import checked, cross_product, fit_linear, target_rows
from gramscope.measures.virtual import matrices


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
class SurrogateStep:
    """The surrogate's change in one gradient step, true and predicted.

    Args:
        before: ``S = ‖W HᵀY‖_F²``.
        change: ``S⁺ − S`` of the step ``W − γD``, exact.
        first_order: its part linear in γ.
        predicted: [Gram] Theorem 3's prediction of that part.
    """

    before: float
    change: float
    first_order: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over true change."""
        return self.predicted / self.change if self.change else float("nan")


def surrogate_step(W: Array, D: Array, H: Array, Y: Array, e: Array, yhat: Array, gamma: float) -> SurrogateStep:
    """The exact ``S⁺ − S = −2γ⟨WHᵀY, DHᵀY⟩ + γ²‖DHᵀY‖²`` beside [Gram] Theorem 3's ``2γ tr(ŶᵀY · YᵀH · HᵀE)``.

    For one target the prediction reads ``2γ (ŷᵀy)(eᵀHHᵀy)``. It is exact at a readout without bias; at hidden layers it
    rests on ``h_jᵀ∇f(h_i) ≈ f(h_j)`` and is often far off: that is why both are given.

    Args:
        W: the layer's weight ``[k, d]``.
        D: gradient of the summed loss ``[k, d]``.
        H: the layer's inputs ``[n, d]``.
        Y: labels or float targets.
        e: ``−∂L_i/∂ŷ_i [n, c]`` (or ``[n]``).
        yhat: the network's outputs ``[n, c]`` (or ``[n]``).
        gamma: learning rate γ.

    >>> W, H, y = torch.tensor([[1.0]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([3.0, -3.0])
    >>> yhat = (H @ W.T).flatten()
    >>> e = y - yhat
    >>> step = surrogate_step(W, -(e @ H)[None], H, y, e, yhat, gamma=0.1)
    >>> round(step.predicted - step.first_order, 9), step.change > step.first_order
    (0.0, True)
    """
    (weight, gradient), _ = matrices(W=W, D=D)
    if weight.dim() != 2:
        raise InputError(f"W must be one matrix [k, d], got shape {tuple(weight.shape)}")
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    errors, outputs = _columns(e, "e"), _columns(yhat, "yhat")
    for other in (targets, errors, outputs):
        check_pair(features, other)
    if features.width != weight.shape[1] or errors.width != outputs.width or errors.width != targets.width:
        raise InputError(
            f"W has {weight.shape[1]} inputs and H {features.width} features; Y, e and yhat have {targets.width}, "
            f"{errors.width} and {outputs.width} columns, which must agree"
        )
    HtY, HtE, FtY = cross_product(features, targets), cross_product(features, errors), cross_product(outputs, targets)
    S, moved = weight @ HtY, gradient @ HtY
    first = -2 * gamma * (S * moved).sum()
    predicted = 2 * gamma * (FtY @ HtY.mT @ HtE).trace()
    change = first + gamma**2 * moved.square().sum()
    found = check_range(torch.stack([S.square().sum(), change, first, predicted]), "the change of the surrogate")
    return SurrogateStep(*found.tolist())


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
    outputs = _columns(yhat, "yhat")
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


def _columns(x: Array, name: str) -> Rows:
    tensor = as_float_tensor(x, name)
    return Rows(tensor[:, None] if tensor.dim() == 1 else tensor, name)
