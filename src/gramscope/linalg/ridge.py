"""Least squares and ridge regression of many targets, reduced to ``min(n, d)`` rows.

With ``H = U S Vᵀ`` the residual of the ridge fit is, exactly and without cancellation,

    ‖Y − Hβ‖² = ‖(I − UUᵀ) Y‖² + Σ_r (λ / (s_r² + λ))² ‖u_rᵀ Y‖²

From arrays, S and UᵀY come from a QR factorisation updated block by block (``n ≥ d``), or from one of ``Hᵀ``
(``n < d``): the condition number is not squared, so singular values down to about ``max(n, d)·2.2e-16`` of the largest
are seen. From moments they come from an eigendecomposition of the centred co-moments with every feature scaled to unit
length, so that neither offsets nor mixed scales of the features cost digits. Directions that are shorter than
``√(d·2.2e-16)`` in those units, about 2e-7 at d = 256, cannot be told from rounding. Without a ridge the columns of arrays are
scaled to length 1 too.

Features that came in float32 carry rounding of 6e-8 of each entry, whatever they are computed with afterwards. Directions
of that size (:func:`input_noise`) are rounding, not features: the features after a layer normalisation have one, since
their sum is zero up to rounding. Directions below these tolerances count as absent: the fit is the one of minimum norm.
What lies little above them is uncertain, and target linearity warns with its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import check_range
from gramscope.linalg.psd import EPS, svd
from gramscope.linalg.row_blocks import Rows, ScaledRows, check_pair, spans

#: the part of a target along a direction counts as real above this many standard deviations of that along a random one
CHANCE = 4.0
#: the part of the targets along directions as short as the rounding of features that counts as uncertain
UNCERTAIN = 1e-3
#: the smallest positive number
TINY = 5e-324


@dataclass(frozen=True)
class Reduced:
    """A regression of Y on H in the coordinates of H's singular vectors (of the centred H with an intercept).

    Args:
        n: samples.
        d: features.
        intercept: whether a free constant is fitted (and not penalised).
        singular_values: ``S [r]``, descending, ``r ≤ min(n, d)``.
        tolerance: singular values up to this count as zero.
        targets: ``UᵀY [r, c]``.
        outside: ``‖(I − UUᵀ) y‖²`` of every target, ``[c]``.
        totals: ``‖y − ȳ‖²`` of every target, ``[c]``.
        mean_h: ``[d]`` with an intercept, else None.
        mean_y: ``[c]``.
        right: ``Vᵀ [r, d]``, or None when ``n < d``.
        left: ``U [n, r]`` when ``n < d``, else None.
        scale: ``[d]``: everything is about ``H / scale``; None for H itself.
        rounding: length by which the computation moves the directions of H.
    """

    n: int
    d: int
    intercept: bool
    singular_values: Tensor
    tolerance: float
    targets: Tensor
    outside: Tensor
    totals: Tensor
    mean_h: Tensor | None
    mean_y: Tensor
    right: Tensor | None
    left: Tensor | None
    scale: Tensor | None = None
    rounding: float = 0.0

    @property
    def rank(self) -> int:
        """Numerical rank of H (plus one for the intercept)."""
        return int((self.singular_values > self.tolerance).sum()) + int(self.intercept)

    def shrinkage(self, ridge: float) -> Tensor:
        """``s²/(s² + λ)``, zero for the directions below the tolerance."""
        kept = self.singular_values > self.tolerance
        ratio = math.sqrt(ridge) / torch.where(kept, self.singular_values, 1.0)  # squares of s may not be representable
        return torch.where(kept, 1 / (1 + ratio.square()), 0.0)

    @property
    def total(self) -> Tensor:
        """``‖Y − ȳ‖_F²``."""
        return self.totals.sum()

    def residual(self, ridge: float) -> Tensor:
        """``‖Y − Hβ‖_F²`` of the ridge fit."""
        return self.residuals(ridge).sum()

    def residuals(self, ridge: float) -> Tensor:
        """``‖y − Hβ‖²`` of the ridge fit, of every target, ``[c]``."""
        seen = torch.where(self.singular_values > self.tolerance, self.singular_values, 0.0)
        share = 1 / (1 + (seen / math.sqrt(ridge)).square()) if ridge else (seen == 0).to(seen.dtype)
        return self.outside + (share[:, None] * self.targets).square().sum(0)

    def uncertain(self) -> float:
        """How much ``‖Y − Hβ‖²`` without a ridge may be off.

        That is what rounding of the computation may change, and the part of Y along directions near the tolerance, and below
        it where it is more than chance.
        """
        kept, along = self.singular_values > self.tolerance, self.targets.square().sum(1)
        lengths, residual = torch.where(kept, self.singular_values, math.inf), float(self.residual(0.0))
        below = along[~kept & (along > CHANCE**2 * residual / self.n)].sum()
        near = float((self.tolerance / lengths).square() @ along + below)
        computed = turned(self.rounding / lengths, along, residual, self.n - self.rank)
        computed += 4 * EPS * math.sqrt(self.n * float(along.sum()) * residual)  # rounding of the targets
        return computed + (near if near > UNCERTAIN * float(self.total) else 0.0)

    def degrees_of_freedom(self, ridge: float) -> float:
        """``tr H(HᵀH + λI)⁻¹Hᵀ`` (plus one for the intercept)."""
        return float(self.shrinkage(ridge).sum()) + float(self.intercept)

    def coefficients(self, H: Rows, ridge: float) -> Tensor:
        """``β [d, c]`` of minimum norm; ``H`` is what the problem was reduced from."""
        s = self.singular_values
        kept = s > self.tolerance
        scaled = (self.shrinkage(ridge) / torch.where(kept, s, 1.0))[:, None] * self.targets
        scale = 1.0 if self.scale is None else self.scale[:, None]
        if self.right is not None:
            return self.right.mT @ scaled / scale
        left = self.targets.new_zeros(self.n, 0) if self.left is None else self.left
        weights = left @ (scaled / torch.where(kept, s, 1.0)[:, None])
        parts = []
        for start, stop in spans(self.d, self.n):
            columns = H.columns(start, stop)
            if self.intercept:
                columns = columns - columns.mean(0)
            parts.append(columns.mT @ weights)
        return torch.cat(parts) / (1.0 if self.scale is None else self.scale.square()[:, None])


def check_ridge(ridge: float) -> float:
    """The ridge as a float; negative, infinite or NaN ones are refused."""
    value = _number(ridge)
    if not 0.0 <= value < math.inf:
        raise InputError(f"ridge must be a finite number ≥ 0, got {ridge!r}")
    return value


def _number(value: Any) -> float:
    """A number as a float, anything else as NaN."""
    return float(value) if isinstance(value, Real | Tensor) else math.nan


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


def input_noise(n: int, d: int, eps: float) -> float:
    """Length of the directions that rounding alone gives n rows of d features of length 1; ``eps`` is 1.2e-7 for float32.

    The entries' errors are about ε/4 each and add up like random numbers; a factor of 16 leaves room for errors of the
    computations before.

    >>> f"{input_noise(400, 100, torch.finfo(torch.float32).eps):.1e}"
    '7.2e-07'
    """
    return 4 * eps * (1 + math.sqrt(d / n))


def reduce_rows(
    H: Rows, Y: Rows, intercept: bool = False, rtol: float | None = None, equilibrate: bool = False
) -> Reduced:
    """Reduce the regression of ``Y [n, c]`` on ``H [n, d]``; extra memory is a few blocks and ``min(n, d)²``.

    Args:
        H: features.
        Y: targets.
        intercept: fit a constant too.
        rtol: singular values up to ``rtol`` times the largest (of the uncentred H) count as zero;
            default ``max(n, d)·2.2e-16``.
        equilibrate: scale every feature to length 1 first, which changes no fit without a ridge except the choice among
            equally good ones; directions as short as the rounding of the features as they came count as zero then.
    """
    check_pair(H, Y)
    relative = max(H.n, H.width) * EPS if rtol is None else _number(rtol)
    if rtol is not None and not 0.0 <= relative < 1.0:
        raise InputError(f"rtol={rtol!r}: give a number from 0 to below 1, or None")
    reduced = _reduce_tall if H.n >= H.width else _reduce_wide
    if not equilibrate:
        return reduced(H, Y, intercept, relative)
    scaled = ScaledRows(H)
    check_range(scaled.scale, f"the length of a column of {H.name}")
    problem = reduced(scaled, Y, intercept, relative)
    noise = input_noise(H.n, H.width, H.eps) if rtol is None else 0.0
    mean_h = None if problem.mean_h is None else problem.mean_h * scaled.scale
    return replace(problem, tolerance=max(problem.tolerance, noise), scale=scaled.scale, mean_h=mean_h)


def triangular_factor(H: Rows, Y: Rows | None = None, ones: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """``R``, ``QᵀY`` and ``‖(I − QQᵀ)y‖² [c]`` of ``H = QR``, updated block by block; Q is never formed.

    Args:
        H: ``[n, d]``.
        Y: ``[n, c]``, or None for R only.
        ones: put a column of ones before H.
    """
    R: Tensor | None = None
    rhs: Tensor | None = None
    outside: Tensor | None = None
    width = H.width + int(ones)
    targets = 1 if Y is None else Y.width
    # Blocks no shorter than R at most double the flops by being stacked below it.
    for start, stop in spans(H.n, width + targets, least=width):
        block = H.block(start, stop)
        if ones:
            block = torch.cat([block.new_ones(block.shape[0], 1), block], 1)
        y = block.new_zeros(block.shape[0], 1) if Y is None else Y.block(start, stop)
        if R is not None and rhs is not None:
            block, y = torch.cat([R, block]), torch.cat([rhs, y])
        reflectors, scales = torch.geqrf(block)
        y = torch.ormqr(reflectors, scales, y, transpose=True)
        rows = min(width, block.shape[0])
        R, rhs = reflectors[:rows].triu(), y[:rows]
        lost = y[rows:].square().sum(0)
        outside = lost if outside is None else outside + lost
    if R is None or rhs is None or outside is None:
        raise InputError(f"{H.name} has no rows")
    return R, rhs, outside


def _reduce_tall(H: Rows, Y: Rows, intercept: bool, relative: float) -> Reduced:
    R, rhs, outside = triangular_factor(H, Y, ones=intercept)
    mean_y, total = _spread(Y)
    mean_h, offset = None, 0.0
    if intercept:
        # The first column is constant, so what is left below the first row belongs to the centred H and Y.
        mean_h, offset = R[0, 1:] / R[0, 0], float(R[0, 1:].norm())
        R, rhs = R[1:, 1:], rhs[1:]
    U, s, Vt = svd(R)  # R has no more rows than columns, so U is square and nothing is left outside it
    largest = math.hypot(first(s), offset)
    problem = Reduced(
        H.n, H.width, intercept, s, relative * largest, U.mT @ rhs, outside, total, mean_h, mean_y, Vt, None
    )
    return replace(problem, rounding=math.sqrt(H.n) * EPS * largest)


def _reduce_wide(H: Rows, Y: Rows, intercept: bool, relative: float) -> Reduced:
    mean_y, total = _spread(Y)
    y = Y.block(0, Y.n) - (mean_y if intercept else 0.0)
    R: Tensor | None = None
    means = []
    for start, stop in spans(H.width, H.n, least=H.n):
        columns = H.columns(start, stop)
        if intercept:
            means.append(columns.mean(0))
            columns = columns - means[-1]
        block = columns.mT if R is None else torch.cat([R, columns.mT])
        R = torch.geqrf(block)[0][: min(block.shape)].triu()
    if R is None:
        raise InputError(f"{H.name} has no columns")
    # Hᵀ = QR, so H = RᵀQᵀ has the left singular vectors and the singular values of Rᵀ, which is square.
    U, s, _ = svd(R.mT)
    mean_h = torch.cat(means) if intercept else None
    offset = 0.0 if mean_h is None else math.sqrt(H.n) * float(mean_h.norm())
    largest, outside = math.hypot(first(s), offset), torch.zeros_like(mean_y)
    problem = Reduced(H.n, H.width, intercept, s, relative * largest, U.mT @ y, outside, total, mean_h, mean_y, None, U)
    return replace(problem, rounding=math.sqrt(H.width) * EPS * largest)


def _spread(Y: Rows) -> tuple[Tensor, Tensor]:
    """``ȳ [c]`` and ``‖y − ȳ‖² [c]``, the latter by the two-pass formula."""
    mean = Y.mean()
    return mean, torch.stack([(block - mean).square().sum(0) for block in Y.blocks()]).sum(0)


def first(s: Tensor) -> float:
    """The largest of descending singular values, 0 if there are none."""
    return float(s[0]) if s.numel() else 0.0
