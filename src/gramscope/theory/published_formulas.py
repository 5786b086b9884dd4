"""The formulas of [NFA] Appendix E as printed, and which of them the general rule confirms.

Each entry gives the printed right-hand side and the value of the rule of :mod:`gramscope.theory.freeness`; the verdict
is computed. See docs/theory.md for the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.theory.freeness import MatrixFamily, PowerFamily, free_moment
from gramscope.theory.quadratic import AGOP, CROSS, GRAM


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
