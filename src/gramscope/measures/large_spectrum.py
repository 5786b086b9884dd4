"""The spectrum of a weight that is too large to decompose: its top values, and ranks as estimates with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_weight, binary_exponent
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.psd import frobenius
from gramscope.linalg.stochastic import SingularQuadrature, singular_quadrature

#: a function of singular values, one by one
Function: TypeAlias = Callable[[Tensor], Tensor]
#: power iterations of the range finder
POWER = 6
#: error of a singular value, over its size, up to which it is treated exactly, not estimated
CONVERGED = 1e-3
REMARK = "an estimate from random probes, because a decomposition of the matrix would not fit memory="


@dataclass(frozen=True)
class LargeSpectrum:
    """What random probes tell of a large spectrum.

    Args:
        values: the top singular values, descending, float64; each is at most the true one, but for rounding.
        errors: a singular value lies within this distance of each of them.
        effective_rank: ``exp(−Σ p log p)``, ``p = s/Σs``.
        stable_rank: ``Σs² / max s²``.
        participation_ratio: ``(Σs²)² / Σs⁴``.
        nuclear_rank: ``(Σs)² / Σs²``.
    """

    values: Tensor
    errors: Tensor
    effective_rank: Measured
    stable_rank: Measured
    participation_ratio: Measured
    nuclear_rank: Measured


def large_weight_spectrum(W: Array, top: int = 16) -> LargeSpectrum:
    """The top singular values and the ranks of a weight ``[k, d]`` from products with thin matrices.

    The top values come from ``torch.svd_lowrank`` (a randomised range finder with power iterations), the ranks from
    stochastic Lanczos quadrature with 16 probes. Beside W it needs about ``3000 (k + d)`` numbers of W's precision. Random
    numbers have a fixed seed, and the caller's random state stays as it was.

    Args:
        W: the weight; of half precision it is copied to float32.
        top: how many values.

    >>> spectrum = large_weight_spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)), top=2)
    >>> [round(float(value), 6) for value in spectrum.values], round(spectrum.stable_rank.value, 6)
    ([4.0, 2.0], 1.375)
    """
    weight = as_weight(W)
    if weight.dim() != 2:
        raise InputError(f"W must be a matrix [k, d], got shape {tuple(weight.shape)}; pass one group at a time")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= min(weight.shape):
        raise InputError(f"top={top!r}: give a whole number from 1 to min(k, d) = {min(weight.shape)}")
    weight = weight if weight.dtype == torch.float64 else weight.float()
    exponent = binary_exponent(weight)
    if not -40 < int(exponent) < 40:  # so that squares do not overflow or underflow
        return _scaled(large_weight_spectrum(torch.ldexp(weight, -exponent), top), exponent)
    U, values, V, errors = _top(weight, top)
    sure = errors <= CONVERGED * values
    found = singular_quadrature(weight, (U[:, sure], values[sure].to(U.dtype), V[:, sure]))
    largest = max(float(values[0]), float(found.nodes.max()) if found.nodes.numel() else 0.0)
    remark = f"{REMARK}; ‖W‖₂ is that of a Krylov space"
    stable = Measured((float(frobenius(weight)) / largest) ** 2 if largest else math.nan, remark=remark)
    return LargeSpectrum(
        values,
        errors,
        effective_rank(found),
        stable,
        _quotient(found, torch.square, lambda s: s**4),
        _quotient(found, lambda s: s, torch.square),
    )


def effective_rank(found: SingularQuadrature) -> Measured:
    """``exp(−Σ p log p)``, ``p = s/Σs``, with its standard error over the probes."""
    sums, logs = found.sums(lambda s: s), found.sums(lambda s: torch.special.xlogy(s, s))

    def value(kept: Tensor) -> float:
        total = float(sums[kept].mean())
        return total * math.exp(-float(logs[kept].mean()) / total) if total > 0 else math.nan

    return jackknife("parts", sums.numel(), value).with_remark(REMARK)


def _quotient(found: SingularQuadrature, top: Function, bottom: Function) -> Measured:
    """``(Σ top(s))² / Σ bottom(s)``, with its standard error over the probes."""
    above, below = found.sums(top), found.sums(bottom)

    def value(kept: Tensor) -> float:
        divisor = float(below[kept].mean())
        return float(above[kept].mean()) ** 2 / divisor if divisor > 0 else math.nan

    return jackknife("parts", above.numel(), value).with_remark(REMARK)


def _top(W: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``U, s, V`` of the top singular values, and the lengths of what their vectors leave over."""
    with torch.random.fork_rng([W.device] if W.device.type == "cuda" else []):
        torch.manual_seed(0)
        U, s, V = (x[..., :top] for x in torch.svd_lowrank(W, min(2 * top + 8, *W.shape), POWER))
    left = torch.linalg.vector_norm(W @ V - U * s, dim=0)
    right = torch.linalg.vector_norm(W.mT @ U - V * s, dim=0)
    return U, s.double(), V, ((left.square() + right.square()) / 2).sqrt().double()


def _scaled(spectrum: LargeSpectrum, exponent: Tensor) -> LargeSpectrum:
    values, errors = (torch.ldexp(x, exponent.to(x.device)) for x in (spectrum.values, spectrum.errors))
    return replace(spectrum, values=values, errors=errors)
