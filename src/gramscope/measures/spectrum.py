"""Spectra of weights and features, exact or estimated: counts and sizes that follow from them, and how they decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import (
    Array,
    MappedRows,
    Rows,
    as_matrices,
    as_weight,
    row_norm,
    to_double,
)
from gramscope.linalg.gram import REMARK
from gramscope.linalg.measured import Measured, combine, mean
from gramscope.linalg.moments import Moments, is_constant
from gramscope.linalg.psd import EPS, eigh, eigvalsh, svdvals
from gramscope.linalg.ridge import triangular_factor
from gramscope.linalg.stochastic import SingularQuadrature, singular_quadrature

#: power iterations of the range finder
POWER = 6
#: error of a singular value, over its size, up to which it is treated exactly, not estimated
CONVERGED = 1e-3
#: name of the probes' randomness
PROBES = "probes of the spectrum"


@dataclass(frozen=True)
class Spectrum:
    """Singular values and the ranks that follow from them, NaN (and rank 0) for a zero matrix.

    Args:
        values: singular values, descending, float64; of a large matrix the top ones, each at most the true one.
        effective_rank: ``exp(−Σ p log p)``, ``p = s/Σs`` (Roy and Vetterli 2007).
        stable_rank: ``Σs² / max s²``.
        participation_ratio: ``(Σs²)² / Σs⁴``, of the squares, that is of the covariance's eigenvalues.
        nuclear_rank: ``(Σs)² / Σs²``. Where that of a layer's gradient exceeds the stable rank of its inputs, a spectral step
            (Muon) promises a larger decrease of the loss than a gradient step (Davis and Drusvyatskiy 2025, "When do spectral
            gradient updates help in deep learning?").
        rank: how many values exceed ``max(shape)·2.2e-16`` times the largest; None for a large matrix.
        errors: of a large matrix, distances within which a singular value lies from each of ``values``.
    """

    values: Tensor
    effective_rank: float
    stable_rank: float
    participation_ratio: float
    nuclear_rank: float
    rank: int | None = None
    errors: Tensor | None = None


def weight_spectrum(W: Array) -> Spectrum:
    """The spectrum of a weight ``[k, d]``; a stack ``[groups, k, d]`` counts as the diagonal blocks of one matrix.

    Weights of 2- and 3-dimensional convolutions are taken in patch space, ``[out, in · kernel]``.

    >>> spectrum = weight_spectrum(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    >>> spectrum.rank, round(spectrum.effective_rank, 9), spectrum.stable_rank, spectrum.participation_ratio
    (2, 2.0, 2.0, 2.0)
    """
    weight = as_weight(W)
    return summarise(svdvals(weight).reshape(-1), max(weight.shape[-2:]) * EPS)


def feature_spectrum(H: Array, center: bool = True) -> Spectrum:
    """The spectrum of features ``[n, d]``, by default of the centred ones, read in blocks.

    >>> feature_spectrum(torch.tensor([[1.0, 5.0], [-1.0, 5.0]])).rank
    1
    """
    features = Rows(H, "H")
    n, d = features.n, features.width
    if center:
        features = MappedRows(features, shift=features.mean())
    factor = triangular_factor(features)[0] if n >= d else features.block(0, n)
    return summarise(svdvals(factor), max(n, d) * EPS)


def spectrum_of_few_rows(H: Tensor) -> Spectrum:
    """:func:`feature_spectrum` of fewer rows than columns, from ``HHᵀ``, several times faster.

    Values below ``√(n·2.2e-16)`` of the largest are not seen.

    >>> spectrum_of_few_rows(torch.tensor([[1.0, 5.0, 0.0], [-1.0, 5.0, 0.0]])).rank
    1
    """
    rows = to_double(H) - to_double(H).mean(0)
    return summarise(eigvalsh(rows @ rows.mT).clamp(min=0.0).sqrt(), math.sqrt(len(rows) * EPS))


def feature_spectrum_from_moments(m: Moments, center: bool = True) -> Spectrum:
    """:func:`feature_spectrum` from collected moments; values below ``√(d·2.2e-16)`` of the largest are not seen.

    >>> from gramscope.linalg.moments import moments
    >>> feature_spectrum_from_moments(moments(torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))).stable_rank
    1.0
    """
    gram = m.require_gram() if center else m.HtH
    if center and is_constant(m.n, m.mean_h, gram.diagonal(dim1=-2, dim2=-1).sum()):
        gram = torch.zeros_like(gram)  # only rounding varies
    values, rtol = eigvalsh(gram).clamp(min=0.0).sqrt().reshape(-1), math.sqrt(gram.shape[-1] * EPS)
    return summarise(torch.where(values > rtol * values.amax(), values, 0.0), rtol)


def summarise(values: Tensor, rtol: float) -> Spectrum:
    """Ranks of non-negative singular values; those up to ``rtol`` times the largest do not count for ``rank``."""
    values = values.sort(descending=True).values
    if not float(values[0]) > 0.0:
        return Spectrum(values, math.nan, math.nan, math.nan, math.nan, 0)
    p = values / values.sum()
    square = (values / values[0]).square()
    return Spectrum(
        values,
        math.exp(-float(torch.special.xlogy(p, p).sum())),
        float(square.sum()),
        float(square.sum().square() / square.square().sum()),
        float(1 / p.square().sum()),
        int((values > rtol * values[0]).sum()),
    )


def large_weight_spectrum(W: Array, top: int = 16) -> Spectrum:
    """The top singular values and the ranks of a weight ``[k, d]`` from products with thin matrices.

    The top values come from a randomised range finder with power iterations, the ranks from
    stochastic Lanczos quadrature with 16 probes. Beside W it needs about ``3000 (k + d)`` numbers of W's precision. Random
    numbers have a fixed seed, and the caller's random state stays as it was.

    Args:
        W: the weight; of half precision it is copied to float32.
        top: how many values.

    >>> spectrum = large_weight_spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)), top=2)
    >>> [round(float(value), 6) for value in spectrum.values], round(spectrum.stable_rank, 6)
    ([4.0, 2.0], 1.375)
    """
    weight = as_weight(W)
    if weight.dim() != 2:
        raise InputError(f"W must be a matrix [k, d], got shape {tuple(weight.shape)}; pass one group at a time")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= min(weight.shape):
        raise InputError(f"top={top!r}: give a whole number from 1 to min(k, d) = {min(weight.shape)}")
    weight = weight if weight.dtype == torch.float64 else weight.float()
    U, values, V, errors = _top(weight, top)
    sure = errors <= CONVERGED * values
    quadrature = singular_quadrature(weight, (U[:, sure], values[sure].to(U.dtype), V[:, sure]))
    largest = max(float(values[0]), float(quadrature.nodes.max()) if quadrature.nodes.numel() else 0.0)
    total, square = (_sum(quadrature, power) for power in (1, 2))
    entropy = mean(quadrature.sums(lambda s: torch.special.xlogy(s, s)), PROBES)
    stable = Measured((float(row_norm(weight)) / largest) ** 2 if largest else math.nan)
    return Spectrum(
        values,
        combine(lambda sums, logs: sums * torch.exp(-logs / sums), total, entropy).with_remark(REMARK),
        stable.with_remark(REMARK, "‖W‖₂ is that of a Krylov space"),
        (square**2 / _sum(quadrature, 4)).with_remark(REMARK),
        (total**2 / square).with_remark(REMARK),
        errors=errors,
    )


def _sum(quadrature: SingularQuadrature, power: int) -> Measured:
    """``Σ s^power`` over all singular values."""
    return mean(quadrature.sums(lambda s: s**power), PROBES)


def _top(W: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``U, s, V`` of the top singular values, and the lengths of what their vectors leave over.

    Every device starts from the same random matrix (Halko, Martinsson and Tropp 2009, algorithms 4.4 and 5.1).
    """
    tall = W if W.shape[0] >= W.shape[1] else W.mT
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(tall.shape[1], min(2 * top + 8, *W.shape), generator=generator, device="cpu", dtype=W.dtype)
    Q = torch.linalg.qr(tall @ start.to(W.device))[0]
    for _ in range(POWER):
        Q = torch.linalg.qr(tall @ torch.linalg.qr(tall.mT @ Q)[0])[0]
    U, s, Vt = torch.linalg.svd(Q.mT @ tall, full_matrices=False)
    U, s, V = (Q @ U)[:, :top], s[:top], Vt.mT[:, :top]
    U, V = (U, V) if tall is W else (V, U)
    left = torch.linalg.vector_norm(W @ V - U * s, dim=0)
    right = torch.linalg.vector_norm(W.mT @ U - V * s, dim=0)
    return U, s.double(), V, ((left.square() + right.square()) / 2).sqrt().double()


def rankme(HtH: Array, n: int) -> float:
    """RankMe ``exp(−Σ p log p)``, ``p = s/Σs + 1e-7`` over the min(n, d) singular values s of features H, uncentred.

    (Garrido, Balestriero, Najman and LeCun 2023.) Singular values below ``√(d·2.2e-16)`` of the largest, which a Gram cannot
    show, count as zero.

    Args:
        HtH: ``HᵀH [d, d]``.
        n: number of rows of H.

    Returns:
        Between 1 and min(n, d); NaN for features that are all zero.

    >>> round(rankme(torch.eye(3), 10), 4)
    3.0
    """
    s = _eigenvalues(HtH)[: max(n, 1)].sqrt()
    if not float(s[0]) > 0:
        return math.nan
    p = s / s.sum() + 1e-7
    return math.exp(float(-(p * p.log()).sum()))


def alpha_req(covariance: Array, eps: float = EPS) -> float:
    """α-ReQ: the exponent α of a power law ``λ_i ∝ i^(−α)`` of the eigenvalues of the centred features' covariance.

    (Agrawal, Mondal, Ghosh and Richards 2022.) The fit is ordinary least squares of log λ_i on log i over all eigenvalues above
    ``max(d·2.2e-16, eps²)`` of the largest; a window would be a free choice. α near 1 went with good features there; 0
    means that all directions are equal.

    Args:
        covariance: ``[d, d]``, up to a factor.
        eps: relative rounding of the features (1.2e-7 for float32), whose directions are not fitted.

    >>> round(alpha_req(torch.diag(1 / torch.arange(1.0, 9.0) ** 2)), 5)
    2.0
    """
    values = _eigenvalues(covariance)
    values = values[values > eps**2 * values[0]]
    if values.numel() < 3:
        raise InputError(f"α-ReQ fits a line through at least 3 eigenvalues; these features have {values.numel()}")
    x = torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device).log()
    x = x - x.mean()
    return -float((x @ values.log()) / (x @ x))


def _eigenvalues(A: Array) -> Tensor:
    """Descending eigenvalues; those that are rounding are zero."""
    values = eigh(to_double(as_matrices(A, "the Gram")))[0].reshape(-1).flip(-1)
    return torch.where(values > values.numel() * EPS * values[0], values, 0.0)


#: eigenvalues that a fit of a tail needs
FEWEST = 10


def weight_exponent(W: Array) -> float:
    """The exponent α of a density ``λ^(−α)`` in the tail of the eigenvalues λ of ``WᵀW`` (Martin and Mahoney 2021).

    The fit is that of Clauset, Shalizi and Newman (2009): for each eigenvalue as the start of the tail the maximum-likelihood
    ``α = 1 + m / Σ log(λ/λ_start)`` over the m eigenvalues from there on; of all starts the one whose law has the smallest
    Kolmogorov–Smirnov distance. Singular values up to the rounding of W's type are left out, and a tail has at least 10
    eigenvalues.

    Args:
        W: weight ``[..., k, d]``; a stack counts as diagonal blocks.

    Returns:
        α > 1; trained layers of large nets had 2 to 6, larger values mean a tail that is not heavy.

    >>> W = torch.diag(torch.linspace(0.01, 0.99, 99, dtype=torch.float64) ** -0.25)  # λ^(−3): P(λ > x) = x^(−2)
    >>> round(weight_exponent(W))
    3
    """
    weight = as_weight(W)
    s = weight_spectrum(weight).values
    rtol = max(max(weight.shape[-2:]) * EPS, torch.finfo(weight.dtype).eps)
    values = s[s > rtol * s[0]].square().flip(0)
    if values.numel() < FEWEST:
        raise InputError(f"a power law is fitted to at least {FEWEST} eigenvalues; this weight has {values.numel()}")
    best = (float("inf"), float("nan"))
    logs = values.log()
    for start in range(values.numel() - FEWEST + 1):
        tail = logs[start:] - logs[start]
        total = float(tail.sum())
        if total <= 0:
            continue  # all equal: no law
        m = tail.numel()
        alpha = 1 + m / total
        law = 1 - torch.exp(-(alpha - 1) * tail)
        below = torch.arange(m, dtype=tail.dtype, device=tail.device) / m
        distance = float(torch.maximum((law - below).abs(), (law - below - 1 / m).abs()).amax())
        best = min(best, (distance, alpha))
    return best[1]
