"""How far printed formulas and limits are from sampled nets.

    python studies/theory.py formulas --nets 40    # printed free-probability formulas against the general rule, net by net
    python studies/theory.py widths                # distance of sampled tangent kernels from the infinite-width recursion

Prints one JSON record a line; docs/theory.md has the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gramscope.errors import InputError
from gramscope.theory.freeness import MatrixFamily
from gramscope.theory.montecarlo import RandomMLP, estimate
from gramscope.theory.quadratic import (
    AGOP,
    CROSS,
    FORMULAS,
    GRAM,
    centred_moments,
    data_matrices,
    observed_traces,
    rule_value,
    spectral_moments,
    weight_matrix,
)
from gramscope.theory.tangent_kernels import tangent_kernel_at_infinite_width
from gramscope_lab.experiments.nfa_theory import polynomial_task
from gramscope_lab.runs.records import Record


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
            agrees = torch.allclose(printed, rule_value(formula, family, r_moments), rtol=1e-9)
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
