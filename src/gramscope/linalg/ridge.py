"""Least squares and ridge regression of many targets, of arrays and of moments: one fit of few rows that have the same moments.

With ``H = U S Vᵀ`` the residual of the ridge fit is, exactly and without cancellation,

    ‖Y − Hβ‖² = ‖(I − UUᵀ) Y‖² + Σ_r (λ / (s_r² + λ))² ‖u_rᵀ Y‖²

Of float64 arrays S and UᵀY come from a QR factorisation updated block by block (of ``Hᵀ`` where n ≤ d): the condition number
is not squared, so that singular values down to ``max(n, d)·2.2e-16`` of the largest are seen. Of moments, and of features that
came in float32, they come from ``HᵀH`` with every feature scaled to unit length, so that neither offsets nor mixed
scales cost digits. There directions shorter than ``√(d·2.2e-16)``, about 2e-7 at d = 256, cannot be told from rounding: float32
features have directions of rounding of that size themselves (:func:`input_noise`), as after a layer normalisation, where their
sum is zero up to rounding. Where ``HᵀH`` (``HHᵀ``) is far from singular, a Cholesky factor of it takes the place of either.

Directions below these tolerances count as absent, and the fit is the one of minimum norm. ``RidgeFit.uncertain`` says how much
rounding may hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, MappedRows, OneHotRows, Rows, check_pair, spans
from gramscope.linalg.moments import Moments, moments
from gramscope.linalg.psd import EPS, SymmetricSum, eigh, svd, svdvals

#: the part of a target along a direction counts as real above this many standard deviations of that along a random one
CHANCE = 4.0
#: eigenvalues of HᵀH that are all this many times above rounding need no decomposition
CLEAR = 1e7
#: side up to which a decomposition costs little
SMALL = 64
#: the smallest normal number
TINY = torch.finfo(torch.float64).tiny


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
        uncertain: how much the residuals together may be off because of rounding.
        limit: the share of the targets' variance from which that deserves a warning.
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
    uncertain: float = 0.0
    limit: float = 1e-6
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


def check_ridge(ridge: Any) -> float:
    """The ridge as a float; negative, infinite or NaN ones are refused."""
    value = float(ridge) if isinstance(ridge, Real | Tensor) else math.nan
    if not 0.0 <= value < math.inf:
        raise InputError(f"ridge must be a finite number ≥ 0, got {ridge!r}")
    return value


# --- features that are there -------------------------------------------------------------------------------------------


def fit_rows(H: Rows, Y: Rows, ridge: float = 0.0, intercept: bool = False) -> RidgeFit:
    """The fit of ``Y [n, c]`` on ``H [n, d]``; extra memory is a few blocks and ``min(n, d)²``.

    Without a ridge, and with every feature scaled to length 1 where n > d, singular values up to ``max(n, d)·2.2e-16`` times
    the largest count as zero, and those as short as the rounding of features that came in less than float64.

    Args:
        H: features.
        Y: targets.
        ridge: λ.
        intercept: fit a constant too, which is not penalised.

    >>> fit = fit_rows(Rows(torch.tensor([[1.0], [2.0], [3.0]]), "H"), Rows(torch.tensor([[1.0], [0.0], [1.0]]), "Y"))
    >>> round(float(fit.residuals), 4), fit.rank
    (0.8571, 1)
    """
    check_pair(H, Y)
    ridge = check_ridge(ridge)
    if H.n <= H.width:
        return _fit_wide(H, Y, ridge, intercept)
    if H.eps > EPS:
        return fit_moments(_moments_of(H, Y), ridge, intercept, H.eps)
    fit = _fit_clear(_moments_of(H, Y), ridge, intercept, EPS) if ridge and H.width > SMALL else None
    if fit is not None:
        return fit
    mean_y, totals = _spread(Y)
    mean_h = H.mean() if intercept else None
    features, targets = (MappedRows(H, shift=mean_h), MappedRows(Y, shift=mean_y)) if intercept else (H, Y)
    R, rhs, outside = triangular_factor(features, targets)
    return _fit_few(FewRows(H.n, R, rhs, outside, totals, mean_h, mean_y), ridge)


def _moments_of(H: Rows, Y: Rows) -> Moments:
    m = moments(H, Y)
    return replace(m, mean_y=m.mean_y - Y.shift) if isinstance(Y, OneHotRows) else m


def _spread(Y: Rows) -> tuple[Tensor, Tensor]:
    """``ȳ [c]`` and ``‖y − ȳ‖² [c]``, the latter by the two-pass formula."""
    mean = Y.mean()
    return mean, torch.stack([(block - mean).square().sum(0) for block in Y.blocks()]).sum(0)


def _fit_wide(H: Rows, Y: Rows, ridge: float, intercept: bool) -> RidgeFit:
    """The fit of n ≤ d from ``HHᵀ`` where that is far from singular, else from a QR factorisation of ``Hᵀ``."""
    mean_y, totals = _spread(Y)
    y = Y.block(0, Y.n) - (mean_y if intercept else 0.0)
    mean_h = H.mean() if intercept else None
    rounded = H.eps > EPS and not ridge

    weights, fit = None, None
    if ridge or not intercept:  # centred rows sum to zero
        total = SymmetricSum(H.n, device=y.device)
        for block in _columns(H, mean_h):
            total.add_gram(block.mT)
        gram = total.dense()
        gram.diagonal().add_(ridge)
        factor = clear_factor(gram, input_noise(H.width, H.n, H.eps) ** 2 if rounded else 0.0)
        if factor is not None:
            R, scale = factor
            weights = torch.cholesky_solve(y / scale[:, None], R, upper=True) / scale[:, None]
            inverse = (torch.cholesky_inverse(R, upper=True).diagonal() / scale.square()).sum() if ridge else 0.0
            fit = RidgeFit(
                H.n, ridge, y, torch.zeros_like(mean_y), (ridge * weights).square().sum(0), totals, mean_y, H.n,
                H.n - ridge * float(inverse) + intercept, 0.0, _limit(H.eps),
            )  # fmt: skip
    if fit is None or weights is None:
        U, s, _ = svd(_wide_factor(H, mean_h).mT)
        largest = math.hypot(float(s[0]), 0.0 if mean_h is None else math.sqrt(H.n) * float(mean_h.norm()))
        noise = 4 * H.eps * _longest(H) if rounded else 0.0
        tolerance = max(noise, largest * max(H.n, H.width, 8) * EPS)
        angles = math.sqrt(H.width) * EPS * largest / s.clamp(min=TINY)
        rows = FewRows(H.n, y[:0], y, torch.zeros_like(totals), totals, mean_h, mean_y, eps=H.eps)
        fit = _fit_directions(rows, s, U.mT @ y, rows.outside, ridge, tolerance, angles)
        weights = U @ (fit.beta / torch.where(s > tolerance, s, 1.0)[:, None])
    beta = torch.cat([(weights.mT @ block).mT for block in _columns(H, mean_h)])  # faster than hᵀα for few columns
    return replace(fit, beta=beta, intercept=fit.intercept if mean_h is None else mean_y - mean_h @ beta)


def _columns(H: Rows, mean_h: Tensor | None) -> Iterator[Tensor]:
    """All columns in blocks, centred where a mean is given."""
    for start, stop in spans(H.width, H.n, least=H.n):
        block = H.columns(start, stop)
        yield block if mean_h is None else block - mean_h[start:stop]


def _wide_factor(H: Rows, mean_h: Tensor | None) -> Tensor:
    """The R of ``Hᵀ = QR``: ``H = RᵀQᵀ`` has the left singular vectors and the singular values of ``Rᵀ``."""
    R: Tensor | None = None
    for block in _columns(H, mean_h):
        R = torch.geqrf(block.mT if R is None else torch.cat([R, block.mT]))[0][: H.n].triu()
    assert R is not None
    return R


def _longest(H: Rows) -> float:
    """Length of the longest column plus that of the longest row."""
    columns = torch.stack([block.square().sum(0) for block in H.blocks()]).sum(0)
    return float(columns.amax().sqrt() + max(float(block.square().sum(1).amax()) for block in H.blocks()) ** 0.5)


def singular_values(H: Rows) -> Tensor:
    """The ``min(n, d)`` singular values of H, descending."""
    return svdvals(triangular_factor(H)[0] if H.n >= H.width else _wide_factor(H, None))


def triangular_factor(H: Rows, Y: Rows | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``R``, ``QᵀY`` and ``‖(I − QQᵀ)y‖² [c]`` of ``H = QR``, updated block by block; Q is never formed.

    Args:
        H: ``[n, d]``.
        Y: ``[n, c]``, or None for R only.
    """
    R, width = H.block(0, 0), H.width
    rhs = R[:, :1] if Y is None else Y.block(0, 0)
    outside = R.new_zeros(rhs.shape[1])
    # Blocks no shorter than R at most double the flops by being stacked below it.
    for start, stop in spans(H.n, width + rhs.shape[1], least=width):
        block = H.block(start, stop)
        y = block.new_zeros(block.shape[0], 1) if Y is None else Y.block(start, stop)
        reflectors, scales = torch.geqrf(torch.cat([R, block]))
        y = torch.ormqr(reflectors, scales, torch.cat([rhs, y]), transpose=True)
        rows = min(width, len(y))
        R, rhs = reflectors[:rows].triu(), y[:rows]
        outside += y[rows:].square().sum(0)
    return R, rhs, outside


# --- moments ----------------------------------------------------------------------------------------------------------


def fit_moments(m: Moments, ridge: float = 0.0, intercept: bool = False, eps: float = EPS) -> RidgeFit:
    """The fit of y on h given their moments, of features that came with relative rounding ``eps``.

    >>> m = moments(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [0.0], [1.0]]))
    >>> round(float(fit_moments(m).residuals), 4)
    0.8571
    """
    ridge = check_ridge(ridge)
    fit = _fit_clear(m, ridge, intercept, eps)
    if fit is None:
        fit = _fit_few(_rows_of(m, ridge, intercept, eps), ridge)
    # the mean was subtracted from targets before their squares were summed
    total, residual = float(m.C_yy.trace()), float(fit.residuals.sum())
    digits = 2 * EPS * math.sqrt(m.n * total) * float(m.mean_y.norm()) * max(1.0, residual / max(total, TINY))
    return replace(fit, uncertain=fit.uncertain + digits)


def _fit_clear(m: Moments, ridge: float, intercept: bool, eps: float) -> RidgeFit | None:
    """The fit by the normal equations, 30 times faster than from eigenvectors; None unless it is as good."""
    n, d = m.n, m.mean_h.shape[-1]
    if n <= d or (not intercept and n * float(m.mean_y.square().sum()) > 1e4 * float(m.C_yy.trace())):
        return None
    gram, cross, squares = (m.require_gram(), m.C_hy, m.C_yy) if intercept else (m.HtH, m.HtY, m.YtY)
    # centring costs digits
    ratio = float((m.HtH.diagonal() / gram.diagonal()).amax()) if intercept else 1.0
    A = gram + ridge * torch.eye(d, dtype=gram.dtype, device=gram.device)
    factor = clear_factor(A, 0.0 if ridge else input_noise(n, d, eps) ** 2 * ratio, EPS * math.sqrt(ratio))
    if factor is None:
        return None
    R, scale = factor
    part = torch.linalg.solve_triangular(R.mT, cross / scale[:, None], upper=False)
    beta = torch.linalg.solve_triangular(R, part, upper=True) / scale[:, None]
    residuals = (squares.diagonal() - part.square().sum(0) - ridge * beta.square().sum(0)).clamp(min=0.0)
    inverse = float((torch.cholesky_inverse(R, upper=True).diagonal() / scale.square()).sum()) if ridge else 0.0
    constant = m.mean_y - m.mean_h @ beta if intercept else torch.zeros_like(m.mean_y)
    return RidgeFit(
        n, ridge, beta, constant, residuals, m.C_yy.diagonal(), m.mean_y, d + intercept, d - ridge * inverse + intercept,
        0.0, _limit(eps),
    )  # fmt: skip


def _rows_of(m: Moments, ridge: float, intercept: bool, eps: float) -> FewRows:
    """The centred features as few rows, from the eigenvectors of their correlations; without an intercept, after their mean."""
    square, total = m.require_gram().diagonal(), float(m.C_yy.trace())
    varies = square > m.n * (8 * EPS * m.mean_h).square()  # less is what rounding leaves of a constant
    size, v = square[varies].sqrt(), max(int(varies.sum()), 1)
    ratio = (1 + m.n * (m.mean_h[varies] / size).square()).sqrt()  # how many times longer features are uncentred
    values, vectors = eigh(m.require_gram()[varies][:, varies] / torch.outer(size, size))
    cross = vectors.mT @ (m.C_hy[varies] / size[:, None])
    largest = float(values[-1]) if values.numel() else 0.0
    tolerance, turned = v * EPS * largest, (ratio[:, None] * vectors).norm(dim=0)
    rounding = (input_noise(m.n, v, eps) * turned).square().clamp(min=tolerance)
    kept = values > rounding
    # A direction that is truly zero has no part in HᵀY beyond rounding; that of rounded features has little more than chance.
    noise = max(m.n, v) * EPS * math.sqrt(largest * total)
    chance = CHANCE * (values.clamp(min=tolerance) * total / m.n).sqrt()
    exact = ~kept & (rounding <= tolerance)
    lost = torch.where(exact, cross[exact].norm() > noise, ~kept & (cross.norm(dim=1) > chance))
    along = math.sqrt(m.n) * (vectors.mT @ (m.mean_h[varies] / size)).abs()
    short = along <= math.sqrt(tolerance)
    if not intercept:  # a part of the mean along a lost direction, beyond rounding, could fit the constant
        lost |= exact & short & (along > m.n * EPS * float(ratio.norm()))

    root, basis = values[kept].sqrt(), vectors[:, kept]
    targets = cross[kept] / root[:, None]
    rows = targets.new_zeros(root.numel(), m.mean_h.numel())
    rows[:, varies] = root[:, None] * basis.mT * size
    angles = 4 * tolerance / values[kept] + 2 * EPS * turned[kept] / root  # centring moves features
    outside = (m.C_yy.diagonal() - targets.square().sum(0)).clamp(min=0.0)
    near = 0.0 if ridge else float((rounding[kept] / values[kept]) @ targets.square().sum(1))
    if not intercept:  # H = 1 h̄ᵀ + (H − 1 h̄ᵀ), and the two are orthogonal
        mean, absent = m.mean_h.clone(), vectors[:, ~kept & short]
        mean[varies] -= size * (absent @ (absent.mT @ (mean[varies] / size)))
        rows = torch.cat([math.sqrt(m.n) * mean[None], rows])
        targets = torch.cat([math.sqrt(m.n) * m.mean_y[None], targets])
        angles = torch.cat([angles.new_zeros(1), angles])
    return FewRows(
        m.n, rows, targets, outside, m.C_yy.diagonal(), m.mean_h if intercept else None, m.mean_y, near, eps, angles,
        bool(lost.any()),
    )  # fmt: skip


# --- the fit ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewRows:
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
        angles: by which rounding may have turned each row, ``[r]``.
        lost: whether targets may have a part along directions that these rows lack.
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
    angles: Tensor | None = None
    lost: bool = False


def _fit_few(p: FewRows, ridge: float) -> RidgeFit:
    """The fit from the singular values of the rows, every column scaled to length 1 where there is no ridge."""
    d, scale = p.rows.shape[1], p.rows.new_ones(p.rows.shape[1])
    offset = torch.zeros_like(scale) if p.mean_h is None else math.sqrt(p.n) * p.mean_h
    equilibrate = ridge == 0.0  # changes no fit without a ridge but the choice among equally good ones
    if equilibrate:
        scale = torch.cat([p.rows, offset[None]]).norm(dim=0)
        scale = torch.where(scale > 0, scale, 1.0)
    rows = p.rows / scale
    U, s, Vt = svd(rows)
    targets = U.mT @ p.targets
    outside = p.outside + (p.targets - U @ targets).square().sum(0)
    largest = math.hypot(float(s[0]) if s.numel() else 0.0, float((offset / scale).norm()))
    tolerance = largest * max(p.n, d) * EPS
    tolerance = max(tolerance, input_noise(p.n, d, EPS)) if equilibrate else tolerance
    moved = torch.full_like(s, math.sqrt(p.n) * EPS * largest)
    if p.angles is not None:
        moved = torch.hypot(moved, (U * (p.angles * rows.norm(dim=1))[:, None]).norm(dim=0))
    fit = _fit_directions(p, s, targets, outside, ridge, tolerance, moved / s.clamp(min=TINY))
    beta = Vt.mT @ fit.beta / scale[:, None]
    kept = s > tolerance
    if equilibrate and int(kept.sum()) < d:  # of minimum norm: in the span of the rows
        basis = torch.linalg.qr((Vt[kept] * scale).mT)[0]
        beta = basis @ (basis.mT @ beta)
    return replace(fit, beta=beta, intercept=fit.intercept if p.mean_h is None else p.mean_y - p.mean_h @ beta)


def _fit_directions(
    p: FewRows, s: Tensor, targets: Tensor, outside: Tensor, ridge: float, tolerance: float, angles: Tensor
) -> RidgeFit:
    """The fit on directions of lengths ``s [r]`` along which the targets have the parts ``targets [r, c]``.

    ``beta`` is in units of the right singular vectors, ``[r, c]``. ``angles [r]`` are those by which rounding may have turned
    the directions, each towards a random one.
    """
    kept, along = s > tolerance, targets.square().sum(1)
    lengths = torch.where(kept, s, 1.0)
    shrinkage = torch.where(kept, 1 / (1 + ridge / lengths.square()), 0.0)
    left = torch.where(kept, ridge / (lengths.square() + ridge), 1.0)
    residuals = outside + (left[:, None] * targets).square().sum(0)
    rank, residual = int(kept.sum()) + (p.mean_h is not None), float(residuals.sum())
    uncertain = p.uncertain + (residual if p.lost else 0.0)
    if not ridge:
        uncertain += float(((tolerance / lengths).square() * kept) @ along)
        if p.angles is None:  # of moments, near and lost have told of directions below the tolerance
            uncertain += float(along[~kept & (along > CHANCE**2 * residual / p.n)].sum())
        turned = torch.where(kept, angles, 0.0).clamp(max=1.0)
        sideways = math.sqrt(residual / max(p.n - rank, 1))
        uncertain += float((turned.square() * along + 2 * sideways * turned * along.sqrt()).sum())
    return RidgeFit(
        p.n, ridge, shrinkage[:, None] * targets / lengths[:, None], torch.zeros_like(p.mean_y), residuals, p.totals, p.mean_y,
        rank, float(shrinkage.sum()) + (p.mean_h is not None), uncertain, _limit(p.eps),
    )  # fmt: skip


def input_noise(n: int, d: int, eps: float) -> float:
    """Length of the directions that rounding alone gives n rows of d features of length 1; ``eps`` is 1.2e-7 for float32.

    The entries' errors are about ε/4 each and add up like random numbers; a factor of 16 leaves room for errors of the
    computations before.

    >>> f"{input_noise(400, 100, torch.finfo(torch.float32).eps):.1e}"
    '7.2e-07'
    """
    return 4 * eps * (1 + math.sqrt(d / n))


def _limit(eps: float) -> float:
    """The share of the targets' variance that may be wrong without a warning."""
    return 1e-6 if eps <= EPS else 1e-3


def clear_factor(A: Tensor, noise: float, rounding: float = 0.0) -> tuple[Tensor, Tensor] | None:
    """The upper Cholesky factor of ``A`` scaled to a diagonal of ones, and the scale ``[d]``.

    None where some eigenvalue of the scaled matrix is not clearly above that of ``rounding`` in its entries, or above ``noise``
    of features that came in less than float64.
    """
    scale = A.diagonal().sqrt()
    if scale.numel() <= SMALL or not bool((scale > 0).all()):
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
