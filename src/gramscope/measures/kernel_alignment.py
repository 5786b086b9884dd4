"""The neural feature ansatz from a tangent kernel kept in parts, with its standard error and its null."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import unit_scale
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.psd import eigh


@dataclass(frozen=True)
class KernelAlignment:
    """What the ansatz ``ρ(WᵀW, WᵀKW)`` and its null need, all of one scale.

    ``S`` is ``WWᵀ`` and ``K`` the kernel where k ≤ d. Where k > d only the part of K in the column space of W counts, and
    ``S = WᵀW``, ``K = S^{−½}(WᵀKW)S^{−½}``.

    Args:
        size: ``tr S²``, that is ``‖WᵀW‖_F²``.
        trace_square: ``(tr S)²``, summed over groups.
        total: sum of the entries of ``WᵀW``.
        dimension: of K: ``min(k, d)`` in each group.
        groups: diagonal blocks.
        entries: of ``WᵀW``, d² per group.
        inner: ``⟨WᵀW, WᵀK_pW⟩ [parts]``.
        squares: ``⟨WᵀK_pW, WᵀK_qW⟩ [parts, parts]``.
        totals: sums of the entries of ``WᵀK_pW [parts]``.
        traces: ``tr K_p [parts]``.
        kernels: ``⟨K_p, K_q⟩ [parts, parts]``.
    """

    size: Tensor
    trace_square: Tensor
    total: Tensor
    dimension: int
    groups: int
    entries: int
    inner: Tensor
    squares: Tensor
    totals: Tensor
    traces: Tensor
    kernels: Tensor

    def value(self, center: bool = False) -> Measured:
        """``ρ(WᵀW, WᵀKW)``; with several random parts its standard error too."""
        return jackknife("parts", self.inner.numel(), lambda kept: self._value(kept, center))

    def _value(self, kept: Tensor, center: bool) -> float:
        inner, total = self.inner[kept].sum(), self.totals[kept].sum()
        square = square_of_parts(self.squares, kept)
        return _correlation(inner, self.size, square, self.total, total, self.entries * center)

    def null(self, center: bool = False) -> float:
        """The same when K keeps its eigenvalues and its eigenvectors are uniformly random ([NFA] Figure 1, corrupted).

        The expectations of both sides are exact: for a random symmetric Q of m×m with those eigenvalues,
        ``E[Q_ij Q_pq] = a δ_ij δ_pq + b (δ_ip δ_jq + δ_iq δ_jp)``.
        """
        m, kept = self.dimension, torch.arange(self.inner.numel())
        t1, t2 = self.traces.sum() / self.groups, square_of_parts(self.kernels, kept) / self.groups
        b = (t2 - t1.square() / m).clamp(min=0.0) / max((m - 1) * (m + 2), 1)
        a = t1.square() / m**2 - 2 * b / m
        square = (a + b) * self.size + b * self.trace_square
        square = square - center * 2 * b * (1 - 1 / m) * self.total.square() / self.entries
        return _correlation(
            t1 / m * self.size, self.size, square, self.total, t1 / m * self.total, self.entries * center
        )

    def spread(self) -> Measured:
        """The standard deviation of K's eigenvalues over their mean; with several random parts its standard error too."""

        def value(kept: Tensor) -> float:
            square = square_of_parts(self.kernels, kept) / self.traces[kept].sum().square()
            return math.sqrt(max(float(self.dimension * self.groups * square) - 1, 0.0))

        return jackknife("parts", self.inner.numel(), value)


def kernel_alignment(W: Tensor, parts: Tensor, at_inputs: bool) -> KernelAlignment:
    """The products behind the ansatz, through matrices of the smaller side of W.

    Args:
        W: ``[..., k, d]`` in float64; leading axes are diagonal blocks.
        parts: ``[parts, ..., k, k]`` that add up to K, or ``[parts, ..., d, d]`` that add up to ``WᵀKW``.
        at_inputs: which of the two.

    >>> W = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> alignment = kernel_alignment(W, torch.eye(2, dtype=torch.float64)[None], at_inputs=False)
    >>> alignment.value().value, alignment.null()   # K is a multiple of the identity
    (1.0, 1.0)
    """
    W, parts = unit_scale(W), unit_scale(parts.double())
    k, d = W.shape[-2:]
    groups, side = W.shape[:-2].numel(), min(k, d)
    if k > d and not at_inputs:
        parts, at_inputs = W.mT @ parts @ W, True
    S = W.mT @ W if at_inputs else W @ W.mT
    outer = parts if at_inputs else S @ parts @ S
    column = S.sum(-1) if at_inputs else W.sum(-1)  # of the entries of WᵀW: 1ᵀS1, or ‖W1‖²
    if at_inputs:
        half = _inverse_root(S)
        kernels = half @ parts @ half
        inner, totals = (S * parts).flatten(1).sum(1), parts.flatten(1).sum(1)
        total = column.sum()
    else:
        kernels = parts
        inner = outer.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)
        totals = (column.unsqueeze(-2) @ parts @ column.unsqueeze(-1)).flatten(1).sum(1)
        total = column.square().sum()
    flat, other, small = outer.flatten(1), parts.flatten(1), kernels.flatten(1)
    traces = kernels.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)
    trace_square = S.diagonal(dim1=-2, dim2=-1).sum(-1).square().sum()
    return KernelAlignment(
        S.square().sum(), trace_square, total, side, groups, groups * d * d,
        inner, flat @ other.mT, totals, traces, small @ small.mT,
    )  # fmt: skip


def _inverse_root(S: Tensor) -> Tensor:
    """``S^{−½}`` on the range of S."""
    values, vectors = eigh(S)
    floor = values.amax(-1, keepdim=True) * S.shape[-1] * torch.finfo(S.dtype).eps
    root = torch.where(values > floor, values.clamp(min=1e-300).rsqrt(), 0.0)
    return (vectors * root.unsqueeze(-2)) @ vectors.mT


def square_of_parts(products: Tensor, kept: Tensor) -> Tensor:
    """``⟨Σ_p X_p, Σ_q X_q⟩`` of independent parts, without the bias that their own noise adds to it.

    The diagonal terms hold that noise, so only the others count, unless they are lost in it.
    """
    part = products[kept][:, kept]
    count = len(kept)
    if count > 1:
        off = (part.sum() - part.diagonal().sum()) * count / (count - 1)
        if float(off) > 0:
            return off
    return part.sum()


def _correlation(
    inner: Tensor, square_a: Tensor, square_b: Tensor, sum_a: Tensor, sum_b: Tensor, entries: int
) -> float:
    """A cosine; with ``entries`` a Pearson correlation over that many."""
    if entries:
        inner = inner - sum_a * sum_b / entries
        square_a = square_a - sum_a.square() / entries
        square_b = square_b - sum_b.square() / entries
    return float(inner / (square_a.clamp(min=0.0).sqrt() * square_b.clamp(min=0.0).sqrt()))
