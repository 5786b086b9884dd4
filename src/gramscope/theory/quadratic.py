"""The one-hidden-layer quadratic net ``f = ½ aᵀ(Wx)²``: exact traces, free-probability and exact Gaussian predictions.

With ``R = Wᵀ diag(a²) W``, ``A = (XᵀYX)²`` and ``B = XᵀX`` ([NFA] eq. 16), 𝒦 = X R Xᵀ and

    tr(F G) = tr(A R A R B R),   tr(F²) = tr(A R A R),   tr(G²) = tr(A R B R A R B R)

for F = ẆᵀẆ and G = n ẆᵀKẆ at f = 0: d×d products only, no n×n kernel. [NFA] writes the net without the ½, which makes 𝒦
four times as large and leaves ρ as it is. Traces are normalised, tr(I) = 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.early_time import Traces, check_data
from gramscope.theory.freeness import MatrixFamily, PowerFamily, free_moment
from gramscope.theory.gaussian import gaussian_moment

#: the words of numerator, first and second denominator
CROSS, GRAM, AGOP = "ARARBR", "ARAR", "ARBRARBR"


def data_matrices(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """``A = (XᵀYX)²`` and ``B = XᵀX`` in float64, each divided by its Frobenius norm (correlations do not depend on scale)."""
    check_data(x, y)
    if y.dim() == 2 and y.shape[1] != 1:
        raise InputError(f"y has {y.shape[1]} columns; the quadratic net has one output")
    x, y = x.to(torch.float64), y.to(torch.float64).reshape(-1, 1)
    x = x / x.abs().max()
    weighted = y / y.abs().max() * x
    m = x.mT @ weighted
    if float(m.norm()) <= len(x) * torch.finfo(m.dtype).eps * float((x.abs().mT @ weighted.abs()).norm()):
        raise InputError("XᵀYX = Σ y_i x_i x_iᵀ is zero up to rounding, so Ẇ = 0 and the correlation is 0/0")
    m = m / m.norm()
    a, b = m @ m, x.mT @ x
    return {"A": a / a.norm(), "B": b / b.norm()}


def weight_matrix(width: int, d: int, generator: torch.Generator, nets: int | None = None) -> Tensor:
    """A draw of ``R = Wᵀ diag(a²) W``, W ~ N(0, 1/width) and a ~ N(0, 1): ``[d, d]``, or ``[nets, d, d]``."""
    shape = () if nets is None else (nets,)
    w = torch.randn(*shape, width, d, generator=generator, device=generator.device, dtype=torch.float64)
    a = torch.randn(*shape, width, 1, generator=generator, device=generator.device, dtype=torch.float64)
    v = a * w / math.sqrt(width)
    return v.mT @ v


def spectral_moments(r: Tensor, count: int = 4) -> Tensor:
    """``tr(Rᵖ)`` for p = 1 … count of symmetric ``[…, d, d]``: ``[…, count]``, with ⌈count/2⌉ − 1 products."""
    powers = [r]
    while 2 * len(powers) < count:
        powers.append(powers[-1] @ r)
    values = [r.diagonal(dim1=-2, dim2=-1).mean(-1)]
    for p in range(2, count + 1):
        left, right = powers[(p + 1) // 2 - 1], powers[p // 2 - 1]
        values.append((left * right).sum((-2, -1)) / r.shape[-1])
    return torch.stack(values[:count], -1)


def observed_traces(matrices: dict[str, Tensor], r: Tensor) -> Traces:
    """The three traces of one net (or a stack), by three d×d products."""
    ar, br = matrices["A"] @ r, matrices["B"] @ r
    arbr = ar @ br
    size = r.shape[-1]
    return Traces(
        cross=(ar * arbr.mT).sum((-2, -1)) / size,
        gram=(ar * ar.mT).sum((-2, -1)) / size,
        agop=(arbr * arbr.mT).sum((-2, -1)) / size,
    )


def free_traces(data: MatrixFamily, r_moments: Tensor) -> Traces:
    """The three traces if R is free of {A, B} ([NFA] Assumption 8), from four moments ``r_moments[…, 4]`` of R."""
    r = PowerFamily("R", r_moments)
    return Traces(*(free_moment(word, data, r) for word in (CROSS, GRAM, AGOP)))


def gaussian_traces(data: MatrixFamily, width: int) -> Traces:
    """The exact means of the three traces over Gaussian nets of this width, with every finite-size term."""
    return Traces(*(gaussian_moment(word, data, width, size=data.size) for word in (CROSS, GRAM, AGOP)))
