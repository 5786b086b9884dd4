"""Residuals of ridge regression from the normal equations where they are well conditioned, several times faster than by QR.

This is iterative refinement. ``HᵀH`` (``HHᵀ`` where n < d) and its Cholesky factor are formed in float32. Every refinement
computes the gradient of the fit in float64 from features and targets and solves for the correction with the factor, so that
rounding errors of the products do not remain in the result. If refinements converge slowly, or some direction of the features
is hardly longer than rounding errors, the products are formed again in float64. If that does not help either, the result is
None and the caller falls back to :mod:`gramscope.linalg.ridge`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.products import single_products_are_exact
from gramscope.linalg.psd import EPS, add_gram_, mirror_
from gramscope.linalg.ridge import input_noise
from gramscope.linalg.row_blocks import Rows, spans

#: rows of one product
PRODUCT_ROWS = 4096
#: entries of a float64 block, 0.5 MB: it fits the processor's cache
CACHED_ENTRIES = 2**16
#: refinements at most
REFINEMENTS = 6
#: refinement stops when the fit changes by less than this part of ‖Y‖² or ‖α‖
CONVERGED = 1e-12
#: least factor by which a refinement must reduce the change
PROGRESS = 0.01
#: the shortest direction must be this many times longer than rounding errors
CLEAR = 100.0


class NormalFit(NamedTuple):
    """A ridge fit.

    Args:
        residuals: ``‖y − Hβ‖²`` of every target, ``[c]``.
        totals: ``‖y − ȳ‖²`` of every target, ``[c]``.
        mean_y: ``[c]``.
        rank: of H, plus one for the intercept.
        freedom: degrees of freedom of the fit.
    """

    residuals: Tensor
    totals: Tensor
    mean_y: Tensor
    rank: int
    freedom: float


def fit_normal_equations(H: Rows, Y: Rows, ridge: float, intercept: bool = False) -> NormalFit | None:
    """The ridge fit of ``Y [n, c]`` on ``H [n, d]``, or None if the normal equations are too inaccurate.

    >>> H = Rows(torch.tensor([[1.0], [2.0], [3.0]]), "H")
    >>> fit_normal_equations(H, Rows(torch.tensor([[1.0], [0.0], [1.0]]), "Y"), 0.0).residuals
    tensor([0.8571], dtype=torch.float64)
    """
    mean_y, totals = _spread(Y)
    offset = mean_y if intercept else None
    precisions = [torch.float32] if single_products_are_exact(H.device) else []
    for dtype in (*precisions, torch.float64):
        if H.n > H.width + int(intercept):
            residuals = _tall(H, Y, ridge, offset, totals + (0.0 if intercept else H.n * mean_y.square()), dtype)
            fit = None if residuals is None else (residuals, float(H.width + int(intercept)))
        else:
            fit = _wide(H, Y, ridge, offset, totals, dtype) if H.n < H.width else None
        if fit is not None:
            residuals, freedom = fit
            return NormalFit(residuals, totals, mean_y, min(H.n, H.width + int(intercept)), freedom)
    return None


def _tall(H: Rows, Y: Rows, ridge: float, mean_y: Tensor | None, totals: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``‖y − Hβ‖² [c]``; with ``mean_y`` of centred features and targets."""
    mean_h = None if mean_y is None else H.mean()
    gram = torch.zeros(H.width, H.width, dtype=dtype, device=totals.device)
    cross = torch.zeros(Y.width, H.width, dtype=dtype, device=totals.device)
    for start in range(0, H.n, PRODUCT_ROWS):
        stop = min(H.n, start + PRODUCT_ROWS)
        h = H.data[start:stop].to(gram) if type(H) is Rows else H.block(start, stop).to(dtype)
        add_gram_(gram, h)
        cross.addmm_(Y.block(start, stop).to(dtype).mT, h)
    uncentred = gram.diagonal().clone()
    if mean_h is not None and mean_y is not None:
        gram.addr_(mean_h.to(dtype), mean_h.to(dtype), alpha=-H.n)
        cross.addr_(mean_y.to(dtype), mean_h.to(dtype), alpha=-H.n)
    longer = float((uncentred / gram.diagonal()).amax().sqrt())
    noise = 0.0 if ridge else input_noise(H.n, H.width, H.eps) * longer
    factor = _Factor.of(gram, ridge, max(noise, H.n * EPS * math.sqrt(H.width)), longer)
    if factor is None:
        return None
    total, before = float(totals.sum()), math.inf
    beta = factor.solve(cross.mT.double())
    for _ in range(REFINEMENTS):
        residual, gradient = _residual_and_gradient(H, Y, mean_h, mean_y, beta)
        gradient -= ridge * beta
        change = factor.solve(gradient)
        energy = float((gradient * change).sum())
        if energy <= CONVERGED * total:
            # the objective is quadratic, so its value after the last change is known
            penalty = 2 * beta * change + change.square()
            return (residual - (gradient * change + ridge * penalty).sum(0)).clamp(min=0.0)
        if not energy <= PROGRESS * before:
            return None
        before = energy
        beta += change
    return None


def _residual_and_gradient(
    H: Rows, Y: Rows, mean_h: Tensor | None, mean_y: Tensor | None, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """``‖y − Hβ‖² [c]`` and ``Hᵀ(Y − Hβ) [d, c]``."""
    residual: Tensor | float = 0.0
    gradient: Tensor | None = None
    for start, stop in spans(H.n, H.width + Y.width, entries=CACHED_ENTRIES):
        h, r = H.block(start, stop), Y.block(start, stop)
        if mean_h is not None and mean_y is not None:
            h, r = h - mean_h, r - mean_y
        r = r - (beta.mT @ h.mT).mT  # half the time of hβ: few columns
        residual = residual + r.square().sum(0)
        part = r.mT @ h
        gradient = part if gradient is None else gradient.add_(part)
    assert isinstance(residual, Tensor)
    assert gradient is not None
    return residual, gradient.mT.contiguous()


def _wide(
    H: Rows, Y: Rows, ridge: float, mean_y: Tensor | None, totals: Tensor, dtype: torch.dtype
) -> tuple[Tensor, float] | None:
    """``‖y − Hβ‖² [c]`` and degrees of freedom, from ``HHᵀα + λα = Y``, whose residual is λα; centred with ``mean_y``."""
    intercept = mean_y is not None
    if intercept and not ridge:
        return None  # centred features lack a direction
    y = Y.block(0, Y.n) - (0.0 if mean_y is None else mean_y)
    gram = torch.zeros(H.n, H.n, dtype=dtype, device=y.device)
    for start, stop in spans(H.width, H.n, entries=10 * CACHED_ENTRIES):
        h = H.data[:, start:stop].to(gram) if type(H) is Rows else H.columns(start, stop).to(dtype)
        add_gram_(gram, h.mT)
    if intercept:
        means = mirror_(gram).mean(0)
        gram.sub_(means).sub_((means - means.mean())[:, None])
    factor = _Factor.of(gram, ridge, max(input_noise(H.width, H.n, H.eps), H.width * EPS * math.sqrt(H.n)))
    if factor is None:
        return None
    if not ridge:
        return torch.zeros_like(totals), H.n
    alpha, residual, before = torch.zeros_like(y), y, math.inf
    for _ in range(REFINEMENTS):
        change = factor.solve(residual)
        alpha += change
        size = float(change.norm()) / max(float(alpha.norm()), 1e-300)
        if size <= CONVERGED:  # the residual is linear in α, not quadratic as above
            freedom = H.n - ridge * factor.inverse_trace() + int(intercept)
            return (ridge * alpha).square().sum(0), freedom
        if not size <= math.sqrt(PROGRESS) * before:
            return None
        before = size
        residual = y - ridge * alpha
        for start, stop in spans(H.width, H.n, entries=3 * CACHED_ENTRIES):
            h = H.columns(start, stop)
            h = h - h.mean(0) if intercept else h
            residual.addmm_(h, (alpha.mT @ h).mT, alpha=-1)  # half the time of hᵀα: few columns
    return None


def _spread(Y: Rows) -> tuple[Tensor, Tensor]:
    """``ȳ [c]`` and ``‖y − ȳ‖² [c]``, the latter by the two-pass formula."""
    parts = [*spans(Y.n, Y.width, entries=CACHED_ENTRIES // 2)]
    mean = torch.stack([Y.block(i, j).sum(0) for i, j in parts]).sum(0) / Y.n
    return mean, torch.stack([(Y.block(i, j) - mean).square().sum(0) for i, j in parts]).sum(0)


class _Factor(NamedTuple):
    """``A ≈ S L Lᵀ S`` with a diagonal S that gives the middle a diagonal of ones."""

    scale: Tensor
    lower: Tensor

    @classmethod
    def of(cls, gram: Tensor, ridge: float, noise: float, longer: float = 1.0) -> _Factor | None:
        """Cholesky factor of ``gram + ridge·I``. Only the upper blocks of ``gram`` are read, and it is overwritten.

        None if the matrix is not positive definite or, without a ridge, if some direction is not clearly longer than
        ``noise`` (features scaled to length 1) and than the rounding errors of the product. The features were up to
        ``longer`` times as long before they were centred, and so are these errors.
        """
        limits = torch.finfo(gram.dtype)
        gram.diagonal().add_(ridge)
        scale = gram.diagonal().sqrt()
        if not bool(((scale > limits.tiny**0.25) & (scale < limits.max**0.25)).all()):
            return None
        gram.div_(scale).div_(scale[:, None])
        upper, info = torch.linalg.cholesky_ex(gram, upper=True)
        if int(info) != 0:
            return None
        factor = cls(scale, upper.mT)
        rounding = limits.eps * math.sqrt(scale.numel()) * longer**2
        if not ridge and factor.smallest() < max((CLEAR * noise) ** 2, CLEAR * rounding):
            return None
        return factor

    def smallest(self) -> float:
        """The smallest eigenvalue of the scaled matrix, by inverse iteration."""
        x = torch.ones_like(self.scale)[:, None]
        for _ in range(8):
            x = torch.cholesky_solve(x / x.norm(), self.lower)
        return 1 / float(x.norm())

    def solve(self, rhs: Tensor) -> Tensor:
        """``A⁻¹ rhs`` in float64, with the accuracy of the factor."""
        exponent = torch.frexp(rhs.abs().amax()).exponent  # float32 has a smaller range
        scale = to_double(self.scale)[:, None]
        x = (torch.ldexp(rhs, -exponent) / scale).to(self.lower)
        return torch.ldexp(to_double(torch.cholesky_solve(x, self.lower)).to(rhs.device) / scale, exponent)

    def inverse_trace(self, probes: int = 8) -> float:
        """``tr A⁻¹``, estimated with random signs."""
        signs = torch.randint(2, (self.scale.numel(), probes), generator=torch.Generator().manual_seed(0))
        z = (2.0 * signs - 1.0).to(self.scale.device, torch.float64)
        return float((z * self.solve(z)).sum()) / probes
