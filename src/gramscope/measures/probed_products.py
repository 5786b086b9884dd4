"""Inner products of large matrices from their products with random probes, by group of probes.

``⟨A, B⟩ ≈ ⟨AΩ, BΩ⟩ / r`` for a thin matrix Ω of r random signs; leaving out one group of its columns at a time gives the
standard error of any function of such inner products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import binary_exponent, to_double
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.row_blocks import row_product
from gramscope.linalg.stochastic import GROUPS, by_group, probe_count, probes

REMARK = "an estimate from {} random probes, because the matrix itself would not fit memory="


@dataclass(frozen=True)
class ProbedPair:
    """Two matrices A and B by their products with probes.

    Args:
        products: inner products of both, ``[2, 2, groups]``.
        exponents: A is ``2^exponents[0]`` times the matrix behind ``products``; B likewise.
        probes: how many there are.

    >>> pair = probed_pair(torch.eye(16), -2 * torch.eye(16))
    >>> pair.cosine().value, pair.norm_ratio().value
    (-1.0, 0.5)
    """

    products: Tensor
    exponents: tuple[int, int]
    probes: int

    def cosine(self) -> Measured:
        """``ρ(A, B)``; NaN where one of them is zero."""
        return self._estimate(lambda p: p[0, 1] / (p[0, 0].sqrt() * p[1, 1].sqrt()))

    def norm_ratio(self) -> Measured:
        """``‖A‖ / ‖B‖``."""
        first, second = self.exponents
        return self._estimate(lambda p: torch.ldexp((p[0, 0] / p[1, 1]).sqrt(), torch.tensor(first - second)))

    def _estimate(self, function: Callable[[Tensor], Tensor]) -> Measured:
        found = jackknife("parts", GROUPS, lambda kept: float(function(self.products[..., kept].mean(-1))))
        return found.with_remark(REMARK.format(self.probes))


def probed_pair(first: Tensor, second: Tensor) -> ProbedPair:
    """From ``AΩ`` and ``BΩ [..., d, r]`` with the same probes; leading axes are diagonal blocks."""
    exponents = int(binary_exponent(first)), int(binary_exponent(second))
    thin = [double(x, -e) for x, e in zip((first, second), exponents, strict=True)]
    return ProbedPair(products_of(thin), exponents, first.shape[-1])


def products_of(thin: Sequence[Tensor]) -> Tensor:
    """Inner products of every two, by group of columns, ``[m, m, groups]``."""
    return torch.stack([torch.stack([sums_by_group(one * other) for other in thin]) for one in thin])


def sums_by_group(columns: Tensor) -> Tensor:
    """Sums over all axes but the groups of the last one."""
    return by_group(columns.sum(-2)).reshape(-1, GROUPS).sum(0)


def double(x: Tensor, exponent: int) -> Tensor:
    """``x · 2^exponent`` in float64."""
    return torch.ldexp(to_double(x), torch.tensor(exponent))


def weight_gram_times(W: Tensor, omega: Tensor) -> tuple[Tensor, Tensor, int]:
    """``WᵀWΩ`` in float64 and ``WΩ``, of W times ``2^−e``, and e."""
    e = int(binary_exponent(W))
    thin = torch.ldexp(W @ omega, torch.tensor(-e))
    return double(W.mT @ thin, -e), thin, e


def probed_fact(W: Tensor, D: Tensor, memory: int, weight_decay: float | None = None) -> Measured:
    """:func:`~gramscope.measures.fact.fact_alignment`, or with a decay :func:`~gramscope.measures.fact.fact_residual`.

    Args:
        W: weight ``[..., k, d]``.
        D: gradient of the mean loss ``[..., k, d]``.
        memory: bytes that decide how many probes to take.
        weight_decay: λ.
    """
    W, omega = _with_probes(W, memory)
    gram, _, e = weight_gram_times(W, omega)
    mixed = W.mT @ (D.to(W.dtype) @ omega)
    if weight_decay is None:
        return probed_pair(gram, -mixed).cosine()
    return probed_pair(gram + double(mixed, -2 * e) / weight_decay, gram).norm_ratio()


def probed_fle_residual(W: Tensor, autograd: Tensor, D: Tensor, memory: int) -> Measured:
    """``‖Wᵀ(autograd − D)‖ / ‖WᵀD‖``: :func:`~gramscope.measures.gram.fle_residual` of two gradients ``[..., k, d]``."""
    W, omega = _with_probes(W, memory)
    of_both = [row_product(x, omega.double()) for x in (autograd, D)]
    difference = of_both[0] - of_both[1]
    if not bool(difference.any()):
        return Measured(0.0, 0.0, REMARK.format(omega.shape[-1]))
    return probed_pair(*(W.mT @ x.to(W.dtype) for x in (difference, of_both[1]))).norm_ratio()


def _with_probes(W: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    """W in at least float32, and probes of its inputs."""
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    return W, probes(W.shape[-1], probe_count(W.shape[-1], memory), W)
