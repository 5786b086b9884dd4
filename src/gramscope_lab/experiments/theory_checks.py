"""Monte Carlo checks of the free-probability formulas and of the infinite-width recursion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from gramscope_lab.experiments.theory_sweeps import polynomial_task


@dataclass(frozen=True)
class FormulaCheck:
    """One printed formula on one kind of data, compared with the general rule and with sampled nets.

    ``observed_ratio`` is the mean over nets of (trace of the net)/(formula with the moments of that net's own R), ``error`` its
    standard error and ``z = (ratio − 1)/error``.
    """

    data: str
    equation: str
    word: str
    agrees_with_rule: bool
    observed_ratio: float
    error: float
    note: str

    @property
    def z(self) -> float:
        """Distance of the nets from the formula in standard errors."""
        return (self.observed_ratio - 1) / self.error


def check_formulas(size: int = 512, nets: int = 24, seed: int = 0, alpha: float = 0.5) -> list[FormulaCheck]:
    """Paired Monte Carlo at n = k = d = ``size`` on isotropic data and on data of spectrum 1/(1+k^α).

    Each net is compared with the formula at the moments of its own R: the spread of tr(Rᵖ) over nets, far larger than the
    error of a misprint's effect, then cancels.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
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
                FormulaCheck(
                    name, formula.equation, formula.word, agrees, float(ratio.mean), float(ratio.error), formula.note
                )
            )
    return rows


@dataclass(frozen=True)
class WidthCheck:
    """Mean squared relative distance ``E‖𝒦 − 𝒦_∞‖² / ‖𝒦_∞‖²`` of sampled nets from the infinite-width kernel."""

    activation: str
    depth: int
    width: int
    distance: float
    error: float


@dataclass(frozen=True)
class PowerFit:
    """Least squares ``log distance = c + p log depth − q log width``: 1 and 1 mean that it falls like depth/width."""

    activation: str
    depth_power: float
    width_power: float
    constant: float
    largest_residual: float


def check_widths(
    activations: Sequence[str] = ("relu", "erf", "quadratic", "linear"),
    *,
    depths: Sequence[int] = (1, 2, 3),
    widths: Sequence[int] = (64, 128, 256, 512),
    nets: int = 200,
    n: int = 12,
    d: int = 6,
    seed: int = 0,
) -> list[WidthCheck]:
    """How fast sampled tangent kernels of the first layer approach the recursion, on normal inputs ``[n, d]``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    rows = []
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
                rows.append(WidthCheck(activation, depth, width, float(result.mean), float(result.error)))
    return rows


def fit_powers(rows: Sequence[WidthCheck]) -> list[PowerFit]:
    """One :class:`PowerFit` per activation."""
    fits = []
    for activation in dict.fromkeys(row.activation for row in rows):
        chosen = [row for row in rows if row.activation == activation]
        if min(len({row.depth for row in chosen}), len({row.width for row in chosen})) < 2:
            raise InputError("a fit of depth^p / width^q needs at least two depths and two widths")
        depth, width, distance = (
            torch.tensor([float(getattr(row, field)) for row in chosen], dtype=torch.float64).log()
            for field in ("depth", "width", "distance")
        )
        design = torch.stack([torch.ones_like(depth), depth, -width], 1)
        constant, p, q = torch.linalg.lstsq(design, distance.unsqueeze(1)).solution.squeeze(1).tolist()
        residual = (design @ torch.tensor([constant, p, q], dtype=torch.float64) - distance).abs().max()
        fits.append(PowerFit(activation, p, q, constant, float(residual)))
    return fits
