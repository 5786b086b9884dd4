"""Least squares and ridge regression of many targets, reduced to ``min(n, d)`` rows.

With ``H = U S Vᵀ`` the residual of the ridge fit is, exactly and without cancellation,

    ‖Y − Hβ‖² = ‖(I − UUᵀ) Y‖² + Σ_r (λ / (s_r² + λ))² ‖u_rᵀ Y‖²

Of float64 features S and UᵀY come from a QR factorisation updated block by block (of ``Hᵀ`` where n < d): the condition number
is not squared, so that singular values down to ``max(n, d)·2.2e-16`` of the largest are seen. Of moments, and of features that
came in float32, they come from ``HᵀH`` (``HHᵀ``) with every feature scaled to unit length, so that neither offsets nor mixed
scales cost digits. There directions shorter than ``√(d·2.2e-16)``, about 2e-7 at d = 256, cannot be told from rounding: float32
features have directions of rounding of that size themselves (:func:`input_noise`), as after a layer normalisation, where their
sum is zero up to rounding.

Directions below these tolerances count as absent, and the fit is the one of minimum norm. ``RidgeFit.uncertain`` says how much
rounding may hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, Rows, check_range
from gramscope.linalg.psd import EPS, svd

#: the part of a target along a direction counts as real above this many standard deviations of that along a random one
CHANCE = 4.0
#: the part of the targets along directions as short as the rounding of features that counts as uncertain
UNCERTAIN = 1e-3
#: eigenvalues of HᵀH that are all this many times above rounding need no decomposition
CLEAR = 1e7
#: side up to which a decomposition costs little
SMALL = 64
#: the smallest positive number
TINY = 5e-324


@dataclass(frozen=True)
class RidgeFit:
    """A ridge fit ``Ŷ = Hβ + b``, a linear map from features to targets.

    Args:
        n: samples.
        ridge: λ.
        beta: ``β [d, c]``, of minimum norm where several fit equally well.
        intercept: ``b [c]``, zero without an intercept.
        residuals: ``‖y − ŷ‖²`` of every target, ``[c]``.
        totals: ``‖y − ȳ‖²`` of every target, ``[c]``.
        mean_y: ``ȳ [c]``.
        rank: numerical rank of the features, plus one for the intercept; with a ridge it may be the largest possible one.
        hat_trace: trace of the matrix that maps targets to their fit (degrees of freedom), the intercept counted.
        tolerance: singular values up to this count as zero.
        uncertain: how much the residuals together may be off because of rounding.
        limit: the share of the targets' variance from which that deserves a warning.
        absent: directions of the features that count as zero, ``[·, d]``, in a fit without a ridge.
        classes: label values of the columns, when fitted to labels.
        shift: frequency of each class in training, which the one-hot targets had subtracted.
    """

    n: int
    ridge: float
    beta: Tensor
    intercept: Tensor
    residuals: Tensor
    totals: Tensor
    mean_y: Tensor
    rank: int
    hat_trace: float
    tolerance: float
    uncertain: float = 0.0
    limit: float = 1e-6
    absent: Tensor | None = None
    classes: Tensor | None = None
    shift: Tensor | None = None

    def explained(self) -> Tensor:
        """R² over all targets."""
        return 1.0 - self.residuals.sum() / self.totals.sum()

    def predict(self, H: Array) -> Tensor:
        """``Hβ + b``, ``[n, c]`` in float64."""
        return torch.cat([self.predict_block(block) for block in self.features(H).blocks(self.beta.shape[1])])

    def predict_block(self, block: Tensor) -> Tensor:
        """Predictions for float64 rows ``[m, d]``."""
        return block @ self.beta + self.intercept

    def features(self, H: Array) -> Rows:
        """``H`` as rows of the width this fit expects."""
        rows = Rows(H, "H")
        if rows.width != self.beta.shape[0]:
            raise InputError(f"H has {rows.width} features, the fit was made on {self.beta.shape[0]}")
        return rows


def check_ridge(ridge: float) -> float:
    """The ridge as a float; negative, infinite or NaN ones are refused."""
    value = number(ridge)
    if not 0.0 <= value < math.inf:
        raise InputError(f"ridge must be a finite number ≥ 0, got {ridge!r}")
    return value


def number(value: Any) -> float:
    """A number as a float, anything else as NaN."""
    return float(value) if isinstance(value, Real | Tensor) else math.nan


def input_noise(n: int, d: int, eps: float) -> float:
    """Length of the directions that rounding alone gives n rows of d features of length 1; ``eps`` is 1.2e-7 for float32.

    The entries' errors are about ε/4 each and add up like random numbers; a factor of 16 leaves room for errors of the
    computations before.

    >>> f"{input_noise(400, 100, torch.finfo(torch.float32).eps):.1e}"
    '7.2e-07'
    """
    return 4 * eps * (1 + math.sqrt(d / n))


def limit_of(eps: float) -> float:
    """The share of the targets' variance that may be wrong without a warning."""
    return 1e-6 if eps <= EPS else UNCERTAIN


def turned(angles: Tensor, along: Tensor, residual: float, free: int) -> float:
    """How much the squared length of a residual may change when directions turn by small angles, each towards a random one.

    Args:
        angles: ``[r]``.
        along: the parts of the targets' squared length along the directions, ``[r]``.
        residual: squared length of the residual.
        free: dimensions in which the residual lies.
    """
    angles = angles.clamp(max=1.0)
    sideways = math.sqrt(residual / max(free, 1))
    return float((angles.square() * along + 2 * sideways * angles * along.sqrt()).sum())


def clear_factor(A: Tensor, noise: float, rounding: float = 0.0) -> tuple[Tensor, Tensor] | None:
    """The upper Cholesky factor of ``A`` scaled to a diagonal of ones, and the scale ``[d]``.

    None where some eigenvalue of the scaled matrix is not clearly above that of ``rounding`` in its entries, or above ``noise``
    of features that came in less than float64.
    """
    scale = A.diagonal().sqrt()
    if scale.numel() <= SMALL or not bool(((scale > 1e-145) & (scale < 1e145)).all()):
        return None
    scaled = (A / scale).div_(scale[:, None])
    R, info = torch.linalg.cholesky_ex(scaled, upper=True)
    if int(info) != 0:
        return None
    x = torch.ones_like(scale)[:, None]
    for _ in range(8):  # inverse iteration
        x = torch.cholesky_solve(x / x.norm(), R, upper=True)
    largest = float(torch.linalg.vector_norm(scaled, dim=1).max())  # near the largest eigenvalue, to within √d
    clear = 1 / float(x.norm()) >= max(CLEAR * max(scale.numel() * EPS, rounding) * largest, 1e4 * noise)
    return (R, scale) if clear else None


@dataclass(frozen=True)
class Small:
    """A regression of n samples on few rows that have the same moments.

    Args:
        n: samples.
        rows: ``[r, d]``, of the centred features with an intercept.
        targets: of these rows, ``[r, c]``.
        outside: ``‖y‖²`` of every target outside these rows, ``[c]``.
        totals: ``‖y − ȳ‖²`` of every target, ``[c]``.
        mean_h: ``[d]`` with an intercept, else None.
        mean_y: ``[c]``.
        uncertain: how much the residuals may be off already.
        eps: relative rounding of the features as they came.
    """

    n: int
    rows: Tensor
    targets: Tensor
    outside: Tensor
    totals: Tensor
    mean_h: Tensor | None
    mean_y: Tensor
    uncertain: float = 0.0
    eps: float = EPS


def fit_small(p: Small, ridge: float, rtol: float | None = None) -> RidgeFit:
    """The fit from the singular values of the rows, every column scaled to length 1 where there is no ridge."""
    d, scale = p.rows.shape[1], p.rows.new_ones(p.rows.shape[1])
    offset = torch.zeros_like(scale) if p.mean_h is None else math.sqrt(p.n) * p.mean_h
    equilibrate = ridge == 0.0 and rtol is None  # changes no fit without a ridge but the choice among equally good ones
    if equilibrate:
        whole = torch.cat([p.rows, offset[None]])
        size = whole.abs().amax(0).clamp(min=TINY)
        scale = size * (whole / size).norm(dim=0)
        scale = check_range(torch.where(scale > 0, scale, 1.0), "the length of a column of H")
    U, s, Vt = svd(p.rows / scale)
    targets = U.mT @ p.targets
    outside = p.outside + (p.targets - U @ targets).square().sum(0)
    largest = math.hypot(float(s[0]) if s.numel() else 0.0, float((offset / scale).norm()))
    tolerance = largest * (max(p.n, d) * EPS if rtol is None else rtol)
    tolerance = max(tolerance, input_noise(p.n, d, EPS)) if equilibrate else tolerance
    angles = math.sqrt(p.n) * EPS * largest / s.clamp(min=TINY)
    fit = fit_directions(p, s, targets, outside, ridge, tolerance, angles)
    beta = Vt.mT @ fit.beta / scale[:, None]
    kept = s > tolerance
    if equilibrate and int(kept.sum()) < d:  # of minimum norm: in the span of the rows
        basis = torch.linalg.qr((Vt[kept] * scale).mT)[0]
        beta = basis @ (basis.mT @ beta)
    constant = fit.intercept if p.mean_h is None else p.mean_y - p.mean_h @ beta
    absent = (Vt[~kept] / scale) if equilibrate and not bool(kept.all()) else None
    return replace(fit, beta=beta, intercept=constant, absent=absent)


def fit_directions(
    p: Small, s: Tensor, targets: Tensor, outside: Tensor, ridge: float, tolerance: float, angles: Tensor
) -> RidgeFit:
    """The fit on directions of lengths ``s [r]`` along which the targets have the parts ``targets [r, c]``.

    ``beta`` is in units of the right singular vectors, ``[r, c]``.
    """
    kept, along = s > tolerance, targets.square().sum(1)
    lengths = torch.where(kept, s, 1.0)
    shrinkage = torch.where(kept, 1 / (1 + (math.sqrt(ridge) / lengths).square()), 0.0)
    seen = torch.where(kept, s, 0.0)
    left = 1 / (1 + (seen / math.sqrt(ridge)).square()) if ridge else (~kept).to(s.dtype)
    residuals = outside + (left[:, None] * targets).square().sum(0)
    rank = int(kept.sum()) + (p.mean_h is not None)
    uncertain = p.uncertain
    if not ridge:
        residual = float(residuals.sum())
        below = along[~kept & (along > CHANCE**2 * residual / p.n)].sum()
        near = float(((tolerance / lengths).square() * kept) @ along + below)
        uncertain += near if near > UNCERTAIN * float(p.totals.sum()) else 0.0
        uncertain += turned(torch.where(kept, angles, 0.0), along, residual, p.n - rank)
        uncertain += 4 * EPS * math.sqrt(p.n * float(along.sum()) * residual)  # rounding of the targets
    return RidgeFit(
        p.n, ridge, shrinkage[:, None] * targets / lengths[:, None], torch.zeros_like(p.mean_y), residuals, p.totals, p.mean_y,
        rank, float(shrinkage.sum()) + (p.mean_h is not None), tolerance, uncertain, limit_of(p.eps),
    )  # fmt: skip
