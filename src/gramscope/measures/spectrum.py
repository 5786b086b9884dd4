"""Spectra of weights and features and three ways of counting the directions in use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.linalg.arrays import Array, as_weight, binary_exponent, to_double, unit_scale
from gramscope.linalg.moments import Moments, is_constant
from gramscope.linalg.psd import EPS, eigvalsh, svdvals
from gramscope.linalg.ridge_rows import triangular_factor
from gramscope.linalg.row_blocks import MappedRows, Rows, scale_of, scaled, unit_rows


@dataclass(frozen=True)
class Spectrum:
    """Singular values and the ranks that follow from them, NaN (and rank 0) for a zero matrix.

    Args:
        values: singular values, descending, float64.
        rank: how many exceed ``max(shape)·2.2e-16`` times the largest.
        effective_rank: ``exp(−Σ p log p)``, ``p = s/Σs`` (Roy and Vetterli 2007).
        stable_rank: ``Σs² / max s²``.
        participation_ratio: ``(Σs²)² / Σs⁴``, of the squares, that is of the covariance's eigenvalues.
    """

    values: Tensor
    rank: int
    effective_rank: float
    stable_rank: float
    participation_ratio: float


def weight_spectrum(W: Array) -> Spectrum:
    """The spectrum of a weight ``[k, d]``; a stack ``[groups, k, d]`` counts as the diagonal blocks of one matrix.

    Weights of 2- and 3-dimensional convolutions are taken in patch space, ``[out, in · kernel]``.

    >>> spectrum = weight_spectrum(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    >>> spectrum.rank, round(spectrum.effective_rank, 9), spectrum.stable_rank, spectrum.participation_ratio
    (2, 2.0, 2.0, 2.0)
    """
    weight = to_double(as_weight(W))
    exponent = binary_exponent(weight)
    weight = torch.ldexp(weight, -exponent)
    tall = weight if weight.shape[-2] >= weight.shape[-1] else weight.mT
    # The triangular factor has the same singular values and is small where one side is.
    R = torch.linalg.qr(tall, mode="r").R if tall.shape[-2] > 2 * tall.shape[-1] else tall
    spectrum = summarise(svdvals(R).reshape(-1), max(weight.shape[-2:]) * EPS)
    return replace(spectrum, values=torch.ldexp(spectrum.values, exponent))


def feature_spectrum(H: Array, center: bool = True) -> Spectrum:
    """The spectrum of features ``[n, d]``, by default of the centred ones, read in blocks.

    >>> feature_spectrum(torch.tensor([[1.0, 5.0], [-1.0, 5.0]])).rank
    1
    """
    features = Rows(H, "H")
    n, d = features.n, features.width
    exponent = scale_of(features)
    features = unit_rows(features)
    if center:
        features = MappedRows(features, shift=features.mean())
    factor = triangular_factor(features)[0] if n >= d else features.block(0, n)
    spectrum = summarise(svdvals(factor), max(n, d) * EPS)
    return replace(spectrum, values=scaled(spectrum.values, exponent))


def spectrum_of_few_rows(H: Tensor) -> Spectrum:
    """:func:`feature_spectrum` of fewer rows than columns, from ``HHᵀ``, several times faster.

    Values below ``√(n·2.2e-16)`` of the largest are not seen.

    >>> spectrum_of_few_rows(torch.tensor([[1.0, 5.0, 0.0], [-1.0, 5.0, 0.0]])).rank
    1
    """
    rows = unit_scale(to_double(H))
    rows = rows - rows.mean(0)
    values = eigvalsh(rows @ rows.mT).clamp(min=0.0).sqrt()
    spectrum = summarise(values, math.sqrt(len(rows) * EPS))
    return replace(spectrum, values=torch.ldexp(spectrum.values, binary_exponent(to_double(H))))


def feature_spectrum_from_moments(m: Moments, center: bool = True) -> Spectrum:
    """:func:`feature_spectrum` from collected moments; values below ``√(d·2.2e-16)`` of the largest are not seen.

    >>> from gramscope.linalg.moments import moments
    >>> feature_spectrum_from_moments(moments(torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))).stable_rank
    1.0
    """
    gram = m.require_gram() if center else m.HtH
    if center and is_constant(m.n, m.mean_h, gram.diagonal(dim1=-2, dim2=-1).sum()):
        gram = torch.zeros_like(gram)  # only rounding varies
    values = eigvalsh(gram).clamp(min=0.0).sqrt().reshape(-1)
    return summarise(values, math.sqrt(gram.shape[-1] * EPS))


def summarise(values: Tensor, rtol: float) -> Spectrum:
    """Ranks of non-negative singular values; those up to ``rtol`` times the largest do not count for ``rank``."""
    values = values.sort(descending=True).values
    if not float(values[0]) > 0.0:
        return Spectrum(values, 0, math.nan, math.nan, math.nan)
    p = values / values.sum()
    entropy = -torch.special.xlogy(p, p).sum()
    square = (values / values[0]).square()
    return Spectrum(
        values,
        int((values > rtol * values[0]).sum()),
        math.exp(float(entropy)),
        float(square.sum() / square[0]),
        float(square.sum().square() / square.square().sum()),
    )
