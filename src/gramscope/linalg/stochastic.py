"""Random probes of large matrices: traces, norms and spectra from products with a few vectors, with standard errors.

A probe is a vector of random signs ω; for any matrix ``E[ωᵀAω] = tr A``, so inner products of symmetric matrices follow from
their products with probes, ``⟨A, B⟩ = E[(Aω)·(Bω)]`` (Girard 1989, Hutchinson 1990). Functions of singular values follow from a
few steps of bidiagonalisation started at a probe (stochastic Lanczos quadrature: Ubaru, Chen and Saad 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.budget import GROUPS
from gramscope.linalg.psd import for_products


def probes(d: int, count: int, like: Tensor) -> Tensor:
    """Random signs ``[d, count]`` of a fixed seed, with the dtype and device of ``like``.

    Probes of a smaller count are not the first ones of a larger count.
    """
    generator = torch.Generator(device="cpu").manual_seed(d * 4096 + count)
    signs = torch.randint(2, (d, count), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
    return signs.to(like.device, like.dtype)


def gram_times(rows: Tensor, thin: Tensor) -> Tensor:
    """``(rowsᵀrows) X [..., k, r]`` in float64, for ``rows [..., m, k]`` and ``X [..., k, r]``."""
    rows = for_products(rows)
    return to_double(rows.mT @ (rows @ thin.to(rows.dtype)))


def onto_columns(W: Tensor, X: Tensor, steps: int = 60, rtol: float = 1e-4) -> Tensor:
    """The columns of ``X [..., k, r]`` projected onto the column space of ``W [..., k, d]``, by conjugate gradients.

    Directions that belong to small singular values of W may be missing: iteration stops when ``‖Wᵀ(X − result)‖`` of every
    column has fallen to ``rtol`` of its first value.

    >>> onto_columns(torch.tensor([[2.0], [0.0]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)).flatten()
    tensor([1., 0.], dtype=torch.float64)
    """
    tiny = torch.finfo(W.dtype).tiny
    found, left = torch.zeros_like(X), X.clone()
    gradient = W.mT @ left
    direction, square = gradient, gradient.square().sum(-2, keepdim=True)
    least = rtol**2 * square
    for _ in range(min(steps, W.shape[-1])):
        if bool((square <= least).all()):
            break
        moved = W @ direction
        size = square / moved.square().sum(-2, keepdim=True).clamp_min(tiny)
        found, left = found + size * moved, left - size * moved
        gradient = W.mT @ left
        before, square = square, gradient.square().sum(-2, keepdim=True)
        direction = gradient + square / before.clamp_min(tiny) * direction
    return found


@dataclass(frozen=True)
class SingularQuadrature:
    """Some singular values ``known [r]``, and nodes ``[p, m]`` and weights ``[p, m]`` of p probes for the others.

    The sum of ``f(s)`` over all singular values is about ``Σ f(known) + Σ_j weight_j f(node_j)``.
    """

    known: Tensor
    nodes: Tensor
    weights: Tensor

    def sums(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """An estimate of ``Σ f(s)`` from each probe, ``[p]``."""
        return function(self.known).sum() + (self.weights * function(self.nodes)).sum(-1)


def singular_quadrature(
    W: Tensor, known: tuple[Tensor, Tensor, Tensor] | None = None, count: int = GROUPS, steps: int = 64
) -> SingularQuadrature:
    """Quadrature of the singular values of ``W [k, d]`` from ``count`` bidiagonalisations of length ``steps``.

    Needs products of W and Wᵀ with ``count`` vectors, and keeps ``steps`` vectors of each side, to which new ones are made
    orthogonal. The largest node is a lower bound of the largest singular value, near it where the steps are many.

    Args:
        W: the matrix.
        known: singular vectors and values ``U [k, r], s [r], V [d, r]`` that are treated exactly, not estimated: the
            largest ones would cause most of the error.
        count: probes.
        steps: length of each bidiagonalisation.

    >>> found = singular_quadrature(torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)))
    >>> round(float(found.sums(torch.square).mean()), 6), round(float(found.nodes.max()), 6)
    (14.0, 3.0)
    """
    U, values, V = known or (W.new_zeros(W.shape[0], 0), W.new_zeros(0), W.new_zeros(W.shape[1], 0))
    if W.shape[0] < W.shape[1]:
        W, U, V = W.mT, V, U
    k, d = W.shape
    steps, tiny = min(steps, d - values.numel()), torch.finfo(W.dtype).tiny
    right, left = W.new_empty(count, steps, d), W.new_empty(count, steps, k)
    alphas, betas = W.new_zeros(count, steps), W.new_zeros(count, steps)
    v = _orthogonal(probes(d, count, W).mT, right[:, :0], V)
    sizes = v.norm(dim=-1, keepdim=True)
    v = v / sizes.clamp_min(tiny)
    for j in range(steps):
        right[:, j] = v
        u = v @ W.mT
        u = _orthogonal(u - betas[:, j - 1, None] * left[:, j - 1] if j else u, left[:, :j], U)
        alphas[:, j] = u.norm(dim=-1)
        left[:, j] = u = u / alphas[:, j, None].clamp_min(tiny)
        v = _orthogonal(u @ W - alphas[:, j, None] * v, right[:, : j + 1], V)
        betas[:, j] = v.norm(dim=-1)
        v = v / betas[:, j, None].clamp_min(tiny)
    B = torch.diag_embed(to_double(alphas)) + torch.diag_embed(to_double(betas[:, :-1]), 1)
    _, s, Vt = torch.linalg.svd(B)
    return SingularQuadrature(to_double(values), s, to_double(sizes).square() * Vt[..., 0].square())


def _orthogonal(x: Tensor, basis: Tensor, known: Tensor) -> Tensor:
    """``x [p, d]`` without its parts along the vectors ``[p, m, d]`` of its probe and the columns of ``known [d, r]``."""
    for _ in range(2):  # twice, for rounding
        x = x - (basis.mT @ (basis @ x.unsqueeze(-1))).squeeze(-1)
        x = x - (x @ known) @ known.mT
    return x
