"""How far printed formulas and limits are from sampled nets.

    python studies/theory.py formulas --nets 40    # printed free-probability formulas against the general rule, net by net
    python studies/theory.py widths                # distance of sampled tangent kernels from the infinite-width recursion

Prints one JSON record a line; docs/theory.md has the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.freeness import MatrixFamily, PowerFamily, free_moment
from gramscope.theory.montecarlo import RandomMLP, estimate
from gramscope.theory.quadratic import (
    AGOP,
    CROSS,
    GRAM,
    data_matrices,
    observed_traces,
    spectral_moments,
    weight_matrix,
)
from gramscope.theory.tangent_kernels import tangent_kernel_at_infinite_width
from gramscope_lab.experiments.nfa_theory import polynomial_task
from gramscope_lab.runs.records import Record


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


def check_formulas(size: int = 512, nets: int = 24, seed: int = 0, alpha: float = 0.5) -> list[Record]:
    """Each printed formula beside the general rule and sampled nets: paired Monte Carlo at n = k = d = ``size``.

    On isotropic data and on data of spectrum 1/(1+k^α). Each net is compared with the formula at the moments of its own R:
    the spread of tr(Rᵖ) over nets, far larger than the error of a misprint's effect, then cancels. ``observed_ratio`` is the
    mean over nets of trace / formula, ``error`` its standard error and ``z = (ratio − 1)/error``.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[Record] = []
    for name, decay in (("isotropic", None), (f"decay {alpha:g}", alpha)):
        matrices = data_matrices(*polynomial_task(size, size, decay, "low-rank", generator))
        family = MatrixFamily(matrices)
        moments, traces = [], []
        for _ in range(nets):
            r = weight_matrix(size, size, generator)
            observed = observed_traces(matrices, r)
            traces.append(torch.stack([observed.cross, observed.gram, observed.agop]))
            moments.append(spectral_moments(r))
        r_moments = torch.stack(moments)
        of_word = dict(zip((CROSS, GRAM, AGOP), torch.stack(traces, 1), strict=True))
        centred = centred_moments(family, r_moments)
        for formula in FORMULAS:
            printed = formula.value(centred)
            ratio = estimate(of_word[formula.word] / printed)
            rule = free_moment(formula.word, family, PowerFamily("R", r_moments))
            agrees = torch.allclose(printed, rule, rtol=1e-9)
            rows.append(
                {
                    "data": name,
                    "equation": formula.equation,
                    "word": formula.word,
                    "agrees_with_rule": agrees,
                    "observed_ratio": float(ratio.mean),
                    "error": float(ratio.error),
                    "note": formula.note,
                    "z": float((ratio.mean - 1) / ratio.error),
                }
            )
    return rows


def check_widths(
    activations: Sequence[str] = ("relu", "erf", "quadratic", "linear"),
    *,
    depths: Sequence[int] = (1, 2, 3),
    widths: Sequence[int] = (64, 128, 256, 512),
    nets: int = 200,
    n: int = 12,
    d: int = 6,
    seed: int = 0,
) -> list[Record]:
    """How fast sampled tangent kernels of the first layer approach the recursion, on normal inputs ``[n, d]``.

    ``distance`` is the mean squared relative distance ``E‖𝒦 − 𝒦_∞‖² / ‖𝒦_∞‖²`` from the infinite-width kernel.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    rows: list[Record] = []
    for activation in activations:
        for depth in depths:
            limit = tangent_kernel_at_infinite_width(x, activation, depth)
            for width in widths:
                net = RandomMLP(d, (width,) * depth, activation)
                distances = [
                    (j @ j.mT - limit).square().sum((-2, -1)) / limit.square().sum()
                    for j, _, _ in net.draws(x, nets, generator)
                ]
                result = estimate(torch.cat(distances))
                head = {"activation": activation, "depth": depth, "width": width}
                rows.append({**head, "distance": float(result.mean), "error": float(result.error)})
    return rows


def fit_powers(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Least squares ``log distance = c + p log depth − q log width`` per activation: like depth/width, p and q are 1."""
    fits: list[Record] = []
    for activation in dict.fromkeys(row["activation"] for row in rows):
        chosen = [row for row in rows if row["activation"] == activation]
        if min(len({row["depth"] for row in chosen}), len({row["width"] for row in chosen})) < 2:
            raise InputError("a fit of depth^p / width^q needs at least two depths and two widths")
        depth, width, distance = (
            torch.tensor([float(row[key]) for row in chosen], dtype=torch.float64).log()
            for key in ("depth", "width", "distance")
        )
        design = torch.stack([torch.ones_like(depth), depth, -width], 1)
        solution = torch.linalg.lstsq(design, distance.unsqueeze(1)).solution.squeeze(1)
        constant, p, q = solution.tolist()
        residual = float((design @ solution - distance).abs().max())
        fits.append(
            {
                "activation": activation,
                "depth_power": p,
                "width_power": q,
                "constant": constant,
                "largest_residual": residual,
            }
        )
    return fits


def main() -> None:
    """Run one of the two checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("formulas", "widths"))
    parser.add_argument("--nets", type=int)
    given = parser.parse_args()
    count = {} if given.nets is None else {"nets": given.nets}
    rows = check_formulas(**count) if given.check == "formulas" else check_widths(**count)
    for row in [*rows, *(fit_powers(rows) if given.check == "widths" else [])]:
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
