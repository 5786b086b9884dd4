"""Least squares and ridge regression from moments: :mod:`gramscope.linalg.ridge` says what precision they can have."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from gramscope.errors import RescueWarning
from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import EPS, eigh, svd
from gramscope.linalg.ridge import CHANCE, TINY, UNCERTAIN, Reduced, first, input_noise, turned


def reduce_moments(m: Moments, intercept: bool = False) -> Reduced:
    """Reduce the regression of y on h given their moments; see the module's note on what precision this can have.

    Singular values up to ``max(n, d)·2.2e-16`` of the largest count as zero. Where directions of the features are lost
    in rounding although the targets have a part along them, a :class:`RescueWarning` says so.
    """
    centred = _centred_directions(m, intercept=intercept)
    rhs = centred.targets
    outside = (m.C_yy.diagonal() - rhs.square().sum(0)).clamp(min=0.0)
    factor = rhs.new_zeros(rhs.shape[0], m.mean_h.numel())
    factor[:, centred.varies] = centred.root[:, None] * centred.vectors.mT * centred.size
    if not intercept:  # the constant is a direction like the others: H = 1 h̄ᵀ + (H − 1 h̄ᵀ), and the two are orthogonal
        factor = torch.cat([math.sqrt(m.n) * centred.mean[None], factor])
        rhs = torch.cat([math.sqrt(m.n) * m.mean_y[None], rhs])
    if centred.limits.lost is not None:
        centred.limits.lost.warn(float(outside.sum()) / max(float(m.C_yy.trace()), TINY))
    U, s, Vt = svd(factor)
    targets = U.mT @ rhs
    outside = outside + (rhs - U @ targets).square().sum(0)
    d = factor.shape[1]
    tolerance = max(m.n, d) * EPS * math.hypot(first(s), math.sqrt(m.n) * float(m.mean_h.norm()))
    return Reduced(m.n, d, intercept, s, tolerance, targets, outside, m.C_yy.diagonal(), m.mean_h, m.mean_y, Vt, None)


class LeastSquares(NamedTuple):
    """A fit without a ridge.

    Args:
        residual: ``‖y − Hβ‖²`` of every target, ``[c]``.
        rank: of H, plus one for the intercept.
        uncertain: how much ``‖Y − Hβ‖²`` may be off.
    """

    residual: Tensor
    rank: int
    uncertain: float


def least_squares_from_moments(m: Moments, intercept: bool = False, eps: float = EPS) -> LeastSquares:
    """The fit without a ridge from moments of features that came with relative rounding ``eps``.

    Any basis of the columns of H will do, so its singular values, the costly part of :func:`reduce_moments`, are not
    needed. Either the constant can be fitted beside the centred directions (``intercept``, or h̄ has a part along none of
    them), or H contains it only together with ``c`` times the directions, and then ``(1, −c)`` is orthogonal to all
    columns.
    """
    basis = _cholesky_basis(m, eps)
    if basis is None:
        centred = _centred_directions(m, eps, intercept)
        c = math.sqrt(m.n) * (centred.vectors.mT @ (centred.mean[centred.varies] / centred.size)) / centred.root
        basis = _Basis(centred.targets, c, centred.limits)
    limits = basis.limits
    total, along = float(m.C_yy.trace()), basis.targets.square().sum(1)
    residual, rank = (m.C_yy.diagonal() - basis.targets.square().sum(0)).clamp(min=0.0), along.numel()
    uncertain = limits.near
    if intercept or limits.constant:
        rank += 1
        uncertain += 0.0 if intercept else m.n * float(m.mean_y.square().sum()) * limits.slope**2
    else:
        missed = math.sqrt(m.n) * m.mean_y - basis.mean @ basis.targets
        longer = 1 + basis.mean.square().sum()
        residual = residual + missed.square() / longer
        # what changes when the parts of the mean along the directions change by their angles
        change, size = limits.angles.clamp(max=1.0) * basis.mean.abs(), missed.norm()
        uncertain += 2 * float((change * (along.sqrt() + size * basis.mean.abs() / longer)).sum() * size / longer)
    uncertain += turned(limits.angles, along, float(residual.sum()), m.n - rank)
    # the mean was subtracted from targets, and small squares have few digits; an error of the total counts for all the residual
    digits = 2 * EPS * math.sqrt(m.n * total) * float(m.mean_y.norm()) + m.n * TINY
    uncertain += digits * max(1.0, float(residual.sum()) / max(total, TINY))
    if limits.lost is not None:
        limits.lost.warn(float(residual.sum()) / max(total, TINY))
    return LeastSquares(residual, rank, uncertain)


class _Lost(NamedTuple):
    """Directions that were left out although targets may have a part along them."""

    number: int
    directions: int
    length: float

    def warn(self, share: float) -> None:
        """Say that up to ``share`` of the targets' variance may lie along them."""
        warnings.warn(
            f"{self.number} of {self.directions} directions of the features are shorter than {self.length:.1e} (features "
            f"scaled to length 1) and were left out, although targets may have a part along them, of up to {share:.2g} of "
            "their variance; features in float64, and gs.target_linearity of the features themselves, tell them from rounding",
            RescueWarning,
            stacklevel=5,
        )


class _Limits(NamedTuple):
    """What rounding leaves of a regression on r directions.

    Args:
        constant: whether h̄ has a part along none of the directions, so that a constant can be fitted.
        slope: how much the constant that is fitted may vary, relative to itself.
        angles: by which rounding may turn the directions, ``[r]``.
        near: the part of ``‖Y‖²`` along directions near the tolerance.
        lost: the directions below it that matter, if any.
    """

    constant: bool
    slope: float
    angles: Tensor
    near: float
    lost: _Lost | None


class _Basis(NamedTuple):
    """The regression in an orthonormal basis Q of the centred features.

    Args:
        targets: ``QᵀY [r, c]``.
        mean: the ``c [r]`` with ``√n h̄ = (H − 1h̄ᵀ)ᵀQ c``.
        limits: of its precision.
    """

    targets: Tensor
    mean: Tensor
    limits: _Limits


#: largest d for which an eigendecomposition costs little
SMALL = 64


def _cholesky_basis(m: Moments, eps: float) -> _Basis | None:
    """The basis from a Cholesky factor, 30 times faster than from eigenvectors; None unless it is as good.

    It is as good where no direction comes near the tolerance; inverse iteration finds the smallest eigenvalue to tell.
    """
    gram = m.require_gram()
    if gram.shape[-1] <= SMALL or m.n <= gram.shape[-1]:
        return None
    varies, size, ratio = _equilibrated(m)
    if size.numel() == 0:
        return None
    scaled = gram.clone() if bool(varies.all()) else gram[varies][:, varies]
    scaled.div_(size).div_(size[:, None])
    factor, info = torch.linalg.cholesky_ex(scaled)
    if int(info) != 0:
        return None
    solved = torch.linalg.solve_triangular(factor, torch.ones_like(size)[:, None], upper=False)
    for _ in range(8):  # inverse iteration
        solved = torch.linalg.solve_triangular(factor.mT, solved / solved.norm(), upper=True)
        solved = torch.linalg.solve_triangular(factor, solved, upper=False)
    smallest = 1 / float(solved.norm())
    largest = float(torch.linalg.vector_norm(scaled, dim=1).max())  # near the largest eigenvalue, to within √d
    noise = max(size.numel() * EPS * largest, (input_noise(m.n, size.numel(), eps) * float(ratio.max())) ** 2)
    if smallest < 1e4 * noise:
        return None
    rhs = torch.cat([m.C_hy[varies] / size[:, None], math.sqrt(m.n) * (m.mean_h[varies] / size)[:, None]], 1)
    found = torch.linalg.solve_triangular(factor, rhs, upper=False)
    angles = torch.full_like(size, noise / smallest / math.sqrt(size.numel()))  # at most this in the shortest direction
    limits = _Limits(bool(m.mean_h[~varies].any()), slope=0.0, angles=angles, near=0.0, lost=None)
    return _Basis(found[:, :-1], found[:, -1], limits)


def _equilibrated(m: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Which features vary, their centred lengths, and how many times longer they are uncentred."""
    square = m.require_gram().diagonal()
    varies = square > m.n * (8 * EPS * m.mean_h).square()  # less is what rounding leaves of a constant
    size = square[varies].sqrt()
    return varies, size, (1 + m.n * (m.mean_h[varies] / size).square()).sqrt()


class _Directions(NamedTuple):
    """The centred features that vary, each scaled to length 1, as ``Q diag(root) vectorsᵀ``.

    Args:
        varies: which features vary, ``[d]``.
        size: their lengths ``[v]``.
        root: singular values of the scaled ones ``[r]``, without directions lost in rounding.
        vectors: ``[v, r]``.
        targets: ``QᵀY [r, c]``.
        mean: ``h̄ [d]``, without its parts along lost directions that are as short as these.
        limits: of its precision.
    """

    varies: Tensor
    size: Tensor
    root: Tensor
    vectors: Tensor
    targets: Tensor
    mean: Tensor
    limits: _Limits


def _centred_directions(m: Moments, eps: float = EPS, intercept: bool = True) -> _Directions:
    gram = m.require_gram()
    varies, size, ratio = _equilibrated(m)
    values, vectors = eigh(gram[varies][:, varies] / torch.outer(size, size))
    cross = vectors.mT @ (m.C_hy[varies] / size[:, None])
    largest = float(values[-1]) if values.numel() else 0.0
    tolerance = values.numel() * EPS * largest + m.n * values.numel() * TINY / float(
        size.min().square() if size.numel() else 1.0
    )
    rounding = (input_noise(m.n, max(values.numel(), 1), eps) * (ratio[:, None] * vectors).norm(dim=0)).square()
    kept = values > rounding.clamp(min=tolerance)
    # A direction that is truly zero has no part in HᵀY beyond rounding.
    noise = max(m.n, values.numel()) * EPS * math.sqrt(largest * float(m.C_yy.trace()))
    # Rounding of the features as they came has a part that rarely exceeds CHANCE standard deviations.
    chance = CHANCE * (values.clamp(min=tolerance) * m.C_yy.trace() / m.n).sqrt()
    exact = ~kept & (rounding < tolerance / 4)
    lost = torch.where(exact, cross[exact].norm() > noise, ~kept & (cross.norm(dim=1) > chance))
    root, mean = values[kept].sqrt(), m.mean_h.clone()
    along = math.sqrt(m.n) * (vectors.mT @ (mean[varies] / size)).abs()
    short = along <= math.sqrt(tolerance)
    absent = vectors[:, ~kept & short]
    if not intercept:  # a part of the mean along a lost direction, beyond rounding, could fit the constant
        lost |= exact & short & (along > m.n * EPS * float(ratio.norm()))
    mean[varies] -= size * (absent @ (absent.mT @ (mean[varies] / size)))
    constant = bool(mean[~varies].any()) or bool((~kept & ~short).any())
    fitted = ~kept & ~short
    slope = (
        0.0
        if bool(mean[~varies].any()) or not bool(fitted.any())
        else math.sqrt(tolerance) / float(along[fitted].max())
    )
    targets = cross[kept] / root[:, None]
    longest = EPS * (ratio[:, None] * vectors[:, kept]).norm(dim=0)  # centring moves features by this
    near = float((rounding.clamp(min=tolerance)[kept] / values[kept]) @ targets.square().sum(1))
    shortest = math.sqrt(float(rounding.clamp(min=tolerance)[lost].max())) if bool(lost.any()) else 0.0
    limits = _Limits(
        constant,
        slope,
        angles=4 * tolerance / values[kept] + 2 * longest / root,
        near=near if near > UNCERTAIN * float(m.C_yy.trace()) else 0.0,
        lost=_Lost(int(lost.sum()), values.numel(), shortest) if bool(lost.any()) else None,
    )
    return _Directions(varies, size, root, vectors[:, kept], targets, mean, limits)
