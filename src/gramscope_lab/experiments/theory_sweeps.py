"""Prediction beside observation: the records behind ``gramscope theory``, nfa-fig3 and nfa-fig6.

Every function is deterministic in its seeds, works in float64 and gives one record for each line of the table it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.psd import random_orthogonal
from gramscope.theory.early_time import Traces, labelled_inputs, speeds_from_kernel, speeds_from_tangents
from gramscope.theory.freeness import MatrixFamily
from gramscope.theory.gaussian import gaussian_spectral_moments
from gramscope.theory.montecarlo import RandomMLP, estimate, kernel_moments
from gramscope.theory.quadratic import (
    data_matrices,
    free_traces,
    gaussian_traces,
    observed_traces,
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
