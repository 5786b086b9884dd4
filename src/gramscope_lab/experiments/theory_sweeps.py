"""Prediction beside observation: the records behind ``gramscope theory``, nfa-fig3 and nfa-fig6.

Every function is deterministic in its seeds, works in float64 and gives one record for each line of the table it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.psd import random_orthogonal
from gramscope.theory.early_time import Traces, labelled_inputs, speeds_from_kernel, speeds_from_tangents
from gramscope.theory.freeness import MatrixFamily
from gramscope.theory.gaussian import gaussian_spectral_moments
from gramscope.theory.montecarlo import RandomMLP, estimate, kernel_moments
from gramscope.theory.quadratic import (
    AGOP,
    CROSS,
    FORMULAS,
    GRAM,
    centred_moments,
    data_matrices,
    free_traces,
    gaussian_traces,
    observed_traces,
    rule_value,
    spectral_moments,
    weight_matrix,
)
from gramscope.theory.tangent_kernels import one_hidden_layer_kernel_moments, tangent_kernel_at_infinite_width
from gramscope_lab.data.synthetic import (
    InverseRule,
    chain_monomial,
    decaying_spectrum,
    draw_alignment_reversing,
    gaussian,
    high_rank_polynomial,
    unit_std,
)
from gramscope_lab.runs.records import Record


def compare_cnfa(
    x: Tensor,
    y: Tensor,
    widths: Sequence[int],
    *,
    activation: str = "quadratic",
    depth: int = 1,
    nets: int = 20,
    generator: torch.Generator,
) -> list[Record]:
    """ρ(ẆᵀẆ, ẆᵀKẆ) of the first layer for f = 0 on the data ([NFA] eq. 4): every prediction that applies, per width.

    ``observed`` is the mean of ρ over nets, ``ratio_of_means`` the correlation of their mean traces. [NFA] takes them for
    equal (eq. 11, Assumption 9); ``free`` and ``gaussian`` predict the second.

    ``infinite width`` is the first-order prediction with 𝒦's limit; ``mean kernels`` uses E[𝒦] and E[𝒦²] of this width
    (exact for one hidden layer, else averaged over the sampled nets, with its error bar); ``free`` and ``gaussian`` are the
    free-probability and the exact finite-size prediction of the one-hidden-layer quadratic net.
    """
    x, y = x.to(torch.float64), y.to(torch.float64)
    p = labelled_inputs(x, y)
    if p.shape[0] != x.shape[0]:
        raise InputError(f"y has shape {tuple(y.shape)}; these nets have one output")
    limit = float(speeds_from_kernel(p, tangent_kernel_at_infinite_width(x, activation, depth)).correlation)
    rows: list[Record] = []
    for width in widths:
        net = RandomMLP(x.shape[1], (width,) * depth, activation)
        stacks = [j for j, _, _ in net.draws(x, nets, generator)]
        traces = [speeds_from_tangents(j, p).traces for j in stacks]
        observed = estimate(torch.cat([t.correlation for t in traces]))
        ratio = Traces(*(torch.cat([getattr(t, f) for t in traces]).mean() for f in ("cross", "gram", "agop")))
        predictions = {"infinite width": (limit, 0.0)}
        if depth == 1:
            speeds = speeds_from_kernel(p, *one_hidden_layer_kernel_moments(x, activation, width))
            predictions["mean kernels"] = (float(speeds.correlation), 0.0)
        else:
            mean = kernel_moments(stacks).correlation(p, use_square=True)
            predictions["mean kernels"] = (float(mean.mean), float(mean.error))
        if depth == 1 and activation == "quadratic":
            family = MatrixFamily(data_matrices(x, y))
            moments = gaussian_spectral_moments(width, x.shape[1])
            predictions["free"] = (float(free_traces(family, moments).correlation), 0.0)
            predictions["gaussian"] = (float(gaussian_traces(family, width).correlation), 0.0)
        rows += [
            {
                "width": width,
                "prediction": name,
                "predicted": value,
                "predicted_error": error,
                "observed": float(observed.mean),
                "observed_error": float(observed.error),
                "ratio_of_means": float(ratio.correlation),
                "nets": nets,
                "difference": value - float(observed.mean),
            }
            for name, (value, error) in predictions.items()
        ]
    return rows


#: the sweep of nfa-fig3; [NFA] gives no values
BALANCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def reversal_sweep(
    size: int = 1024,
    *,
    balances: Sequence[float] = BALANCES,
    data_seeds: int = 4,
    nets: int = 30,
    inverses: Sequence[InverseRule] = ("pseudo", "literal"),
    scales: Sequence[float] | None = None,
    seed: int = 0,
) -> Iterator[Record]:
    """[NFA] Fig. 3 with n = k = d = ``size``: one quadratic net for all data, predictions from moments over ``nets`` others.

    ``free_…`` are free-probability predictions with the moments of R averaged over nets (as [NFA] does: ``difference`` is
    that minus the observation), with their exact Gaussian values, and of the observed net itself; ``gaussian`` is the ratio
    of exact mean traces.

    Works with d×d products only: per data set four products for the moments of A and B and three for the observed
    traces. ``scales`` multiplies X₁, see :func:`~gramscope_lab.data.synthetic.alignment_reversing`; 1 (the text) and
    1/(8√size), where ρ is low at small balances, unless given.
    """
    generator = torch.Generator().manual_seed(seed)
    r = weight_matrix(size, size, generator)
    sampled = torch.stack([spectral_moments(weight_matrix(size, size, generator)) for _ in range(nets)]).mean(0)
    exact, own = gaussian_spectral_moments(size, size), spectral_moments(r)
    used_scales = (1.0, 0.125 / math.sqrt(size)) if scales is None else scales
    for balance, data_seed in product(balances, range(data_seeds)):
        draw = draw_alignment_reversing(size, size, balance, torch.Generator().manual_seed(1000 * seed + data_seed))
        for scale, inverse in product(used_scales, inverses):
            matrices = data_matrices(*draw.build(inverse, scale))
            family = MatrixFamily(matrices)
            observed = float(observed_traces(matrices, r).correlation)
            free = {
                name: float(free_traces(family, moments).correlation)
                for name, moments in (("sampled", sampled), ("exact", exact), ("own", own))
            }
            yield {
                "balance": balance,
                "data_seed": data_seed,
                "inverse": inverse,
                "scale": scale,
                "observed": observed,
                **{f"free_{name}_moments": value for name, value in free.items()},
                "gaussian": float(gaussian_traces(family, size).correlation),
                "difference": free["sampled"] - observed,
            }


#: the sweep of nfa-fig6; [NFA] gives no values
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def polynomial_task(
    n: int, d: int, alpha: float | None, target: str, generator: torch.Generator, rank: int = 5
) -> tuple[Tensor, Tensor]:
    """Gaussian inputs of decay ``alpha`` in a random eigenbasis (isotropic for ``None``) with a target of unit deviation.

    ``target``: ``"low-rank"``, the chain monomial of ``rank``, or ``"high-rank"``, Σ(Qx)_i² with a normal Q.
    """
    spectrum = torch.ones(d, dtype=torch.float64)
    basis = None
    if alpha is not None:
        spectrum = decaying_spectrum(d, alpha, dtype=torch.float64)
        basis = random_orthogonal(d, generator)
    x = gaussian(n, spectrum, generator, basis=basis)
    if target == "low-rank":
        y = chain_monomial(x, rank)
    elif target == "high-rank":
        y = high_rank_polynomial(x, torch.randn(d, d, generator=generator, dtype=torch.float64))
    else:
        raise InputError(f"target={target!r}: give 'low-rank' or 'high-rank'")
    return x, unit_std(y)


def decay_sweep(
    *,
    n: int = 128,
    d: int = 128,
    widths: Sequence[int] = (128, 1024),
    alphas: Sequence[float] = ALPHAS,
    activations: Sequence[str] = ("quadratic", "relu"),
    targets: Sequence[str] = ("low-rank", "high-rank"),
    depth: int = 2,
    nets: int = 5,
    data_seeds: int = 2,
    seed: int = 0,
) -> Iterator[Record]:
    """[NFA] Fig. 6: first-order prediction (𝒦 at infinite width) against observed ρ of the first layer, f = 0 on the data."""
    for target in targets:
        for alpha in alphas:
            generator = torch.Generator().manual_seed(seed)
            data = [polynomial_task(n, d, alpha, target, generator) for _ in range(data_seeds)]
            for activation in activations:
                tasks = [(x, labelled_inputs(x, y)) for x, y in data]
                limits = [
                    speeds_from_kernel(p, tangent_kernel_at_infinite_width(x, activation, depth)).correlation
                    for x, p in tasks
                ]
                for width in widths:
                    net = RandomMLP(d, (width,) * depth, activation)
                    values = [
                        speeds_from_tangents(j, p).correlation
                        for x, p in tasks
                        for j, _, _ in net.draws(x, nets, generator)
                    ]
                    observed = torch.cat(values)
                    yield {
                        "alpha": alpha,
                        "target": target,
                        "activation": activation,
                        "width": width,
                        "depth": depth,
                        "predicted": float(torch.stack(limits).mean()),
                        "observed": float(observed.mean()),
                        "observed_error": float(observed.std()) / math.sqrt(observed.numel()),
                    }


# -- Monte Carlo checks -------------------------------------------------------------------------------------------
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
