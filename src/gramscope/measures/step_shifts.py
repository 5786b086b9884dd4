"""A gradient step beside its virtual covariance shift, for every step size, from one set of products.

With ``A = WᵀD + DᵀW``, ``B = DᵀD`` and ``C = WᵀΣW`` the virtual covariance shift is ``v = −γA + γ²C`` and the change of the
weight Gram ``−γA + γ²B``: all cosines and norms follow from the inner products of A, B, C and ``G = WᵀW``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import binary_exponent


@dataclass(frozen=True)
class StepShifts:
    """Inner products of A, B, C and G, each scaled by a power of two so that none overflows.

    Args:
        products: ``[4, 4]`` in float64.
        exponents: A is ``2^exponents[0]`` times the matrix behind ``products``; and so on.
        traces: of the four, ``[4]``.
        d: columns of the four, of all groups together.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> shifts = step_shifts(one, 2 * one, 4 * one)   # v = −4γ + 4γ² is the Gram's own change
    >>> shifts.cosine(0.5).item(), shifts.residual(0.5).item()
    (1.0, 0.0)
    """

    products: Tensor
    exponents: tuple[int, int, int, int]
    traces: Tensor
    d: int

    def null(self, gamma: float) -> Tensor:
        """The cosine to expect of the two if the eigenvectors of one were random: ``tr v tr s / (d ‖v‖ ‖s‖)``."""
        virtual, actual = self._combination(gamma, C=True), self._combination(gamma, B=True)
        norms = self._square(virtual).sqrt() * self._square(actual).sqrt()
        return (virtual @ self.traces) * (actual @ self.traces) / (self.d * norms)

    def cosine(self, gamma: float) -> Tensor:
        """ρ of the virtual covariance shift and the Gram's change in a step of rate γ."""
        return self._cosine(self._combination(gamma, C=True), self._combination(gamma, B=True))

    def gram_cosine(self, gamma: float) -> Tensor:
        """ρ of the virtual covariance shift and ``WᵀW``."""
        return self._cosine(self._combination(gamma, C=True), self.products.new_tensor([0.0, 0.0, 0.0, 1.0]))

    def residual(self, gamma: float) -> Tensor:
        """``γ²‖B − C‖`` over the norm of the Gram's change."""
        actual, virtual = self._combination(gamma, B=True), self._combination(gamma, C=True)
        difference = actual - virtual
        return (self._square(difference) / self._square(actual)).sqrt()

    def _combination(self, gamma: float, B: bool = False, C: bool = False) -> Tensor:
        """Coefficients of ``−γA + γ²B`` or ``−γA + γ²C``, up to one power of two."""
        part, exponent = math.frexp(gamma)
        a, b, c, _ = self.exponents
        top = max(exponent + a, 2 * exponent + max(b, c))
        terms = [
            -math.ldexp(part, exponent + a - top),
            B * math.ldexp(part**2, 2 * exponent + b - top),
            C * math.ldexp(part**2, 2 * exponent + c - top),
            0.0,
        ]
        return self.products.new_tensor(terms)

    def _square(self, x: Tensor) -> Tensor:
        return (x @ self.products @ x).clamp(min=0.0)

    def _cosine(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.products @ y) / (self._square(x).sqrt() * self._square(y).sqrt())


def step_shifts(W: Tensor, D: Tensor, Sigma: Tensor | None, input_covariance: Tensor | None = None) -> StepShifts:
    """The products of a layer, through d×d or k×k matrices, whichever are smaller; groups are diagonal blocks.

    Args:
        W: weight ``[..., k, d]``, float64.
        D: summed gradient ``[..., k, d]``.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``; may be None with ``input_covariance``.
        input_covariance: ``C = WᵀΣW [..., d, d]``, used in place of Sigma.
    """
    second = Sigma if input_covariance is None else input_covariance
    assert second is not None
    w, d, s = (int(binary_exponent(x)) for x in (W, D, second))
    W, D, second = torch.ldexp(W, _exponent(-w)), torch.ldexp(D, _exponent(-d)), torch.ldexp(second, _exponent(-s))
    exponents = (w + d, 2 * d, s if input_covariance is not None else 2 * w + s, 2 * w)
    columns = W.shape[:-2].numel() * W.shape[-1]
    if input_covariance is not None or W.shape[-2] >= W.shape[-1]:
        half = W.mT @ D
        C = second if input_covariance is not None else W.mT @ (second @ W)
        four = (half + half.mT, D.mT @ D, C, W.mT @ W)
        rows = torch.stack([x.flatten() for x in four])
        traces = torch.stack([x.diagonal(dim1=-2, dim2=-1).sum() for x in four])
        return StepShifts(rows @ rows.mT, exponents, traces, columns)
    P, Q, R = W @ W.mT, W @ D.mT, D @ D.mT
    X = P @ second
    AA, AB, AC, AG = 2 * ((P * R).sum() + (Q * Q.mT).sum()), 2 * (Q * R).sum(), 2 * (X * Q.mT).sum(), 2 * (P * Q).sum()
    BB, BC, BG = R.square().sum(), (Q * (second @ Q)).sum(), Q.square().sum()
    CC, CG, GG = (X * X.mT).sum(), (X * P).sum(), P.square().sum()
    products = torch.stack([AA, AB, AC, AG, AB, BB, BC, BG, AC, BC, CC, CG, AG, BG, CG, GG]).reshape(4, 4)
    traces = torch.stack([2 * (W * D).sum(), D.square().sum(), (P * second).sum(), W.square().sum()])
    return StepShifts(products, exponents, traces, columns)


def _exponent(e: int) -> Tensor:
    return torch.tensor(e)
