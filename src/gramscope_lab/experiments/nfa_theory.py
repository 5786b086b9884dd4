"""Where the centred NFA starts, predicted from the data alone, beside sampled nets: nfa-fig3, nfa-fig6, ``gramscope theory``.

Every function is deterministic in its seeds and works in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.psd import random_orthogonal
from gramscope.theory.early_time import Traces, labelled_inputs, speeds_from_kernel, speeds_from_tangents
from gramscope.theory.freeness import MatrixFamily
from gramscope.theory.gaussian import gaussian_spectral_moments
from gramscope.theory.montecarlo import RandomMLP, estimate
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
from gramscope_lab.experiments.experiment import Claim, Computation, Experiment, Options, Recorder, Results
from gramscope_lab.experiments.plots import PALETTE, Figure, band, curve, legend_below, mean, panels
from gramscope_lab.runs.records import Record

#: rules for inverting a singular X₁ᵀX₁ in nfa-fig3, and hidden layers of the nets of nfa-fig6
INVERSES: tuple[InverseRule, ...] = ("pseudo", "literal")
DEPTH = 2


# -- predictions that apply ---------------------------------------------------------------------------------------
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
            mean = mean_kernel_correlation(torch.cat([j @ j.mT for j in stacks]), p)
            predictions["mean kernels"] = (float(mean), mean.error or 0.0)
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


def mean_kernel_correlation(kernels: Tensor, p: Tensor) -> Measured:
    """The first-order prediction with E[𝒦] and E[𝒦²] as means over nets, from 𝒦 of each, ``[nets, N, N]``."""
    squares = kernels @ kernels

    def predicted(kept: Tensor) -> Tensor:
        return speeds_from_kernel(p, kernels[kept].mean(0), squares[kept].mean(0)).correlation

    return jackknife("nets", len(kernels), predicted)


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


# -- nfa-fig3: alignment-reversing data ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Reversing:
    """[NFA] Appendix F and H: n = k = d = 1024, one quadratic net, traces over 30 nets, 10 data sets. No balances given.

    The paper does not say how a singular X₁ᵀX₁ is inverted, nor that X₁ must be small for the reversal to appear: both
    inverses and both scales of X₁ are run.
    """

    seeds: tuple[int, ...] = tuple(range(10))
    size: int = 1024
    balances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
    nets: int = 30


def reversing_parts(settings: Reversing, options: Options) -> list[Computation]:
    """One computation per balance."""
    count = len(settings.seeds)
    if settings.seeds != tuple(range(count)):
        raise InputError(f"nfa-fig3 numbers its data sets from 0, not {list(settings.seeds)}; give --seeds {count}")

    def sweep(balance: float, recorder: Recorder) -> None:
        for row in recorder.track(reversals(settings.size, balance, count, settings.nets), 4 * count):
            recorder.record("reversal", **row)

    return [Computation(f"balance-{balance:g}", partial(sweep, balance)) for balance in settings.balances]


def reversals(
    size: int, balance: float, data_seeds: int, nets: int, *, small: float = 0.125, seed: int = 0
) -> Iterator[Record]:
    """[NFA] Fig. 3 with n = k = d = ``size``: one quadratic net for all data, predictions from moments over ``nets`` others.

    ``predicted`` is the free-probability prediction with the moments of R averaged over nets, as [NFA] has it.

    Works with d×d products only: per data set four products for the moments of A and B and three for the observed
    traces. ``scale`` multiplies X₁, see :func:`~gramscope_lab.data.synthetic.alignment_reversing`: 1 (the text) and
    ``small``/√size, where ρ is low at small balances.
    """
    generator = torch.Generator().manual_seed(seed)
    r = weight_matrix(size, size, generator)
    moments = torch.stack([spectral_moments(weight_matrix(size, size, generator)) for _ in range(nets)]).mean(0)
    for data_seed in range(data_seeds):
        draw = draw_alignment_reversing(size, size, balance, torch.Generator().manual_seed(1000 * seed + data_seed))
        for scale, inverse in product((1.0, small / math.sqrt(size)), INVERSES):
            matrices = data_matrices(*draw.build(inverse, scale))
            yield {
                "balance": balance,
                "data_seed": data_seed,
                "inverse": inverse,
                "scale": scale,
                "predicted": float(free_traces(MatrixFamily(matrices), moments).correlation),
                "observed": float(observed_traces(matrices, r).correlation),
            }


def _means(records: Sequence[Record], over: str) -> tuple[list[float], list[float]]:
    """Predicted and observed values, averaged over records with equal ``over``."""
    return curve(records, over, "predicted")[1], curve(records, over, "observed")[1]


def _rules(results: Results[Reversing]) -> dict[str, list[Record]]:
    """Records by scale of X₁ and inverse, as they are written in the figure."""
    groups: dict[str, list[Record]] = {}
    for record in results.records("reversal"):
        scale = "1" if record["scale"] == 1 else f"{record['scale']:.2g}"
        groups.setdefault(f"{record['inverse']} inverse, X₁ × {scale}", []).append(record)
    return groups


def follows(results: Results[Reversing]) -> Iterator[Claim]:
    """[NFA] Fig. 3: predicted and observed correlations agree, for single data sets and on average."""
    for rule, records in _rules(results).items():
        single = max(abs(r["predicted"] - r["observed"]) for r in records)
        predicted, observed = _means(records, "balance")
        average = max(abs(p - o) for p, o in zip(predicted, observed, strict=True))
        yield Claim(
            f"prediction within 0.05 of observation at every balance, mean over data sets ({rule})",
            "closely match",
            f"largest difference of means {average:.3f}, of single data sets {single:.3f}",
            average <= 0.05,
            f"n = k = d = {results.settings.size}; the formulas are exact as it grows",
        )


def reverses(results: Results[Reversing]) -> Iterator[Claim]:
    """[NFA] §3.2: as the balance falls, the data disrupts the alignment."""
    for rule, records in _rules(results).items():
        balances, observed, _ = curve(records, "balance", "observed")
        low = min(observed)
        yield Claim(
            f"alignment is disrupted at small balance: ρ falls by more than 0.05 ({rule})",
            "low correlation at small balance",
            f"{observed[0]:.2f} at {balances[0]:g}, lowest {low:.2f}, {observed[-1]:.2f} at {balances[-1]:g}",
            observed[0] < observed[-1] - 0.05,
        )


def reversing_figure(results: Results[Reversing]) -> Figure:
    """Predicted and observed ρ over the balance, thin lines single data sets; and one against the other."""
    page, axes = panels(1, 3, width=2.5, height=2.3)
    for index, (rule, records) in enumerate(_rules(results).items()):
        colour = PALETTE[index]
        for place, key in zip(axes[0], ("predicted", "observed"), strict=False):
            for seed in results.settings.seeds[:4]:
                own = sorted((r for r in records if r["data_seed"] == seed), key=lambda r: float(r["balance"]))
                place.plot([r["balance"] for r in own], [r[key] for r in own], color=colour, alpha=0.25, linewidth=0.7)
            balances, means, _ = curve(records, "balance", key)
            place.plot(balances, means, color=colour, label=rule, marker="os^D"[index % 4], markersize=3)
        predicted, observed = _means(records, "balance")
        axes[0, 2].scatter(predicted, observed, s=12, color=colour, marker="os^D"[index % 4])
    lowest = min(r[key] for r in results.records("reversal") for key in ("predicted", "observed"))
    for place, title in zip(axes[0], ("predicted", "observed"), strict=False):
        place.set_title(title)
        place.set_xlabel("balance")
        place.set_ylim(lowest - 0.05, 1.02)
    axes[0, 0].set_ylabel("ρ of the second derivatives")
    low = min(axes[0, 2].get_xlim()[0], axes[0, 2].get_ylim()[0])
    axes[0, 2].plot([low, 1], [low, 1], color="#888888", linewidth=0.8, zorder=0)
    axes[0, 2].set_title("one point per balance")
    axes[0, 2].set_xlabel("predicted")
    axes[0, 2].set_ylabel("observed")
    legend_below(page, axes[0, 0], f"n = k = d = {results.settings.size}", columns=2)
    return page


# -- nfa-fig6: first-order prediction in depth --------------------------------------------------------------------
@dataclass(frozen=True)
class Decaying:
    """[NFA] Appendix C and H: n = d = 128, widths 128 and 1024, two hidden layers. It gives no decay rates."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    n: int = 128
    d: int = 128
    widths: tuple[int, ...] = (128, 1024)
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    activations: tuple[str, ...] = ("quadratic", "relu")
    targets: tuple[str, ...] = ("low-rank", "high-rank")
    nets: int = 10


def decaying_parts(settings: Decaying, options: Options) -> list[Computation]:
    """One computation per target and seed."""

    def sweep(target: str, seed: int, recorder: Recorder) -> None:
        total = len(settings.alphas) * len(settings.activations) * len(settings.widths)
        for row in recorder.track(decays(settings, target, seed), total):
            recorder.record("decay", seed=seed, **row)

    return [
        Computation(f"{target}-seed-{seed}", partial(sweep, target, seed))
        for target, seed in product(settings.targets, settings.seeds)
    ]


def decays(settings: Decaying, target: str, seed: int) -> Iterator[Record]:
    """[NFA] Fig. 6: first-order prediction (𝒦 at infinite width) against observed ρ of the first layer, f = 0 on the data."""
    for alpha in settings.alphas:
        generator = torch.Generator().manual_seed(seed)
        x, y = polynomial_task(settings.n, settings.d, alpha, target, generator)
        for activation in settings.activations:
            options: dict[str, Any] = {"activation": activation, "depth": DEPTH, "nets": settings.nets}
            for row in compare_cnfa(x, y, settings.widths, **options, generator=generator):
                if row["prediction"] == "infinite width":
                    yield {"alpha": alpha, "target": target, "activation": activation, **row}


def _panels_of(settings: Decaying) -> list[tuple[str, str]]:
    return list(product(settings.activations, settings.targets))


def _distance(records: Sequence[Record]) -> float:
    """Root mean square over α of predicted − observed, both averaged over seeds."""
    predicted, observed = _means(records, "alpha")
    return math.sqrt(mean((p - o) ** 2 for p, o in zip(predicted, observed, strict=True)))


def dips(results: Results[Decaying]) -> Iterator[Claim]:
    """[NFA] Appendix C: predicted and observed C-NFA are lower at intermediate α than at both ends."""
    for activation, target in _panels_of(results.settings):
        records = results.records("decay", activation=activation, target=target, width=results.settings.widths[-1])
        found = []
        for key in ("predicted", "observed"):
            alphas, values, _ = curve(records, "alpha", key)
            place = min(range(len(values)), key=lambda i: values[i])
            found.append((alphas[place], values[place], 0 < place < len(values) - 1))
        yield Claim(
            f"predicted and observed C-NFA dip at intermediate α ({activation}, {target}, k = {records[0]['width']})",
            "both decrease at intermediate α",
            f"lowest: predicted {found[0][1]:.2f} at α = {found[0][0]:g}, observed {found[1][1]:.2f} at {found[1][0]:g}",
            found[0][2] and found[1][2],
        )


def closer(results: Results[Decaying]) -> Iterator[Claim]:
    """[NFA] Appendix C: the wider net is closer to the prediction."""
    narrow, *_, wide = results.settings.widths
    for activation, target in _panels_of(results.settings):
        near, far = (
            _distance(results.records("decay", activation=activation, target=target, width=width))
            for width in (wide, narrow)
        )
        yield Claim(
            f"prediction closer at k = {wide} than at k = {narrow} ({activation}, {target})",
            "closer in the NTK regime (quadratic)",
            f"rms difference {near:.3f}, {far:.3f}",
            near < far,
        )


def decaying_figure(results: Results[Decaying]) -> Figure:
    """Predicted and observed C-NFA over α, a panel for each activation and target."""
    cells = _panels_of(results.settings)
    page, axes = panels(1, len(cells), width=2.2, height=2.2, sharey=True)
    for place, (activation, target) in zip(axes[0], cells, strict=True):
        for index, width in enumerate(results.settings.widths):
            records = results.records("decay", activation=activation, target=target, width=width)
            band(place, records, "alpha", "observed", index=index, label=f"observed, k = {width}", deviations=0)
        black: dict[str, Any] = {"color": "#000000", "linestyle": ":", "label": "predicted (first order)"}
        band(place, records, "alpha", "predicted", deviations=0, **black)
        place.set_title(f"{activation}, {target}")
        place.set_xlabel(r"data decay $\alpha$")
    axes[0, 0].set_ylabel("C-NFA at the start")
    legend_below(page, axes[0, 0])
    return page


# -- experiments --------------------------------------------------------------------------------------------------
FIG3 = Experiment(
    Reversing(seeds=(0, 1), size=512), Reversing(), reversing_parts, (follows, reverses), reversing_figure
)
FIG6 = Experiment(
    Decaying(seeds=(0, 1, 2, 3), widths=(128, 512), alphas=(0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0), nets=4),
    Decaying(),
    decaying_parts,
    (dips, closer),
    decaying_figure,
)
