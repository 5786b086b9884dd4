"""The one-hidden-layer quadratic net ``f = ½ aᵀ(Wx)²``: exact traces, free-probability and exact Gaussian predictions.

With ``R = Wᵀ diag(a²) W``, ``A = (XᵀYX)²`` and ``B = XᵀX`` ([NFA] eq. 16), 𝒦 = X R Xᵀ and

    tr(F G) = tr(A R A R B R),   tr(F²) = tr(A R A R),   tr(G²) = tr(A R B R A R B R)

for F = ẆᵀẆ and G = n ẆᵀKẆ at f = 0: d×d products only, no n×n kernel. [NFA] writes the net without the ½, which makes 𝒦
four times as large and leaves ρ as it is. Traces are normalised, tr(I) = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    m = x.mT @ (y / y.abs().max() * x)
    if not bool(m.any()):
        raise InputError("XᵀYX = Σ y_i x_i x_iᵀ is exactly zero, so Ẇ = 0 and the correlation is 0/0")
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


# -- the formulas of [NFA] Appendix E as printed ---------------------------------------------------------------------
@dataclass(frozen=True)
class Moments:
    """The moments [NFA]'s formulas are written in; a trailing ``c`` marks centred matrices, Ā = A − tr(A)."""

    a: Tensor
    b: Tensor
    aac: Tensor  # tr(Ā²)
    bbc: Tensor  # tr(B̄²)
    abc: Tensor  # tr(ĀB̄)
    aabc: Tensor  # tr(Ā²B̄)
    abbc: Tensor  # tr(ĀB̄²)
    ababc: Tensor  # tr((ĀB̄)²)
    bb: Tensor  # tr(B²)
    r: tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PrintedFormula:
    """One printed equation: which trace it claims to be, and its right-hand side."""

    equation: str
    word: str
    value: Callable[[Moments], Tensor]
    note: str = ""


def centred_moments(data: MatrixFamily, r_moments: Tensor) -> Moments:
    """The quantities of eqs. (20) to (28) from the matrices A, B and ``r_moments[…, 4]``."""
    t = data.moment
    a, b = t("A"), t("B")
    aac, bbc, abc = t("AA") - a**2, t("BB") - b**2, t("AB") - a * b
    aabc = t("AAB") - 2 * a * t("AB") - b * t("AA") + 2 * a**2 * b
    abbc = t("ABB") - 2 * b * t("AB") - a * t("BB") + 2 * a * b**2
    ababc = (
        t("ABAB")
        - 2 * b * t("AAB")
        - 2 * a * t("ABB")
        + b**2 * t("AA")
        + a**2 * t("BB")
        + 4 * a * b * t("AB")
        - 3 * a**2 * b**2
    )
    r1, r2, r3, r4 = r_moments[..., :4].unbind(-1)
    return Moments(a, b, aac, bbc, abc, aabc, abbc, ababc, t("BB"), (r1, r2, r3, r4))


def _numerator(m: Moments, last: Tensor) -> Tensor:
    r1, r2, _, _ = m.r
    return m.a**2 * m.b * last + 2 * m.a * r2 * r1 * m.abc + m.b * r1 * r2 * m.aac + r1**3 * m.aabc


def _second_denominator(m: Moments, last: Tensor) -> Tensor:
    r1, r2, r3, r4 = m.r
    return (
        r1**4 * m.ababc
        + 2 * r1**2 * (r2 - r1**2) * m.abc**2
        + 2 * r1**2 * r2 * (m.b * m.aabc + m.a * m.abbc)
        + 4 * m.a * m.b * r3 * r1 * m.abc
        + m.a**2 * m.b**2 * r4
        + m.a**2 * m.bbc * r2**2
        + last
    )


FORMULAS: tuple[PrintedFormula, ...] = (
    PrintedFormula("(19)", CROSS, lambda m: _numerator(m, m.r[0] ** 3), "last factor printed tr(R)³, right is tr(R³)"),
    PrintedFormula("(20)", CROSS, lambda m: _numerator(m, m.r[2])),
    PrintedFormula(
        "(22)",
        GRAM,
        lambda m: (m.aac + m.a**2) * m.r[0] ** 2 + m.a**2 * m.r[1] - m.a**2 * m.r[0] ** 2,
    ),
    PrintedFormula(
        "(28)",
        AGOP,
        lambda m: _second_denominator(m, torch.zeros_like(m.bb)),
        "last term printed tr[Ā]²tr[B²]tr[R²]², which is 0 as tr[Ā] = 0; right is tr[B]²tr[Ā²]tr[R²]²",
    ),
    PrintedFormula(
        "(28), last term tr[A]²tr[B²]tr[R²]²",
        AGOP,
        lambda m: _second_denominator(m, m.a**2 * m.bb * m.r[1] ** 2),
        "the misprint read without the bar: wrong as well",
    ),
    PrintedFormula(
        "(28) corrected", AGOP, lambda m: _second_denominator(m, m.b**2 * m.aac * m.r[1] ** 2), "agrees with the rule"
    ),
)


def rule_value(formula: PrintedFormula, data: MatrixFamily, r_moments: Tensor) -> Tensor:
    """What the general rule gives for the trace the formula claims."""
    return free_moment(formula.word, data, PowerFamily("R", r_moments))
