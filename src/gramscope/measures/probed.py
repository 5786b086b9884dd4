"""Cosines and traces of a large layer from products with random probes, with their standard errors.

Where exact measures do not fit the memory budget, the statistics hold ``ΣWΩ`` and ``KWΩ`` for a thin matrix Ω of random
signs. Inner products of d×d matrices are means over its columns, ``⟨A, B⟩ ≈ ⟨AΩ, BΩ⟩ / r``, and leaving out one group of them
at a time gives the standard error. The null of the ansatz needs the trace and the norm of K itself, on the column space of W
where k > d: these come from probes Ψ of the outputs. Centred correlations need sums of entries, ``1ᵀWᵀKW1``, which are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import binary_exponent, to_double
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.row_blocks import row_norm, row_product, spans
from gramscope.linalg.stochastic import FEWEST, GROUPS, onto_columns, probes
from gramscope.measures.kernel_alignment import KernelAlignment
from gramscope.measures.probed_products import REMARK, double, products_of, sums_by_group, weight_gram_times
from gramscope.measures.step_shifts import StepShifts


@dataclass(frozen=True)
class ProbedAlignment:
    """:class:`~gramscope.measures.kernel_alignment.KernelAlignment` by group of probes.

    Args:
        alignment: makes it from means over groups of the fields up to ``kernels``; its other fields are exact.
        size: ``‖XᵀXΩ_g‖² [groups]``, times groups over probes as all below.
        inner: ``⟨XᵀXΩ_g, XᵀK_pXΩ_g⟩ [parts, groups]``.
        squares: ``⟨XᵀK_pXΩ_g, XᵀK_qXΩ_g⟩ [parts, parts, groups]``.
        traces: ``tr Ψ_gᵀK_pΨ_g [parts, groups]``.
        kernels: ``⟨K_pΨ_g, K_qΨ_g⟩ [parts, parts, groups]``.
        agop: ``tr Ω_gᵀXᵀK_pXΩ_g [parts, groups]``, at the scale of X and K.
        exponent: of the power of two that K was divided by.
        probes: how many columns Ω has.
    """

    alignment: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], KernelAlignment]
    size: Tensor
    inner: Tensor
    squares: Tensor
    traces: Tensor
    kernels: Tensor
    agop: Tensor
    exponent: int
    probes: int

    def value(self, center: bool = False) -> Measured:
        """``ρ(XᵀX, XᵀKX)``, with the variances of the probes and of the parts of K together."""
        of_probes = jackknife("parts", GROUPS, lambda kept: self._of(kept).value(center).value)
        of_parts = self._of(torch.arange(GROUPS)).value(center).error
        return self._estimate(of_probes.value, of_probes.error, of_parts)

    def null(self, center: bool = False) -> Measured:
        """The same for random eigenvectors of K."""
        found = jackknife("parts", GROUPS, lambda kept: self._of(kept).null(center))
        return self._estimate(found.value, found.error)

    def spread(self) -> Measured:
        """The standard deviation of K's eigenvalues over their mean, where k ≤ d."""
        of_probes = jackknife("parts", GROUPS, lambda kept: self._of(kept).spread().value)
        return self._estimate(of_probes.value, of_probes.error, self._of(torch.arange(GROUPS)).spread().error)

    def inner_over(self, other: ProbedAlignment) -> Measured:
        """``⟨XᵀX, XᵀKX⟩`` over that of another K with the same X."""

        def value(parts: Tensor, groups: Tensor) -> float:
            mine, theirs = (x.inner[parts][:, groups].mean(1).sum() for x in (self, other))
            return float(torch.ldexp(mine / theirs, torch.tensor(self.exponent - other.exponent)))

        parts, groups = torch.arange(self.inner.shape[0]), torch.arange(GROUPS)
        of_probes = jackknife("parts", GROUPS, lambda kept: value(parts, kept))
        of_parts = jackknife("parts", len(parts), lambda kept: value(kept, groups))
        return self._estimate(of_probes.value, of_probes.error, of_parts.error)

    def trace(self) -> Measured:
        """``tr XᵀKX``."""
        parts = self.agop.shape[0]
        of_probes = jackknife("parts", GROUPS, lambda kept: float(self.agop[:, kept].mean() * parts))
        of_parts = jackknife("parts", parts, lambda kept: float(self.agop[kept].mean() * parts))
        return self._estimate(of_probes.value, of_probes.error, of_parts.error)

    def _of(self, kept: Tensor) -> KernelAlignment:
        """The alignment from some groups of probes."""
        sums = (self.size, self.inner, self.squares, self.traces, self.kernels)
        return self.alignment(*(x[..., kept].mean(-1) for x in sums))

    def _estimate(self, value: float, *errors: float | None) -> Measured:
        return Measured(value, math.hypot(*(error or 0.0 for error in errors)), REMARK.format(self.probes))


def probed_alignment(X: Tensor, products: Tensor) -> ProbedAlignment:
    """The products behind the ansatz.

    Args:
        X: ``[..., k, d]`` in any floating dtype: W, or its distance from another weight.
        products: ``[parts, ..., k, r + 1 + 64]`` that add up to ``K [XΩ, X1, Ψ]``
            (:func:`gramscope.statistics.square_sum.thin_of_kernel`).
    """
    k, d = X.shape[-2:]
    r = products.shape[-1] - 1 - FEWEST
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    gram, thin, e = weight_gram_times(X, probes(d, r, X))
    exponent = int(binary_exponent(products[..., r + 1 :]))
    of_inputs = double(products[..., : r + 1], -exponent - e)  # K_p [XΩ, X1] in units of X and of K
    outer = [double(X.mT @ part.to(X.dtype), -e) for part in of_inputs]  # with 1 as its last column
    ones = double(row_product(X, X.new_ones(d, 1, dtype=torch.float64)), -e)[..., 0]
    totals = (of_inputs[..., r] * ones).flatten(1).sum(1)
    sums = probes(d, r, X).double().sum(-2, keepdim=True)  # 1ᵀΩ
    gram_1 = double(X.mT @ ones.unsqueeze(-1).to(X.dtype), -e)
    sides = [_Split.of(gram, gram_1, sums)] + [_Split.of(part[..., :r], part[..., r:], sums) for part in outer]
    pairs = torch.stack([torch.stack([one.inner(other) for other in sides]) for one in sides])
    agop = torch.stack([sums_by_group(to_double(thin) * part[..., :r]) for part in of_inputs])
    kernels = [double(part[..., r + 1 :], -exponent) for part in products]
    if k > d:
        kernels = [to_double(onto_columns(X, part.to(X.dtype))) for part in kernels]
    traces = torch.stack([sums_by_group(probes(k, FEWEST, X).double() * part) for part in kernels])
    norms = double(torch.stack([row_norm(part) for part in X.reshape(-1, k, d)]), -e)
    groups = norms.numel()

    def alignment(size: Tensor, inner: Tensor, squares: Tensor, traces: Tensor, kernels: Tensor) -> KernelAlignment:
        return KernelAlignment(
            size, norms.pow(4).sum(), ones.square().sum(), min(k, d), groups, groups * d * d,
            inner, squares, totals, traces, kernels,
        )  # fmt: skip

    each = GROUPS / r
    return ProbedAlignment(
        alignment,
        pairs[0, 0],
        pairs[0, 1:],
        pairs[1:, 1:],
        traces * (GROUPS / FEWEST),
        products_of(kernels) * (GROUPS / FEWEST),
        double(agop * each, 2 * e + exponent),
        exponent,
        r,
    )


@dataclass(frozen=True)
class _Split:
    """A symmetric d×d matrix A by what it does to ``u = 1/√d``, exactly, and to probes without their part along u.

    With ``P = I − uuᵀ`` inner products are ``⟨PAP, PBP⟩ + 2⟨PAu, PBu⟩ + (uᵀAu)(uᵀBu)``. Only the first term is estimated:
    the mean of all entries, which may be much larger than their variation, is exact.
    """

    across: Tensor
    along: Tensor
    mean: Tensor

    @classmethod
    def of(cls, times_probes: Tensor, times_ones: Tensor, sums: Tensor) -> _Split:
        """From ``AΩ``, ``A1`` and ``1ᵀΩ``."""
        d = times_ones.shape[-2]
        across = times_probes - times_ones * (sums / d)
        across = across - across.mean(-2, keepdim=True)
        mean = times_ones.mean(-2, keepdim=True)
        return cls(across, (times_ones - mean) / d**0.5, mean)

    def inner(self, other: _Split) -> Tensor:
        """The inner product from each group of probes."""
        estimated = sums_by_group(self.across * other.across) * (GROUPS / self.across.shape[-1])
        return estimated + 2 * (self.along * other.along).sum() + (self.mean * other.mean).sum()


@dataclass(frozen=True)
class ProbedShifts:
    """:class:`~gramscope.measures.step_shifts.StepShifts` by group of probes.

    Args:
        products: ``[groups, 4, 4]``.
        exponents: as there.
        traces: ``[groups, 4]``; but for that of C they are exact, and the same in all groups.
        d: as there.
        probes: how many there are.
    """

    products: Tensor
    exponents: tuple[int, int, int, int]
    traces: Tensor
    d: int
    probes: int

    def value(self, what: str, gamma: float) -> Measured:
        """A measure of a step of rate γ: ``cosine``, ``residual``, ``gram_cosine`` or ``null``."""

        def of(kept: Tensor) -> float:
            shifts = StepShifts(self.products[kept].mean(0), self.exponents, self.traces[kept].mean(0), self.d)
            return float(getattr(shifts, what)(gamma))

        return jackknife("parts", GROUPS, of).with_remark(REMARK.format(self.probes))


def probed_shifts(W: Tensor, D: Tensor, covariance: Tensor, omega: Tensor | None = None) -> ProbedShifts:
    """The products of a step.

    Args:
        W, D: weight and summed gradient ``[..., k, d]``.
        covariance: ``ΣWΩ [..., k, r]``.
        omega: Ω ``[d, r]``, by default the probes of a fixed seed.
    """
    d, r = W.shape[-1], covariance.shape[-1]
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    omega = probes(d, r, W) if omega is None else omega.to(W.dtype)
    D = D.to(W.dtype)
    gram, WO, w = weight_gram_times(W, omega)
    s = int(binary_exponent(covariance))
    covariance = double(W.mT @ double(covariance, -s).to(W.dtype), -w)
    square, DO, g = weight_gram_times(D, omega)
    mixed = double(W.mT @ DO, -w) + double(D.mT @ WO, -g)
    four = [mixed, square, covariance, gram]
    products = products_of(four)  # [4, 4, groups]
    scale = GROUPS / r
    of_covariance = sums_by_group(omega.double() * covariance) * scale
    exact = 2 * _inner(W, D, w, g), _inner(D, D, g, g), _inner(W, W, w, w)
    first, second, last = (x.expand(GROUPS) for x in exact)
    traces = torch.stack([first, second, of_covariance, last], 1)
    columns = W.shape[:-2].numel() * d
    return ProbedShifts(products.permute(2, 0, 1) * scale, (w + g, 2 * g, s + w, 2 * w), traces, columns, r)


def _inner(A: Tensor, B: Tensor, a: int, b: int) -> Tensor:
    """``⟨A, B⟩`` of A times ``2^−a`` and B times ``2^−b``, read in blocks of rows."""
    first, second = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    parts = [(double(first[i:j], -a) * double(second[i:j], -b)).sum() for i, j in spans(*first.shape)]
    return torch.stack(parts).sum()
