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
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gramscope.errors import InputError, RescueWarning
from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import EPS, eigh, svd
from gramscope.linalg.row_blocks import Rows, ScaledRows, check_pair, spans


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
        """The part of ``‖Y‖²`` along directions near the tolerance, and below it where it is more than chance."""
        kept, along = self.singular_values > self.tolerance, self.targets.square().sum(1)
        share = torch.where(kept, (self.tolerance / torch.where(kept, self.singular_values, 1.0)).square(), 0.0)
        below = along[~kept & (along > CHANCE**2 * self.residual(0.0) / self.n)]
        return float(share @ along + below.sum())

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
    value = float(ridge)
    if not (value >= 0.0 and math.isfinite(value)):
        raise InputError(f"ridge must be a finite number ≥ 0, got {ridge}")
    return value


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
    relative = max(H.n, H.width) * EPS if rtol is None else float(rtol)
    reduced = _reduce_tall if H.n >= H.width else _reduce_wide
    if not equilibrate:
        return reduced(H, Y, intercept, relative)
    scaled = ScaledRows(H)
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


def reduce_moments(m: Moments, intercept: bool = False) -> Reduced:
    """Reduce the regression of y on h given their moments; see the module's note on what precision this can have.

    Singular values up to ``max(n, d)·2.2e-16`` of the largest count as zero. Where directions of the features are lost
    in rounding although the targets have a part along them, a :class:`RescueWarning` says so.
    """
    centred = _centred_directions(m)
    rhs = centred.targets
    outside = (m.C_yy.diagonal() - rhs.square().sum(0)).clamp(min=0.0)
    factor = rhs.new_zeros(rhs.shape[0], m.mean_h.numel())
    factor[:, centred.varies] = centred.root[:, None] * centred.vectors.mT * centred.size
    if not intercept:  # the constant is a direction like the others: H = 1 h̄ᵀ + (H − 1 h̄ᵀ), and the two are orthogonal
        factor = torch.cat([math.sqrt(m.n) * centred.mean[None], factor])
        rhs = torch.cat([math.sqrt(m.n) * m.mean_y[None], rhs])
    U, s, Vt = svd(factor)
    targets = U.mT @ rhs
    outside = outside + (rhs - U @ targets).square().sum(0)
    d = factor.shape[1]
    tolerance = max(m.n, d) * EPS * math.hypot(_first(s), math.sqrt(m.n) * float(m.mean_h.norm()))
    return Reduced(m.n, d, intercept, s, tolerance, targets, outside, m.C_yy.diagonal(), m.mean_h, m.mean_y, Vt, None)


#: the part of a target along a direction counts as real above this many standard deviations of that along a random one
CHANCE = 4.0


class LeastSquares(NamedTuple):
    """A fit without a ridge.

    Args:
        residual: ``‖y − Hβ‖²`` of every target, ``[c]``.
        rank: of H, plus one for the intercept.
        uncertain: the part of ``‖Y‖²`` that it finds along directions near the tolerance.
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
        centred = _centred_directions(m, eps)
        c = math.sqrt(m.n) * (centred.vectors.mT @ (centred.mean[centred.varies] / centred.size)) / centred.root
        basis = _Basis(centred.targets, c, centred.constant, centred.uncertain)
    outside = (m.C_yy.diagonal() - basis.targets.square().sum(0)).clamp(min=0.0)
    rank = basis.targets.shape[0]
    if intercept or basis.constant:
        return LeastSquares(outside, rank + 1, basis.uncertain)
    missed = math.sqrt(m.n) * m.mean_y - basis.mean @ basis.targets
    return LeastSquares(outside + missed.square() / (1 + basis.mean.square().sum()), rank, basis.uncertain)


class _Basis(NamedTuple):
    """The regression in an orthonormal basis Q of the centred features.

    Args:
        targets: ``QᵀY [r, c]``.
        mean: the ``c [r]`` with ``√n h̄ = (H − 1h̄ᵀ)ᵀQ c``.
        constant, uncertain: as in :class:`_Directions`.
    """

    targets: Tensor
    mean: Tensor
    constant: bool
    uncertain: float


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
    return _Basis(found[:, :-1], found[:, -1], bool(m.mean_h[~varies].any()), 0.0)


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
        constant: whether h̄ has a part along none of the vectors, so that a constant can be fitted.
        uncertain: the part of ``‖Y‖²`` along directions near the tolerance.
    """

    varies: Tensor
    size: Tensor
    root: Tensor
    vectors: Tensor
    targets: Tensor
    mean: Tensor
    constant: bool
    uncertain: float


def _centred_directions(m: Moments, eps: float = EPS) -> _Directions:
    gram = m.require_gram()
    varies, size, ratio = _equilibrated(m)
    values, vectors = eigh(gram[varies][:, varies] / torch.outer(size, size))
    cross = vectors.mT @ (m.C_hy[varies] / size[:, None])
    largest = float(values[-1]) if values.numel() else 0.0
    tolerance = values.numel() * EPS * largest
    rounding = (input_noise(m.n, max(values.numel(), 1), eps) * (ratio[:, None] * vectors).norm(dim=0)).square()
    kept = values > rounding.clamp(min=tolerance)
    # A direction that is truly zero has no part in HᵀY beyond rounding.
    noise = max(m.n, values.numel()) * EPS * math.sqrt(largest * float(m.C_yy.trace()))
    # Rounding of the features as they came has a part that rarely exceeds CHANCE standard deviations.
    chance = CHANCE * (values.clamp(min=tolerance) * m.C_yy.trace() / m.n).sqrt()
    lost = ~kept & (cross.norm(dim=1) > torch.where(rounding < tolerance / 4, noise, chance))
    if bool(lost.any()):
        warnings.warn(
            f"{int(lost.sum())} of {values.numel()} directions of the features are shorter than "
            f"{math.sqrt(float(rounding.clamp(min=tolerance)[lost].max())):.1e} (features scaled to length 1) and were left "
            "out, although targets have a part along them; features in float64, and gs.target_linearity of the features "
            "themselves, tell them from rounding",
            RescueWarning,
            stacklevel=4,
        )
    root, mean = values[kept].sqrt(), m.mean_h.clone()
    along = math.sqrt(m.n) * (vectors.mT @ (mean[varies] / size)).abs()
    short = along <= math.sqrt(tolerance)
    absent = vectors[:, ~kept & short]
    mean[varies] -= size * (absent @ (absent.mT @ (mean[varies] / size)))
    constant = bool(mean[~varies].any()) or bool((~kept & ~short).any())
    targets = cross[kept] / root[:, None]
    doubt = (rounding.clamp(min=tolerance) / values.clamp(min=1e-300))[kept]
    uncertain = float(doubt @ targets.square().sum(1))
    return _Directions(varies, size, root, vectors[:, kept], targets, mean, constant, uncertain)


def _reduce_tall(H: Rows, Y: Rows, intercept: bool, relative: float) -> Reduced:
    R, rhs, outside = triangular_factor(H, Y, ones=intercept)
    mean_y, total = _spread(Y)
    mean_h, offset = None, 0.0
    if intercept:
        # The first column is constant, so what is left below the first row belongs to the centred H and Y.
        mean_h, offset = R[0, 1:] / R[0, 0], float(R[0, 1:].norm())
        R, rhs = R[1:, 1:], rhs[1:]
    U, s, Vt = svd(R)  # R has no more rows than columns, so U is square and nothing is left outside it
    tolerance = relative * math.hypot(_first(s), offset)
    return Reduced(H.n, H.width, intercept, s, tolerance, U.mT @ rhs, outside, total, mean_h, mean_y, Vt, None)


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
    tolerance = relative * math.hypot(_first(s), offset)
    outside = torch.zeros_like(mean_y)
    return Reduced(H.n, H.width, intercept, s, tolerance, U.mT @ y, outside, total, mean_h, mean_y, None, U)


def _spread(Y: Rows) -> tuple[Tensor, Tensor]:
    """``ȳ [c]`` and ``‖y − ȳ‖² [c]``, the latter by the two-pass formula."""
    mean = Y.mean()
    return mean, torch.stack([(block - mean).square().sum(0) for block in Y.blocks()]).sum(0)


def _first(s: Tensor) -> float:
    return float(s[0]) if s.numel() else 0.0
