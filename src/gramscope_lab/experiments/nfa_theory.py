"""nfa-fig3 and nfa-fig6: where the centred NFA starts, predicted from the data alone, beside what sampled nets do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from gramscope.errors import InputError
from gramscope_lab.experiments.experiment import Claim, Computation, Experiment, Options, Recorder, Results
from gramscope_lab.experiments.plots import PALETTE, Figure, band, curve, legend_below, mean, panels
from gramscope_lab.experiments.theory_sweeps import ALPHAS, BALANCES, decay_sweep, reversal_sweep
from gramscope_lab.runs.records import Record


# -- nfa-fig3: alignment-reversing data ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Reversing:
    """[NFA] Appendix F and H: n = k = d = 1024, one quadratic net, traces over 30 nets, 10 data sets. No balances given.

    The paper does not say how a singular X₁ᵀX₁ is inverted, nor that X₁ must be small for the reversal to appear: both
    inverses and both scales of X₁ are run.
    """

    seeds: tuple[int, ...] = tuple(range(10))
    size: int = 1024
    balances: tuple[float, ...] = BALANCES
    nets: int = 30


def reversing_parts(settings: Reversing, options: Options) -> list[Computation]:
    """One computation per balance."""
    count = len(settings.seeds)
    if settings.seeds != tuple(range(count)):
        raise InputError(f"nfa-fig3 numbers its data sets from 0, not {list(settings.seeds)}; give --seeds {count}")

    def sweep(balance: float, recorder: Recorder) -> None:
        rows = reversal_sweep(settings.size, balances=(balance,), data_seeds=count, nets=settings.nets)
        for row in recorder.track(rows, 4 * count):
            recorder.record("reversal", **row, predicted=row["free_sampled_moments"])

    return [Computation(f"balance-{balance:g}", partial(sweep, balance)) for balance in settings.balances]


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
    alphas: tuple[float, ...] = ALPHAS
    activations: tuple[str, ...] = ("quadratic", "relu")
    targets: tuple[str, ...] = ("low-rank", "high-rank")
    nets: int = 10


def decaying_parts(settings: Decaying, options: Options) -> list[Computation]:
    """One computation per target and seed."""

    def sweep(target: str, seed: int, recorder: Recorder) -> None:
        named = ("n", "d", "widths", "alphas", "activations", "nets")
        given: dict[str, Any] = {name: getattr(settings, name) for name in named}
        rows = decay_sweep(**given, targets=(target,), data_seeds=1, seed=seed)
        total = len(settings.alphas) * len(settings.activations) * len(settings.widths)
        for row in recorder.track(rows, total):
            recorder.record("decay", seed=seed, **row)

    return [
        Computation(f"{target}-seed-{seed}", partial(sweep, target, seed))
        for target, seed in product(settings.targets, settings.seeds)
    ]


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
