"""Matrices ``[d, d]`` known in three ways, with one algebra: inner products, traces and sums of entries with their errors.

A weight Gram ``WᵀW``, an average gradient outer product ``WᵀKW`` or a virtual covariance shift is

    Dense      the matrix itself, where it is small
    Factored   a sum of products AᵀKB of matrices with few rows, where the layer has fewer outputs than inputs
    Estimated  its product with random signs Ω, where neither fits memory: ⟨A, B⟩ ≈ ⟨AΩ, BΩ⟩ / r

Leading axes are blocks of one block-diagonal matrix (groups of a convolution). The first axis of all has random parts that add
up to the matrix: one for what is exact, several for a tangent kernel from random combinations of outputs. Parts of the same
number come from the same combination. Numbers come back as :class:`~gramscope.linalg.measured.Measured`, which carries the
variances of probes and parts through any formula.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial, reduce
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.linalg.arrays import LIMIT, check_size, row_gram, row_product, spans, to_double
from gramscope.linalg.budget import GROUPS
from gramscope.linalg.measured import Measured, combine, jackknife

REMARK = "an estimate from random probes, because the matrix itself would not fit memory="


class Gram(ABC):
    """A matrix ``[..., d, d]`` as the sum of one or several parts."""

    #: shape without the axis of parts, ``[..., d, d]``
    shape: torch.Size

    @property
    def entries(self) -> int:
        """How many entries the diagonal blocks have."""
        return self.shape.numel()

    def inner(self, other: Gram) -> Measured:
        """``⟨A, B⟩ = tr AᵀB``."""
        if self.shape != other.shape:
            raise InputError(f"matrices of shapes {tuple(self.shape)} and {tuple(other.shape)} have no inner product")
        probed = self if isinstance(self, Estimated) else other
        if not isinstance(probed, Estimated):
            return _measured(self._products(other))
        mine, theirs = (x if isinstance(x, Estimated) else probed.like(x) for x in (self, other))
        return _measured(mine._products(theirs)).with_remark(REMARK)

    def norm(self) -> Measured:
        """The Frobenius norm."""
        return self.inner(self).at_least(0.0) ** 0.5

    def trace(self) -> Measured:
        """The trace, over all blocks."""
        return _measured(self._traces())

    @abstractmethod
    def total(self) -> Measured:
        """The sum of all entries, ``1ᵀA1``."""

    @abstractmethod
    def _traces(self) -> Tensor:
        """The trace of each part, ``[parts, 1]``; of estimates ``[parts, 1, groups]``."""

    @abstractmethod
    def _products(self, other: Gram) -> Tensor:
        """Inner products of the parts of two, ``[parts, parts]``; of estimates ``[parts, parts, groups]``."""

    @abstractmethod
    def __add__(self, other: Gram) -> Gram:
        """The sum with one of the same representation."""

    @abstractmethod
    def __mul__(self, factor: float) -> Gram: ...

    def __sub__(self, other: Gram) -> Gram:
        return self + other * -1.0


class Dense(Gram):
    """The matrix itself.

    Args:
        parts: ``[parts, ..., d, d]``.

    >>> float(Dense(torch.tensor([[[1.0, 2.0], [2.0, 0.0]]])).inner(Dense(torch.ones(1, 2, 2))))
    5.0
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = check_size(to_double(parts), "a Gram matrix", LIMIT**2)
        self.shape = self.parts.shape[1:]

    @override
    def total(self) -> Measured:
        return _measured(self.parts.flatten(1).sum(1)[:, None])

    def times(self, X: Tensor) -> Tensor:
        """``A X`` of each part, ``[parts, ..., d, m]`` for ``X [d, m]``, in float64."""
        return self.parts @ to_double(X)

    @property
    def mT(self) -> Dense:
        """The transpose."""
        return Dense(self.parts.mT)

    def dense(self) -> Tensor:
        """The sum of the parts, ``[..., d, d]``."""
        return self.parts.sum(0)

    @override
    def _traces(self) -> Tensor:
        return self.parts.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)[:, None]

    @override
    def _products(self, other: Gram) -> Tensor:
        if isinstance(other, Dense):
            return self.parts.flatten(1) @ other.parts.flatten(1).mT
        return other._products(self).mT

    @override
    def __add__(self, other: Gram) -> Dense:
        assert isinstance(other, Dense)
        return Dense(_sum([self.parts, other.parts]))

    @override
    def __mul__(self, factor: float) -> Dense:
        return Dense(self.parts * factor)


class Factor:
    """One of the matrices ``[..., rows, d]`` that a factored one is made of; keeps its products with others.

    Args:
        rows: in any floating dtype; read in float64.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = check_size(rows, "a factor of a Gram matrix")
        self._products: dict[Factor, Tensor] = {}

    def product(self, other: Factor) -> Tensor:
        """``A Bᵀ [..., rows, rows]`` in float64, formed once."""
        if other not in self._products:
            if self in other._products:
                return other._products[self].mT
            self._products[other] = row_gram(self.rows.mT, other.rows.mT)
        return self._products[other]

    def times(self, X: Tensor) -> Tensor:
        """``A X`` in float64."""
        return row_product(self.rows, to_double(X))

    def transposed_times(self, X: Tensor) -> Tensor:
        """``Aᵀ X`` in float64, read in blocks of rows."""
        return row_gram(self.rows, X)

    def dot(self, other: Factor) -> Tensor:
        """``tr A Bᵀ``, read in blocks of rows."""
        one, two = (x.rows.reshape(-1, x.rows.shape[-1]) for x in (self, other))
        return torch.stack([(to_double(one[i:j]) * to_double(two[i:j])).sum() for i, j in spans(*one.shape)]).sum()


#: ``factor · AᵀKB``, K ``[parts, ..., rows, rows]`` or None for the identity
Term: TypeAlias = tuple[float, Factor, Tensor | None, Factor]


class Factored(Gram):
    """A sum of products ``AᵀKB``; inner products take matrices with as many rows as A and B.

    Args:
        terms: ``(factor, A, K, B)``.

    >>> gram = Factored.of(Factor(torch.tensor([[1.0, 2.0]])))
    >>> gram.diagonal(), float(gram.trace()), float(gram.norm())
    (tensor([1., 4.], dtype=torch.float64), 5.0, 5.0)
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)
        rows = self.terms[0][1].rows
        self.shape = torch.Size((*rows.shape[:-2], rows.shape[-1], rows.shape[-1]))

    @classmethod
    def of(cls, A: Factor, B: Factor | None = None, K: Tensor | None = None) -> Factored:
        """``AᵀKB``, ``AᵀKA`` without B."""
        return cls([(1.0, A, None if K is None else to_double(K), A if B is None else B)])

    @property
    def mT(self) -> Factored:
        """The transpose, for symmetric K."""
        return Factored([(factor, B, K, A) for factor, A, K, B in self.terms])

    @override
    def total(self) -> Measured:
        terms = []
        for factor, A, K, B in self.terms:
            a, b = (x.times(x.rows.new_ones(x.rows.shape[-1], 1)) for x in (A, B))
            terms.append(factor * (a * (b[None] if K is None else K @ b)).flatten(1).sum(1))
        return _measured(_sum(terms)[:, None])

    def times(self, X: Tensor) -> Tensor:
        """``A X`` of each part, ``[parts, ..., d, m]`` for ``X [d, m]``, in float64."""
        terms = []
        for factor, A, K, B in self.terms:
            thin = B.times(X)
            terms.append(factor * A.transposed_times(thin[None] if K is None else K @ thin))
        return _sum(terms)

    def dense(self) -> Tensor:
        """The matrix itself, ``[..., d, d]``."""
        return self._dense_parts().sum(0)

    def diagonal(self) -> Tensor:
        """Its diagonal, ``[..., d]``."""
        terms = []
        for factor, A, K, B in self.terms:
            right = to_double(B.rows)
            terms.append(factor * (to_double(A.rows) * (right if K is None else K.sum(0) @ right)).sum(-2))
        return torch.stack(terms).sum(0)

    def small(self) -> Gram:
        """Dense where the matrix has no more entries than its factors."""
        if max(A.rows.shape[-2] for _, A, _, _ in self.terms) < self.shape[-1]:
            return self
        return Dense(self._dense_parts())

    def _dense_parts(self) -> Tensor:
        terms = []
        for factor, A, K, B in self.terms:
            right = B.rows[None] if K is None else K @ to_double(B.rows)
            terms.append(factor * A.transposed_times(right))
        return _sum(terms)

    @override
    def _traces(self) -> Tensor:
        """``[parts, 1]``."""
        terms = [
            factor * (A.dot(B)[None] if K is None else (K * A.product(B)).flatten(1).sum(1))
            for factor, A, K, B in self.terms
        ]
        return _sum(terms)[:, None]

    @override
    def _products(self, other: Gram) -> Tensor:
        if isinstance(other, Factored):
            pairs = [
                f * g * _pair(K, A.product(C), L, B.product(E))
                for f, A, K, B in self.terms
                for g, C, L, E in other.terms
            ]
            return _sum(pairs)
        assert isinstance(other, Dense)
        terms = []
        for factor, A, K, B in self.terms:
            moved = to_double(A.rows) @ other.parts
            terms.append(factor * _pair(K, moved, None, to_double(B.rows)))
        return _sum(terms)

    @override
    def __add__(self, other: Gram) -> Factored:
        assert isinstance(other, Factored)
        return Factored([*self.terms, *other.terms])

    @override
    def __mul__(self, factor: float) -> Factored:
        return Factored([(factor * f, A, K, B) for f, A, K, B in self.terms])


class Estimated(Gram):
    """What random probes tell of a matrix.

    With the products ``A1`` and ``Aᵀ1``, what A does to constant vectors is exact, and only the rest is estimated: the mean of
    its entries may be much larger than their variation. Of ``u = 1/√d`` and ``P = I − uuᵀ``

        ⟨A, B⟩ = ⟨PAP, PBP⟩ + ⟨PAu, PBu⟩ + ⟨PAᵀu, PBᵀu⟩ + (uᵀAu)(uᵀBu)

    of which the first term is estimated. Matrices that are compared must all have these products, or none of them.

    Args:
        thin: ``AΩ [parts, ..., d, r]``.
        omega: Ω ``[d, r]`` (:func:`gramscope.linalg.stochastic.probes`).
        ones: ``A1 [parts, ..., d, 1]``.
        left: ``Aᵀ1`` where A is not symmetric.
        traces: ``[parts, 1]`` where they are known.

    >>> omega = torch.tensor([[1.0, -1.0] * 16, [1.0, 1.0] * 16])
    >>> float(Estimated(2 * omega[None], omega).trace())
    4.0
    """

    def __init__(
        self,
        thin: Tensor,
        omega: Tensor,
        ones: Tensor | None = None,
        left: Tensor | None = None,
        traces: Tensor | None = None,
    ) -> None:
        self.omega = omega
        self.shape = torch.Size((*thin.shape[1:-1], thin.shape[-2]))
        self.across = to_double(thin)
        self.along: Tensor | None = None  # PAu, PAᵀu and uᵀAu of each block, side by side
        means = self.across.new_zeros(len(thin), 1)
        if ones is not None:
            root = self.shape[-1] ** 0.5
            right, other = (to_double(x) / root for x in (ones, ones if left is None else left))
            across = self.across - right * (to_double(omega).sum(-2, keepdim=True) / root)
            self.across = across - across.mean(-2, keepdim=True)
            borders = [(x - x.mean(-2, keepdim=True)).flatten(1) for x in (right, other)]
            means = right.sum(-2).flatten(1) / root
            self.along = torch.cat([*borders, means], 1)
        if traces is None:
            traces = _by_group(to_double(omega) * self.across) + means.sum(1, keepdim=True)
        self.traces = traces.expand(-1, GROUPS)  # by group of probes

    @classmethod
    def from_gram(cls, gram: Dense | Factored, omega: Tensor, ones: bool = True) -> Estimated:
        """Of an exact matrix, with its exact trace."""
        if not ones:
            return cls(gram.times(omega), omega, traces=gram._traces())
        one, r = to_double(omega).new_ones(omega.shape[-2], 1), omega.shape[-1]
        product = gram.times(torch.cat([to_double(omega), one], -1))
        return cls(product[..., :r], omega, product[..., r:], gram.mT.times(one), gram._traces())

    def like(self, gram: Gram) -> Estimated:
        """An exact matrix as the same probes see it."""
        assert isinstance(gram, Dense | Factored)
        return Estimated.from_gram(gram, self.omega, ones=self.along is not None)

    @override
    def trace(self) -> Measured:
        return super().trace().with_remark(REMARK)

    @override
    def total(self) -> Measured:
        if self.along is None:
            raise InputError("random probes give cosines of this matrix only: leave out center=True")
        means = self.along[:, -self.shape[:-2].numel() :]
        return _measured(means.sum(1, keepdim=True) * self.shape[-1])

    @override
    def _traces(self) -> Tensor:
        return self.traces[:, None]

    @override
    def _products(self, other: Gram) -> Tensor:
        assert isinstance(other, Estimated)
        if self.omega.shape != other.omega.shape or (self.along is None) != (other.along is None):
            raise InputError("two estimates compare only if they were made with the same probes")
        pairs = torch.stack([_by_group(part * other.across) for part in self.across])
        if self.along is not None and other.along is not None:
            pairs = pairs + (self.along @ other.along.mT)[..., None]
        return pairs

    @override
    def __add__(self, other: Gram) -> Estimated:
        other = other if isinstance(other, Estimated) else self.like(other)
        along = None if self.along is None or other.along is None else self.along + other.along
        return self._replaced(_sum([self.across, other.across]), along, self.traces + other.traces)

    @override
    def __mul__(self, factor: float) -> Estimated:
        along = None if self.along is None else self.along * factor
        return self._replaced(self.across * factor, along, self.traces * factor)

    def _replaced(self, across: Tensor, along: Tensor | None, traces: Tensor) -> Estimated:
        result = Estimated(across, self.omega, traces=traces)
        result.along = along
        return result


def cosine(A: Gram, B: Gram, center: bool = False) -> Measured:
    """``ρ = ⟨A, B⟩ / (‖A‖ ‖B‖)``; with ``center`` the Pearson correlation of the entries.

    >>> round(cosine(Dense(torch.eye(2)[None]), Dense(torch.ones(1, 2, 2))), 6)
    0.707107
    """
    totals = (A.total(), B.total()) if center else (0.0, 0.0)
    return combine(partial(correlation, A.entries), A.inner(B), A.inner(A), B.inner(B), *totals)


def correlation(entries: int, inner: Tensor, square_a: Tensor, square_b: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A Pearson correlation from inner products and the sums a, b of all entries; with sums of zero a cosine.

    NaN where the variance is no more than rounding leaves of a constant.
    """
    spreads = []
    for square, total in ((square_a, a), (square_b, b)):
        spread = square - total.square() / entries
        spreads.append(torch.where(spread > 16 * torch.finfo(spread.dtype).eps * square, spread, torch.nan).sqrt())
    return (inner - a * b / entries) / (spreads[0] * spreads[1])


def shift_factor(W: Tensor, D: Tensor, Sigma: Tensor | None, gamma: float | Tensor) -> Tensor:
    """``M = −γD + ½γ²ΣW``: with it the virtual covariance shift is ``v = WᵀM + MᵀW`` ([VCL] Theorem 2).

    Args:
        W: weight ``[…, k, p]``, in any basis. With p < d its missing columns are zero.
        D: summed gradient ``Σ_i δ_i h_iᵀ [..., k, d]`` in the same basis.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``; None leaves the γ² term out.
        gamma: virtual step size γ.
    """
    M = -gamma * D
    if Sigma is not None:
        M[..., : W.shape[-1]] += (0.5 * gamma**2) * (Sigma @ W)
    return M


def _pair(K: Tensor | None, T: Tensor, L: Tensor | None, U: Tensor) -> Tensor:
    """``⟨AᵀKB, CᵀLE⟩ = ⟨K, TLUᵀ⟩`` with ``T = ACᵀ`` and ``U = BEᵀ``, by parts ``[parts, parts]``."""
    right = T if L is None else T @ L  # [parts of L, ...]
    blocks = U.dim()
    right = right if right.dim() > blocks else right[None]
    if K is None:
        return (right * U).flatten(1).sum(1)[None]
    return K.flatten(1) @ (right @ U.mT).flatten(1).mT


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms with the same number of parts."""
    if len({len(term) for term in terms}) > 1:
        raise InputError(f"matrices in {' and '.join(str(len(term)) for term in terms)} random parts do not add up")
    return reduce(torch.add, terms)


def _by_group(columns: Tensor) -> Tensor:
    """Sums of ``[parts, ..., d, r]`` within each group of columns, times groups over r: ``[parts, groups]``."""
    columns = columns.sum(-2)
    sums = columns.reshape(*columns.shape[:-1], GROUPS, -1).sum(-1) * (GROUPS / columns.shape[-1])
    return sums.flatten(1, -2).sum(1) if sums.dim() > 2 else sums


def _measured(products: Tensor) -> Measured:
    """The whole from ``[parts, parts]`` or ``[parts, parts, groups]``, with the variances of parts and of probes."""
    if products.numel() == 1:
        return Measured(products)
    products = (products if products.dim() > 2 else products.unsqueeze(-1)).cpu()
    parts, groups = max(products.shape[:2]), products.shape[-1]
    mean = products.mean(-1)
    result = jackknife("parts", parts, lambda kept: _whole(mean, kept))
    if groups == 1:
        return result
    everything = torch.arange(parts, dtype=torch.int64, device="cpu")
    probes = jackknife("probes", groups, lambda kept: _whole(products[..., kept].mean(-1), everything))
    return Measured(result, replicates={**result.replicates, **probes.replicates})


def _whole(products: Tensor, kept: Tensor) -> float:
    """``⟨Σ_p X_p, Σ_q Y_q⟩`` from some parts of all, without the bias of the parts' own noise.

    The diagonal terms of random parts hold that noise, so only the others count, unless they are lost in it.
    """
    parts, count = max(products.shape), len(kept)
    if min(products.shape) == 1:
        return float(products.flatten()[kept].mean()) * parts if parts > 1 else float(products.sum())
    chosen = products[kept][:, kept]
    if count > 1:
        others = float(chosen.sum() - chosen.diagonal().sum()) * count / (count - 1)
        if others > 0:
            return others * (parts / count) ** 2
    return float(chosen.sum()) * (parts / count) ** 2
