"""Generated data: Gaussians of any spectrum, polynomial targets, alignment-reversing data, Swiss roll, modular sums.

Pure functions. Whatever is random takes an explicit ``torch.Generator`` and lives on its device; targets are
differentiable functions of ``x``, so that their expected gradient outer product can be had by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gramscope.errors import InputError


def decaying_spectrum(d: int, alpha: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """``λ_k = 1/(1 + k^α)`` for k = 1 … d ([NFA] Appendix C and G): ``[d]``."""
    if not math.isfinite(alpha) or alpha < 0:
        raise InputError(f"alpha={alpha}: the decay rate must be finite and not negative")
    k = torch.arange(1, d + 1, dtype=torch.float64)
    spectrum = 1 / (1 + torch.pow(k, alpha))
    return spectrum.to(dtype or torch.get_default_dtype())


def gaussian(n: int, spectrum: Tensor, generator: torch.Generator, *, basis: Tensor | None = None) -> Tensor:
    """``n`` rows of N(0, Q diag(spectrum) Qᵀ): ``[n, d]``, of the dtype of ``spectrum``.

    Draw ``basis`` Q once (:func:`~gramscope.linalg.psd.random_orthogonal`) and pass it for training and test sets alike;
    without it the axes are the eigenvectors.
    """
    if spectrum.dim() != 1 or not bool((spectrum >= 0).all()) or not bool(torch.isfinite(spectrum).all()):
        raise InputError("spectrum must be a vector of finite eigenvalues, none of them negative")
    z = _normal((n, spectrum.numel()), generator, spectrum.dtype) * spectrum.to(generator.device).sqrt()
    return z if basis is None else z @ basis.to(z).mT


def unit_std(y: Tensor) -> Tensor:
    """The target scaled to standard deviation 1 over samples, not centred, as [NFA] scales its polynomial tasks."""
    scale = y.std() if y.numel() > 1 else y.new_zeros(())
    if not 0 < float(scale) < math.inf:
        raise InputError(f"the target has standard deviation {float(scale)} over {y.numel()} samples: cannot make it 1")
    return y / scale


def chain_monomial(x: Tensor, rank: int) -> Tensor:
    """``y = Σ_{k=1}^r x_{k mod r} x_{(k+1) mod r}`` of the first ``rank`` inputs ([NFA] eq. 1): ``[n]``, unscaled."""
    _at_least("rank", rank, 1)
    _enough_columns(x, rank)
    used = x[:, :rank]
    return (used * used.roll(-1, dims=1)).sum(1)


def merged_staircase(x: Tensor, degree: int = 4) -> Tensor:
    """``y = x₁ + x₁x₂ + x₁x₂x₃ + …`` up to ``degree`` factors: ``[n]``, unscaled."""
    _at_least("degree", degree, 1)
    _enough_columns(x, degree)
    return x[:, :degree].cumprod(1).sum(1)


def high_rank_polynomial(x: Tensor, q: Tensor) -> Tensor:
    """``y = Σ_i (Qx)_i²`` with ``q [m, d]``, standard normal in [NFA] Appendix H: ``[n]``, unscaled."""
    if q.shape[-1] != x.shape[1]:
        raise InputError(f"q has {q.shape[-1]} columns, x has {x.shape[1]}")
    return (x @ q.to(x).mT).square().sum(1)


InverseRule: TypeAlias = Literal["pseudo", "literal"]


@dataclass(frozen=True)
class ReversingDraw:
    """The random parts of alignment-reversing data, from which each inversion rule and scale builds its own set."""

    x1: Tensor  # [n₁, d], unscaled
    vectors: Tensor  # U₁ [d, d]
    values: Tensor  # S₁ [d], falling
    v2: Tensor  # [n₂, min(n₂, d)]
    noise: Tensor  # Z [n, d]

    def build(self, inverse: InverseRule, scale: float, eps2: float = 1e-2) -> tuple[Tensor, Tensor]:
        """``x [n, d]`` and ``y [n]`` in float64; see :func:`alignment_reversing`."""
        if inverse not in ("pseudo", "literal"):
            raise InputError(f"inverse={inverse!r}: give 'pseudo' or 'literal'")
        r, n = self.v2.shape[1], self.noise.shape[0]
        values = self.values[:r]
        inverted = 1 / (scale**2 * values)
        if inverse == "pseudo":
            cutoff = self.values[0] * self.values.numel() * torch.finfo(values.dtype).eps
            inverted = inverted.where(values > cutoff, torch.zeros_like(values))
        x = torch.cat([scale * self.x1, (self.v2 * inverted) @ self.vectors[:, :r].mT]) + scale * eps2 * self.noise
        if not bool(torch.isfinite(x).all()):
            raise InputError(f"inverse={inverse!r} met an exactly zero singular value of X₁ᵀX₁; use inverse='pseudo'")
        y = (torch.arange(n, device=x.device) < self.x1.shape[0]).to(x.dtype)
        return x, y + 1e-5


def draw_alignment_reversing(n: int, d: int, balance: float, generator: torch.Generator) -> ReversingDraw:
    """The expensive part of :func:`alignment_reversing`: two samples and their decompositions, in float64."""
    if not 0 < balance <= 1:
        raise InputError(f"balance={balance} must lie in (0, 1]: it is the fraction of samples with label 1")
    first = round(n * balance)
    if first == 0:
        raise InputError(f"balance={balance} leaves no sample with label 1 among n={n}; use at least {1 / n:g}")
    x1 = _spiked(first, d, generator)
    vectors, values, _ = torch.linalg.svd(x1.mT @ x1)
    v2 = torch.linalg.svd(_spiked(n - first, d, generator), full_matrices=False)[0]
    return ReversingDraw(x1, vectors, values, v2, _normal((n, d), generator, torch.float64))


def alignment_reversing(
    n: int,
    d: int,
    balance: float,
    generator: torch.Generator,
    *,
    inverse: InverseRule = "pseudo",
    scale: float = 1.0,
    eps2: float = 1e-2,
) -> tuple[Tensor, Tensor]:
    """[NFA] Appendix F: data built so that XᵀX works against XᵀYX; returns ``x [n, d]`` and ``y [n]`` in float64.

    The first ``n₁ = round(n·balance)`` rows are ``X₁ ~ scale · N(0, 11ᵀ + I/2)`` with label 1. With
    ``X₁ᵀX₁ = U₁ S₁ U₁ᵀ`` (S₁ falling) and V₂ the left singular vectors of a second such sample of n₂ = n − n₁ rows, the
    rest is ``X₂ = V₂ S₁⁻¹ U₁ᵀ`` over the leading ``r = min(n₂, d)`` directions, with label 0. Then
    ``x ← x + scale · ε₂ Z`` and ``y ← y + 10⁻⁵``.

    Args:
        balance: γ in (0, 1].
        inverse: what S₁⁻¹ means when X₁ᵀX₁ is singular (n₁ < d). ``"pseudo"`` gives weight 0 to directions below
            d·eps·S₁[0]. ``"literal"`` divides by the float64 singular values as computed, rounding noise and all, so
            those rows are enormous and differ between machines. The rules agree where n₂ ≤ n₁ (noise is not reached).
        scale: the unit of X₁, 1 in the paper's text. X₂ scales with 1/scale², so this decides which part rules XᵀX. At 1
            it is X₁ and nothing is reversed; about 1/(8√d) shows the reversal at n = d = 1024.
    """
    return draw_alignment_reversing(n, d, balance, generator).build(inverse, scale, eps2)


def swiss_roll(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points ``(t cos t, t sin t)`` and their place t ∈ [1.5π, 4.5π] on the roll: ``[n, 2]``, ``[n]`` in float64."""
    t = 1.5 * math.pi * (1 + 2 * torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64))
    return torch.stack([t * t.cos(), t * t.sin()], 1), t


#: name -> (x, y, p) ↦ value before reduction mod p; division multiplies by the inverse mod a prime p
MODULAR_OPERATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "x+y": lambda x, y, p: x + y,
    "x-y": lambda x, y, p: x - y,
    "x*y": lambda x, y, p: x * y,
    "x/y": lambda x, y, p: x * _modular_inverse(y, p),
    "x/y if y odd else x-y": lambda x, y, p: torch.where(y % 2 == 1, x * _modular_inverse(y, p), x - y),
    "x^2+y^2": lambda x, y, p: x**2 + y**2,
    "x^2+xy+y^2": lambda x, y, p: x**2 + x * y + y**2,
    "x^2+xy+y^2+x": lambda x, y, p: x**2 + x * y + y**2 + x,
    "x^3+xy": lambda x, y, p: x**3 + x * y,
    "x^3+xy^2+y": lambda x, y, p: x**3 + x * y**2 + y,
}


def modular_arithmetic(p: int, operation: str = "x+y") -> tuple[Tensor, Tensor]:
    """Every pair (x, y) with 0 ≤ x, y < p and ``operation`` mod p: int64 ``[N, 2]`` and ``[N]``.

    N is p², or p(p−1) for ``"x/y"``, which leaves out y = 0. Operations with a division need a prime p.
    """
    _at_least("p", p, 2)
    if p > 2000:
        raise InputError(f"p={p}: all p² pairs are listed; use p ≤ 2000")
    if operation not in MODULAR_OPERATIONS:
        raise InputError(f"operation={operation!r}; there are: {', '.join(MODULAR_OPERATIONS)}")
    if "/" in operation and any(p % q == 0 for q in range(2, math.isqrt(p) + 1)):
        raise InputError(f"p={p} is not prime, so not every y has an inverse; use a prime for {operation!r}")
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    if operation == "x/y":
        pairs = pairs[pairs[:, 1] != 0]
    return pairs, MODULAR_OPERATIONS[operation](pairs[:, 0], pairs[:, 1], p) % p


def randomise_labels(labels: Tensor, fraction: float, classes: int, generator: torch.Generator) -> Tensor:
    """Replace the labels of ``round(fraction · n)`` samples, chosen at random, by uniform draws from all ``classes``.

    A draw may hit the true label, so about ``fraction · (1 − 1/classes)`` of the labels end up wrong.
    """
    if not 0 <= fraction <= 1:
        raise InputError(f"fraction={fraction} must lie in [0, 1]")
    n = labels.shape[0]
    chosen = torch.randperm(n, generator=generator, device=generator.device)[: round(fraction * n)]
    drawn = torch.randint(classes, (chosen.numel(),), generator=generator, device=generator.device)
    noisy = labels.clone()
    noisy[chosen.to(labels.device)] = drawn.to(labels)
    return noisy


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _spiked(n: int, d: int, generator: torch.Generator) -> Tensor:
    """``n`` rows of N(0, 11ᵀ + I/2): one shared draw a row and ``√½`` of its own a column."""
    shared = _normal((n, 1), generator, torch.float64)
    return shared + math.sqrt(0.5) * _normal((n, d), generator, torch.float64)


def _modular_inverse(y: Tensor, p: int) -> Tensor:
    """The inverse mod a prime p of each y ≠ 0; 0 for y = 0."""
    table = torch.tensor([0, *(pow(k, -1, p) for k in range(1, p))])
    return table[y % p]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name}={value} must be at least {least}")


def _enough_columns(x: Tensor, needed: int) -> None:
    if x.dim() != 2 or x.shape[1] < needed:
        raise InputError(f"the target reads {needed} coordinates, x has shape {tuple(x.shape)}")
