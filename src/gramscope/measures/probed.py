"""Cosines and traces of a large layer from products with random probes, with their standard errors.

Where neither k×k nor d×d matrices fit the memory budget, the statistics hold ``WᵀΣW Ω`` and ``WᵀKW Ω`` for a thin matrix Ω of
random signs. Inner products of matrices are means over the columns, ``⟨A, B⟩ ≈ ⟨AΩ, BΩ⟩ / r``, and leaving out one group of
columns at a time gives the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import binary_exponent, to_double
from gramscope.linalg.stochastic import GROUPS, by_group, probes
from gramscope.measures.estimate import Estimate, jackknife
from gramscope.measures.kernel_alignment import square_of_parts
from gramscope.measures.step_shifts import StepShifts

REMARK = "an estimate from {} random probes, because the matrix itself would not fit memory="


@dataclass(frozen=True)
class ProbedAlignment:
    """What the ansatz ``ρ(WᵀW, WᵀKW)`` and ``tr WᵀKW`` need, by group of probes and by part of K.

    Args:
        size: ``‖WᵀWΩ_g‖² [groups]``.
        inner: ``⟨WᵀWΩ_g, WᵀK_pWΩ_g⟩ [parts, groups]``.
        squares: ``⟨WᵀK_pWΩ_g, WᵀK_qWΩ_g⟩ [parts, parts, groups]``.
        traces: ``tr Ω_gᵀWᵀK_pWΩ_g [parts, groups]``, up to the factor that makes them traces.
        probes: how many there are.
    """

    size: Tensor
    inner: Tensor
    squares: Tensor
    traces: Tensor
    probes: int

    def value(self) -> Estimate:
        """``ρ(WᵀW, WᵀKW)``."""

        def cosine(parts: Tensor, groups: Tensor) -> float:
            square = square_of_parts(self.squares[..., groups].sum(-1), parts)
            bottom = (self.size[groups].sum() * square).sqrt()
            return float(self.inner[parts][:, groups].sum() / bottom) if bottom > 0 else math.nan

        return self._estimate(cosine)

    def trace(self) -> Estimate:
        """``tr WᵀKW``."""
        parts = self.traces.shape[0]
        return self._estimate(lambda kept, groups: float(self.traces[kept][:, groups].mean() * parts))

    def _estimate(self, value: Callable[[Tensor, Tensor], float]) -> Estimate:
        """With the variances of the probes and of the parts of K together."""
        parts, groups = torch.arange(self.inner.shape[0]), torch.arange(GROUPS)
        of_probes = jackknife(GROUPS, lambda kept: value(parts, kept))
        of_parts = jackknife(len(parts), lambda kept: value(kept, groups)).error or 0.0
        error = math.hypot(of_probes.error or 0.0, of_parts)
        return Estimate(of_probes.value, error, REMARK.format(self.probes))


def probed_alignment(W: Tensor, parts: Tensor) -> ProbedAlignment:
    """The products behind the ansatz.

    Args:
        W: ``[..., k, d]`` in any floating dtype.
        parts: ``[parts, ..., d, r]`` that add up to ``WᵀKW Ω``.
    """
    d, r = parts.shape[-2:]
    omega = probes(d, r, W)
    exponent = binary_exponent(parts)
    gram, kernel = _gram_times(W, omega)[0], torch.ldexp(parts.double(), -exponent)
    size = by_group(gram.square().sum(-2)).reshape(-1, GROUPS).sum(0)
    inner = torch.stack([_by_group(gram * part) for part in kernel])
    squares = torch.stack([torch.stack([_by_group(one * other) for other in kernel]) for one in kernel])
    traces = torch.ldexp(torch.stack([_by_group(omega.double() * part) for part in kernel]), exponent) * (GROUPS / r)
    return ProbedAlignment(size, inner, squares, traces, r)


@dataclass(frozen=True)
class ProbedShifts:
    """:class:`~gramscope.measures.step_shifts.StepShifts` by group of probes.

    Args:
        products: ``[groups, 4, 4]``.
        exponents: as there.
        traces: ``[groups, 4]``.
        d: as there.
        probes: how many there are.
    """

    products: Tensor
    exponents: tuple[int, int, int, int]
    traces: Tensor
    d: int
    probes: int

    def value(self, what: str, gamma: float) -> Estimate:
        """A measure of a step of rate γ: ``cosine``, ``residual``, ``gram_cosine`` or ``null``."""

        def of(kept: Tensor) -> float:
            shifts = StepShifts(self.products[kept].mean(0), self.exponents, self.traces[kept].mean(0), self.d)
            return float(getattr(shifts, what)(gamma))

        return jackknife(GROUPS, of)._replace(remark=REMARK.format(self.probes))


def probed_shifts(W: Tensor, D: Tensor, covariance: Tensor) -> ProbedShifts:
    """The products of a step from ``covariance = WᵀΣW Ω [..., d, r]`` and thin products of W and D ``[..., k, d]``."""
    d, r = covariance.shape[-2:]
    omega = probes(d, r, W)
    D = D.to(W.dtype)
    s = int(binary_exponent(covariance))
    gram, WO, w = _gram_times(W, omega)
    square, DO, g = _gram_times(D, omega)
    mixed = _double(W.mT @ DO, -w) + _double(D.mT @ WO, -g)
    four = torch.stack([mixed, square, torch.ldexp(covariance.double(), torch.tensor(-s)), gram])
    products = torch.stack([torch.stack([_by_group(x * y) for y in four]) for x in four])  # [4, 4, groups]
    traces = torch.stack([_by_group(omega.double() * x) for x in four])
    scale = GROUPS / r
    columns = W.shape[:-2].numel() * d
    return ProbedShifts(products.permute(2, 0, 1) * scale, (w + g, 2 * g, s, 2 * w), traces.mT * scale, columns, r)


def _gram_times(W: Tensor, omega: Tensor) -> tuple[Tensor, Tensor, int]:
    """``WᵀWΩ`` in float64 and ``WΩ``, of W times ``2^−e``, and e."""
    e = int(binary_exponent(W))
    thin = torch.ldexp(W @ omega, torch.tensor(-e))
    return _double(W.mT @ thin, -e), thin, e


def _double(x: Tensor, exponent: int) -> Tensor:
    return torch.ldexp(to_double(x), torch.tensor(exponent))


def _by_group(columns: Tensor) -> Tensor:
    """Sums over all axes but the groups of the last one."""
    return by_group(columns.sum(-2)).reshape(-1, GROUPS).sum(0)
