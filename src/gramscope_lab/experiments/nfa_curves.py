"""nfa-fig2, 4, 5, 7, 8: claims and figures over training, for several initialisation scales."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from gramscope_lab.experiments.experiment import Claim, Experiment, Results
from gramscope_lab.experiments.nfa_scales import CENTRED, LAYERS, PTK, RATIO, SPECTRA, VARIED, Settings, parts_measuring
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, mean, panels
from gramscope_lab.runs.records import Record

#: a training step counted as early
EARLY = 10


# -- claims -------------------------------------------------------------------------------------------------------
def _by_scale(results: Results[Settings], key: str, step: int, **match: Any) -> list[float]:
    """Means over seeds at one step, in the order of the scales."""
    found = results.records("nfa", step=step, **match)
    return [
        mean(r[key] for r in found if r["scale"] == scale and r[key] is not None) for scale in results.settings.scales
    ]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


def _width(values: list[float]) -> float:
    return max(values) - min(values)


def early(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] §2.3: early in training the C-NFA is high and does not depend on the scale."""
    for varied in results.settings.varied:
        values = [_by_scale(results, "centered", EARLY, varied=varied, layer=layer) for layer in LAYERS]
        yield Claim(
            f"C-NFA after {EARLY} steps above 0.7, scales within 0.1 of each other ({VARIED[varied][1]})",
            "especially high and invariant to scale early",
            ", ".join(f"layer {layer}: {_range(found)}" for layer, found in zip(LAYERS, values, strict=True)),
            all(_alike(found) for found in values),
            _why(results, varied, values),
        )


def _alike(values: list[float]) -> bool:
    return min(values) > 0.7 and _width(values) < 0.1


def _why(results: Results[Settings], varied: str, values: list[list[float]]) -> str:
    """Why the early claim fails: a low level, or scales at which the training loss rises at first."""
    scales = results.settings.scales
    start = {(r["scale"], r["seed"]): r["train_loss"] for r in results.records("nfa", varied=varied, layer=1, step=0)}
    risen = {
        r["scale"]
        for r in results.records("nfa", varied=varied, layer=1)
        if r["train_loss"] > 1.05 * start[r["scale"], r["seed"]]
    }
    if not risen:
        low = min(map(min, values))
        return f"the scales agree, at a level of {low:.2f}" if low <= 0.7 and max(map(_width, values)) < 0.1 else ""
    kept = [[v for v, scale in zip(found, scales, strict=True) if scale not in risen] for found in values]
    without = f"; without it {', '.join(map(_range, kept))}" if all(kept) else ""
    named = ", ".join(f"{scale:g}" for scale in sorted(risen))
    return f"at scale {named} the loss rises at first: step size {results.settings.lr:g} is at the stability limit{without}"


def throughout(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] §2.3: the C-NFA remains high through training at every scale."""
    for varied in results.settings.varied:
        lowest = []
        for layer in LAYERS:
            found = (results.records("nfa", varied=varied, layer=layer, scale=s) for s in results.settings.scales)
            lowest.append(min(min(curve(records, "step", "centered")[1]) for records in found))
        yield Claim(
            f"C-NFA above 0.5 at every step and scale ({VARIED[varied][1]})",
            "remains high throughout training",
            f"lowest: layer 1: {lowest[0]:.2f}, layer 2: {lowest[1]:.2f}",
            min(lowest) > 0.5,
        )


def final(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] §2.3, Appendix G: the final UC-NFA can depend strongly on the scale, e.g. in layer 2; the C-NFA less."""
    for varied in results.settings.varied:
        for layer in LAYERS:
            uncentred, centred = (
                _by_scale(results, key, results.settings.steps, varied=varied, layer=layer)
                for key in ("uncentered", "centered")
            )
            holds = _width(uncentred) > max(0.2, _width(centred))
            reason = ""
            if not holds and _width(uncentred) > 0.2:
                reason = "the C-NFA depends on the scale as much"
            elif not holds:
                reason = "the UC-NFA depends little on the scale here"
                if (varied, layer) == ("first", 2):
                    reason += "; layer 2 starts at scale 1 and hardly moves, vary its scale too"
            yield Claim(
                f"final UC-NFA varies by more than 0.2 over scales and more than C-NFA "
                f"(layer {layer}, {VARIED[varied][1]})",
                "UC-NFA sensitive, extremely in layer 2; C-NFA robust",
                f"UC {_range(uncentred)}, C {_range(centred)}",
                holds,
                reason,
            )


def test_loss(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Appendix G: small initialisation generalises better."""
    for varied in results.settings.varied:
        scales = results.settings.scales
        small, *_, large = _by_scale(results, "test_loss", results.settings.steps, varied=varied, layer=1)
        train = _by_scale(results, "train_loss", results.settings.steps, varied=varied, layer=1)[0]
        reason = f"train loss at scale {scales[0]:g} is still {train:.2f}" if train > 0.1 else ""
        yield Claim(
            f"final test loss is lower at scale {scales[0]:g} than at {scales[-1]:g} ({VARIED[varied][1]})",
            "test loss improves for smaller initialisation",
            f"{small:.2f}, {large:.2f}",
            small < large,
            reason,
        )


def ratio_early(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Appendix B: the double-centred part contributes little early."""
    for layer in LAYERS:
        values = _by_scale(results, "ratio", EARLY, layer=layer)
        text = f"double-centred share after {EARLY} steps below 0.25 at every scale (layer {layer})"
        yield Claim(text, "not significant early", _range(values), max(values) < 0.25)


def ratio_large(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Appendix B: and little at large initialisation, but more over longer training at small initialisation."""
    for layer in LAYERS:
        values = _by_scale(results, "ratio", results.settings.steps, layer=layer)
        scales = results.settings.scales
        yield Claim(
            f"final share smaller at the largest scale than at the smallest (layer {layer})",
            "small at large initialisation, relevant later",
            f"{values[-1]:.2f} at {scales[-1]:g}, {values[0]:.2f} at {scales[0]:g}",
            values[-1] < values[0],
        )


def ptk_falls(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Appendix B: the PTK-centred NFA decreases through training."""
    for spectrum in results.settings.spectra:
        for layer in LAYERS:
            first = _by_scale(results, "ptk", results.settings.every, spectrum=spectrum, layer=layer)
            last = _by_scale(results, "ptk", results.settings.steps, spectrum=spectrum, layer=layer)
            risen = [
                f"{scale:g} ({a:.2f} → {b:.2f})"
                for scale, a, b in zip(results.settings.scales, first, last, strict=True)
                if b >= a
            ]
            reason = f"it rises at scale {', '.join(risen)}" if risen else ""
            yield Claim(
                f"PTK-centred NFA falls at every scale (layer {layer}, {spectrum})",
                "decreases through training",
                f"from {_range(first)} to {_range(last)}",
                not risen,
                reason,
            )


# -- figures ------------------------------------------------------------------------------------------------------
def _draw(axes: Any, results: Results[Settings], key: str, title: str, records: list[Record]) -> None:
    for index, scale in enumerate(results.settings.scales):
        band(axes, [r for r in records if r["scale"] == scale], "step", key, index=index, label=f"s = {scale:g}")
    axes.set_title(title)
    axes.set_xscale("symlog", linthresh=results.settings.every)
    axes.set_xlim(0, results.settings.steps)
    axes.set_xticks([0, 10, 100, results.settings.steps], ["0", "10", "100", str(results.settings.steps)])
    axes.minorticks_off()


def curves_figure(results: Results[Settings]) -> Figure:
    """UC-NFA and C-NFA of both layers, losses relative to a seed's largest; a row for each choice of varied layers."""
    columns = [(f"{kind}-NFA, layer {layer}", key, layer) for layer in LAYERS for kind, key in _KINDS]
    page, axes = panels(len(results.settings.varied), 6, width=2.0, sharex=True)
    for row, varied in zip(axes, results.settings.varied, strict=True):
        records = results.records("nfa", varied=varied)
        for place, (title, key, layer) in zip(row, columns, strict=False):
            _draw(place, results, key, title, [r for r in records if r["layer"] == layer])
            place.set_ylim(0, 1.02)
        for place, (title, key) in zip(
            row[4:], (("train loss", "train_loss"), ("test loss", "test_loss")), strict=True
        ):
            top = {seed: max(r[key] for r in records if r["seed"] == seed) for seed in results.settings.seeds}
            scaled = [{**r, key: r[key] / top[r["seed"]]} for r in records if r["layer"] == 1]
            _draw(place, results, key, f"{title} / largest", scaled)
            place.set_ylim(0, 1.02)
        row[0].set_ylabel(VARIED[varied][1].replace("varied", "\nvaried"))
    for place in axes[-1]:
        place.set_xlabel("gradient steps")
    legend_below(page, axes[0, 0], f"initialisation scale, inputs {SPECTRA[results.settings.spectra[0]][1]}")
    return page


_KINDS = (("UC", "uncentered"), ("C", "centered"))


def layers_figure(key: str, label: str, results: Results[Settings]) -> Figure:
    """One value over training, a panel for each spectrum and layer."""
    page, axes = panels(1, 2 * len(results.settings.spectra), width=2.4, height=2.2, sharey=True)
    for index, spectrum in enumerate(results.settings.spectra):
        for layer in LAYERS:
            place = axes[0, 2 * index + layer - 1]
            records = results.records("nfa", spectrum=spectrum, layer=layer)
            _draw(place, results, key, f"layer {layer}, {SPECTRA[spectrum][1]}", records)
            place.set_ylim(0, 1.02)
            place.set_xlabel("gradient steps")
    axes[0, 0].set_ylabel(label)
    legend_below(page, axes[0, 0], "initialisation scale", columns=3 * len(results.settings.spectra))
    return page


# -- experiments --------------------------------------------------------------------------------------------------
def _curves(spectrum: str) -> Experiment[Settings]:
    both = ("first", "hidden")
    return Experiment(
        Settings((0, 1, 2, 3), (spectrum,), both, (0.01, 0.1, 1.0), width=128),
        Settings(spectra=(spectrum,), varied=both),
        partial(parts_measuring, CENTRED),
        (early, throughout, final, test_loss),
        curves_figure,
    )


FIG2 = _curves("isotropic")
FIG7 = _curves("decay-1")
FIG8 = _curves("decay-2")
FIG4 = Experiment(
    Settings((0, 1, 2, 3), scales=(0.01, 0.1, 1.0), width=128),
    Settings(),
    partial(parts_measuring, RATIO),
    (ratio_early, ratio_large),
    partial(layers_figure, "ratio", "double-centred / centred"),
)
FIG5 = Experiment(
    Settings((0, 1, 2, 3), ("isotropic", "decay-2"), scales=(0.01, 0.1, 1.0), width=128),
    Settings(spectra=("isotropic", "decay-2")),
    partial(parts_measuring, PTK),
    (ptk_falls,),
    partial(layers_figure, "ptk", "PTK-centred NFA"),
)
