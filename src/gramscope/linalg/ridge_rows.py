"""Ridge regression of features that are there: tall ones by QR or moments, wide ones by ``HHᵀ`` or the QR of ``Hᵀ``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import MappedRows, OneHotRows, Rows, check_pair, check_range, spans
from gramscope.linalg.moments import Moments, class_moments, moments
from gramscope.linalg.psd import EPS, SymmetricSum, svd, svdvals
from gramscope.linalg.ridge import (
    SMALL,
    TINY,
    RidgeFit,
    Small,
    check_ridge,
    clear_factor,
    fit_directions,
    fit_small,
    input_noise,
    limit_of,
    number,
)
from gramscope.linalg.ridge_moments import fit_clear, fit_moments

#: most directions taken as zero that are looked at again, and most entries of features times directions
HIDDEN, HIDDEN_ENTRIES = 8, 4_000_000


def fit_rows(H: Rows, Y: Rows, ridge: float = 0.0, intercept: bool = False, rtol: float | None = None) -> RidgeFit:
    """The fit of ``Y [n, c]`` on ``H [n, d]``; extra memory is a few blocks and ``min(n, d)²``.

    Args:
        H: features.
        Y: targets.
        ridge: λ.
        intercept: fit a constant too, which is not penalised.
        rtol: singular values up to ``rtol`` times the largest (of the uncentred H) count as zero. By default, without a ridge
            and with every feature scaled to length 1 where n ≥ d: those up to ``max(n, d)·2.2e-16`` times the largest, and
            those as short as the rounding of features that came in less than float64.

    >>> fit = fit_rows(Rows(torch.tensor([[1.0], [2.0], [3.0]]), "H"), Rows(torch.tensor([[1.0], [0.0], [1.0]]), "Y"))
    >>> round(float(fit.residuals), 4), fit.rank
    (0.8571, 1)
    """
    check_pair(H, Y)
    ridge = check_ridge(ridge)
    if rtol is not None and not 0.0 <= number(rtol) < 1.0:
        raise InputError(f"rtol={rtol!r}: give a number from 0 to below 1, or None")
    if H.n < H.width:
        return _fit_wide(H, Y, ridge, intercept, rtol)
    fit = None
    if rtol is None and H.eps > EPS:
        fit = fit_moments(_moments_of(H, Y), ridge, intercept, H.eps)
    elif rtol is None and ridge and H.width > SMALL:
        fit = fit_clear(_moments_of(H, Y), ridge, intercept)
    fit = _fit_tall(H, Y, ridge, intercept, rtol) if fit is None else fit
    if ridge or rtol is not None:
        return fit
    return replace(fit, uncertain=fit.uncertain + hidden_part(H, Y, fit, intercept))


def _moments_of(H: Rows, Y: Rows) -> Moments:
    if not isinstance(Y, OneHotRows):
        return moments(H, Y)
    m = class_moments(H, Y).to_moments()
    return replace(m, mean_y=m.mean_y - Y.shift)


def _fit_tall(H: Rows, Y: Rows, ridge: float, intercept: bool, rtol: float | None = None) -> RidgeFit:
    mean_y, totals = _spread(Y)
    mean_h = H.mean() if intercept else None
    features, targets = (MappedRows(H, shift=mean_h), MappedRows(Y, shift=mean_y)) if intercept else (H, Y)
    R, rhs, outside = triangular_factor(features, targets)
    check_range(R, f"the length of a column of {H.name}")
    return fit_small(Small(H.n, R, rhs, outside, totals, mean_h, mean_y), ridge, rtol)


def _fit_wide(H: Rows, Y: Rows, ridge: float, intercept: bool, rtol: float | None) -> RidgeFit:
    """The fit from ``HHᵀ`` where that is far from singular, else from a QR factorisation of ``Hᵀ``."""
    mean_y, totals = _spread(Y)
    y = Y.block(0, Y.n) - (mean_y if intercept else 0.0)
    mean_h = H.mean() if intercept else None
    rounded = H.eps > EPS and rtol is None and not ridge
    noise = 4 * H.eps * _longest(H) if rounded else 0.0
    small = Small(H.n, y[:0], y, torch.zeros_like(totals), totals, mean_h, mean_y, eps=H.eps)

    weights, fit = None, None
    if rtol is None and (ridge or not intercept):  # centred rows sum to zero
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
                H.n - ridge * float(inverse) + intercept, 0.0, 0.0, limit_of(H.eps),
            )  # fmt: skip
    if fit is None or weights is None:
        U, s, _ = svd(_wide_factor(H, mean_h).mT)
        offset = 0.0 if mean_h is None else math.sqrt(H.n) * float(mean_h.norm())
        largest = math.hypot(float(s[0]), offset)
        tolerance = max(noise, largest * (max(H.n, H.width, 8) * EPS if rtol is None else rtol))
        angles = math.sqrt(H.width) * EPS * largest / s.clamp(min=TINY)
        fit = fit_directions(small, s, U.mT @ y, small.outside, ridge, tolerance, angles)
        weights = U @ (fit.beta / torch.where(s > tolerance, s, 1.0)[:, None])
    beta = torch.cat([(weights.mT @ block).mT for block in _columns(H, mean_h)])  # faster than hᵀα for few columns
    constant = fit.intercept if mean_h is None else mean_y - mean_h @ beta
    return replace(fit, beta=beta, intercept=constant)


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
    if H.n >= H.width:
        return svdvals(triangular_factor(H)[0])
    return svdvals(_wide_factor(H, None))


def triangular_factor(H: Rows, Y: Rows | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``R``, ``QᵀY`` and ``‖(I − QQᵀ)y‖² [c]`` of ``H = QR``, updated block by block; Q is never formed.

    Args:
        H: ``[n, d]``.
        Y: ``[n, c]``, or None for R only.
    """
    R: Tensor | None = None
    rhs: Tensor | None = None
    outside: Tensor | None = None
    width = H.width
    targets = 1 if Y is None else Y.width
    # Blocks no shorter than R at most double the flops by being stacked below it.
    for start, stop in spans(H.n, width + targets, least=width):
        block = H.block(start, stop)
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


def _spread(Y: Rows) -> tuple[Tensor, Tensor]:
    """``ȳ [c]`` and ``‖y − ȳ‖² [c]``, the latter by the two-pass formula."""
    mean = Y.mean()
    return mean, torch.stack([(block - mean).square().sum(0) for block in Y.blocks()]).sum(0)


def hidden_part(H: Rows, Y: Rows, fit: RidgeFit, intercept: bool) -> float:
    """The part of ``‖Y‖²`` along directions of H that the fit took as zero and that are not.

    Features that depend on each other exactly have directions of length zero, of which a decomposition leaves some 1e-16;
    features that differ by their last digits have directions of the same computed length, along which targets may lie. Products
    ``Hv`` with twice the digits tell them apart. Directions that rounding of the features explains count only where targets
    have more than a chance part along them.
    """
    count = 0 if fit.absent is None else min(len(fit.absent), HIDDEN, HIDDEN_ENTRIES // (H.n * H.width))
    if count == 0 or fit.absent is None:
        return 0.0
    features, directions = H.block(0, H.n), fit.absent
    if count < len(directions):
        mixing = torch.randn(
            count,
            len(directions),
            generator=torch.Generator(device="cpu").manual_seed(0),
            dtype=torch.float64,
            device="cpu",
        )
        directions = mixing.to(directions.device) @ directions
    products = torch.stack([accurate_product(features, v) for v in directions], 1)
    if intercept:  # the mean is subtracted before the product is rounded
        wider = torch.cat([features, features.new_ones(H.n, 1)], 1)
        pairs = zip(directions, products.mean(0), strict=True)
        products = torch.stack([accurate_product(wider, torch.cat([v, -mean[None]])) for v, mean in pairs], 1)
    length = products.norm(dim=0)
    real = (products.abs() > 4 * H.eps * features.abs() @ directions.abs().mT).double().mean(0) > 0.5
    used = real if bool(real.any()) else length > 0
    if not bool(used.any()):
        return 0.0
    more_features = Rows(torch.cat([features, products[:, used] / length[used]], 1), H.name)
    residual, other = float(fit.residuals.sum()), _fit_tall(more_features, Y, 0.0, intercept)
    seen, more = residual - float(other.residuals.sum()), max(other.rank - fit.rank, 1)
    # random directions have a larger part with a probability of about e⁻⁵ (Laurent and Massart 2000)
    chance = -math.expm1(-(more + 2 * math.sqrt(5 * more) + 10) / max(H.n - fit.rank, 1))
    if not bool(real.any()) and seen <= chance * residual:
        return 0.0
    return max(0.0, seen) * max(1.0, len(fit.absent) / more)


def accurate_product(H: Tensor, v: Tensor) -> Tensor:
    """``Hv [n]`` as if computed with twice the digits and rounded (Ogita, Rump & Oishi 2005, Dot2).

    >>> H = torch.tensor([[1.0, 1e-20, -1.0]], dtype=torch.float64)
    >>> accurate_product(H, torch.ones(3, dtype=torch.float64)).item()
    1e-20
    """
    total, error = H.new_zeros(H.shape[0]), H.new_zeros(H.shape[0])
    for h, x in zip(H.mT, v, strict=True):
        product = h * x
        (h_high, h_low), (x_high, x_low) = _halves(h), _halves(x)
        lost = h_low * x_low - (((product - h_high * x_high) - h_low * x_high) - h_high * x_low)
        new = total + product
        added = new - total
        error += (total - (new - added)) + (product - added) + lost
        total = new
    return total + error


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as a sum of two numbers of 26 digits."""
    shifted = (2.0**27 + 1) * x
    high = shifted - (shifted - x)
    return high, x - high
