"""Ridge regression from moments: :mod:`gramscope.linalg.ridge` says what precision it can have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import EPS, eigh
from gramscope.linalg.ridge import (
    CHANCE,
    TINY,
    UNCERTAIN,
    RidgeFit,
    Small,
    check_ridge,
    clear_factor,
    fit_small,
    input_noise,
    limit_of,
    turned,
)


def fit_moments(m: Moments, ridge: float = 0.0, intercept: bool = False, eps: float = EPS) -> RidgeFit:
    """The fit of y on h given their moments, of features that came with relative rounding ``eps``.

    >>> from gramscope.linalg.moments import moments
    >>> m = moments(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [0.0], [1.0]]))
    >>> round(float(fit_moments(m).residuals), 4)
    0.8571
    """
    ridge = check_ridge(ridge)
    fit = fit_clear(m, ridge, intercept, eps)
    if fit is not None:
        return fit
    found = _directions(m, eps, intercept)
    outside = (m.C_yy.diagonal() - found.targets.square().sum(0)).clamp(min=0.0)
    if not ridge:
        return _least_squares(m, found, outside, intercept, eps)
    rows, targets, mean_h = found.rows, found.targets, m.mean_h if intercept else None
    if not intercept:  # the constant is a direction like the others: H = 1 h̄ᵀ + (H − 1 h̄ᵀ), and the two are orthogonal
        rows = torch.cat([math.sqrt(m.n) * found.mean[None], rows])
        targets = torch.cat([math.sqrt(m.n) * m.mean_y[None], targets])
    uncertain = _digits(m, float(outside.sum()))
    fit = fit_small(Small(m.n, rows, targets, outside, m.C_yy.diagonal(), mean_h, m.mean_y, uncertain, eps), ridge)
    return replace(fit, uncertain=uncertain + float(fit.residuals.sum())) if found.lost else fit


def _digits(m: Moments, residual: float) -> float:
    """What rounding costs residuals from moments: the mean was subtracted from targets, and small squares have few digits."""
    total = float(m.C_yy.trace())
    digits = 2 * EPS * math.sqrt(m.n * total) * float(m.mean_y.norm()) + m.n * TINY
    return digits * max(1.0, residual / max(total, TINY))


def fit_clear(m: Moments, ridge: float, intercept: bool, eps: float = EPS) -> RidgeFit | None:
    """The fit by the normal equations, 30 times faster than from eigenvectors; None unless it is as good."""
    n, d, total = m.n, m.mean_h.shape[-1], float(m.C_yy.trace())
    offset = n * float(m.mean_y.square().sum())
    if n <= d or (not intercept and offset > 1e4 * total):
        return None
    gram, cross, squares = (m.require_gram(), m.C_hy, m.C_yy) if intercept else (m.HtH, m.HtY, m.YtY)
    ratio = (
        float((m.HtH.diagonal() / m.require_gram().diagonal()).amax()) if intercept else 1.0
    )  # centring costs digits
    A = gram + ridge * torch.eye(d, dtype=gram.dtype, device=gram.device)
    factor = clear_factor(A, 0.0 if ridge else input_noise(n, d, eps) ** 2 * ratio, EPS * math.sqrt(ratio))
    if factor is None:
        return None
    R, scale = factor
    part = torch.linalg.solve_triangular(R.mT, cross / scale[:, None], upper=False)
    beta = torch.linalg.solve_triangular(R, part, upper=True) / scale[:, None]
    residuals = (squares.diagonal() - part.square().sum(0) - ridge * beta.square().sum(0)).clamp(min=0.0)
    trace = d - (
        ridge * float((torch.cholesky_inverse(R, upper=True).diagonal() / scale.square()).sum()) if ridge else 0.0
    )
    constant = m.mean_y - m.mean_h @ beta if intercept else torch.zeros_like(m.mean_y)
    uncertain = _digits(m, float(residuals.sum()))
    return RidgeFit(
        n, ridge, beta, constant, residuals, m.C_yy.diagonal(), m.mean_y, d + intercept, trace + intercept, 0.0, uncertain,
        limit_of(eps),
    )  # fmt: skip


@dataclass(frozen=True)
class _Directions:
    """The centred features as few rows, from the eigenvectors of their correlations.

    Args:
        rows: ``[r, d]`` without directions lost in rounding; ``rowsᵀrows = C_hh``.
        targets: of these rows, ``[r, c]``.
        inverse: ``[d, r]``, with which ``rows @ inverse`` is the identity.
        absent: directions lost in rounding, ``[·, d]``.
        mean: ``h̄ [d]``, without its parts along lost directions that are as short as these.
        outside: a direction ``[d]`` along which only the mean has a part, zero if there is none: it fits a constant.
        angles: by which rounding may turn the rows, ``[r]``.
        slope: how much the constant that the mean fits may vary, relative to itself.
        near: the part of ``‖Y‖²`` along directions near the tolerance.
        lost: whether targets may have a part along lost directions.
    """

    rows: Tensor
    targets: Tensor
    inverse: Tensor
    absent: Tensor
    mean: Tensor
    outside: Tensor
    angles: Tensor
    slope: float
    near: float
    lost: bool


def _directions(m: Moments, eps: float, intercept: bool) -> _Directions:
    square, total = m.require_gram().diagonal(), float(m.C_yy.trace())
    varies = square > m.n * (8 * EPS * m.mean_h).square()  # less is what rounding leaves of a constant
    size, v = square[varies].sqrt(), max(int(varies.sum()), 1)
    ratio = (1 + m.n * (m.mean_h[varies] / size).square()).sqrt()  # how many times longer features are uncentred
    values, vectors = eigh(m.require_gram()[varies][:, varies] / torch.outer(size, size))
    cross = vectors.mT @ (m.C_hy[varies] / size[:, None])
    largest = float(values[-1]) if values.numel() else 0.0
    tolerance = v * EPS * largest + m.n * v * TINY / float(size.min().square() if size.numel() else 1.0)
    rounding = (input_noise(m.n, v, eps) * (ratio[:, None] * vectors).norm(dim=0)).square().clamp(min=tolerance)
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
    mean, absent, fitted = m.mean_h.clone(), vectors[:, ~kept & short], ~kept & ~short
    mean[varies] -= size * (absent @ (absent.mT @ (mean[varies] / size)))
    slope = math.sqrt(tolerance) / float(along[fitted].max()) if bool(fitted.any()) else 0.0
    root, basis = values[kept].sqrt(), vectors[:, kept]
    targets = cross[kept] / root[:, None]
    rows, inverse = (targets.new_zeros(root.numel(), m.mean_h.numel()) for _ in range(2))
    rows[:, varies], inverse[:, varies] = root[:, None] * basis.mT * size, (basis / root).mT / size
    absent = targets.new_zeros(int((~kept).sum()), m.mean_h.numel())
    absent[:, varies] = vectors[:, ~kept].mT / size
    outside = torch.zeros_like(mean)
    if bool(mean[~varies].any()):
        outside[~varies] = torch.where(mean[~varies] != 0, 1 / mean[~varies], 0.0)
    elif bool(fitted.any()):
        outside[varies] = vectors[:, fitted] @ (vectors[:, fitted].mT @ (mean[varies] / size)) / size
    near = float((rounding[kept] / values[kept]) @ targets.square().sum(1))
    return _Directions(
        rows,
        targets,
        inverse.mT,
        absent,
        mean,
        outside,
        4 * tolerance / values[kept] + 2 * EPS * (ratio[:, None] * basis).norm(dim=0) / root,  # centring moves features
        0.0 if bool(mean[~varies].any()) else slope,
        near if near > UNCERTAIN * total else 0.0,
        bool(lost.any()),
    )


def _least_squares(m: Moments, p: _Directions, outside: Tensor, intercept: bool, eps: float) -> RidgeFit:
    """The fit without a ridge, which any basis of the columns of H gives.

    Either a constant can be fitted beside the directions (``intercept``, or h̄ has a part along none of them), or H contains it
    only together with ``slopes`` times the directions, and then ``(1, −slopes)`` is orthogonal to all columns.
    """
    residuals, parts, along = outside, p.targets, p.targets.square().sum(1)
    rank, height = len(p.rows) + intercept, math.sqrt(m.n) * m.mean_y
    uncertain, fits_constant = p.near + _digits(m, float(outside.sum())), bool(p.outside.any())
    beta, span = p.inverse @ parts, p.rows
    if not intercept and fits_constant:
        rank += 1
        uncertain += float(height.square().sum()) * p.slope**2
        beta = beta + torch.outer(p.outside, m.mean_y - p.mean @ beta) / (p.mean @ p.outside)
        span = torch.cat([p.mean[None], span])
    elif not intercept:
        slopes = math.sqrt(m.n) * p.mean @ p.inverse
        missed, longer = height - slopes @ parts, 1 + slopes.square().sum()
        residuals = residuals + missed.square() / longer
        beta = p.inverse @ (parts + torch.outer(slopes, missed) / longer)
        # what changes when the parts of the mean along the directions change by their angles
        change, size = p.angles.clamp(max=1.0) * slopes.abs(), missed.norm()
        uncertain += 2 * float((change * (along.sqrt() + size * slopes.abs() / longer)).sum() * size / longer)
    uncertain += turned(p.angles, along, float(residuals.sum()), m.n - rank)
    uncertain += float(residuals.sum()) if p.lost else 0.0
    if len(span) < m.mean_h.numel():  # of minimum norm: in the span of the rows
        basis = torch.linalg.qr(span.mT)[0]
        beta = basis @ (basis.mT @ beta)
    constant = m.mean_y - m.mean_h @ beta if intercept else torch.zeros_like(m.mean_y)
    return RidgeFit(
        m.n, 0.0, beta, constant, residuals, m.C_yy.diagonal(), m.mean_y, rank, float(rank), 0.0, uncertain, limit_of(eps),
        p.absent if len(p.absent) else None,
    )  # fmt: skip
