"""nfa-fig2, 4, 5, 7, 8: forms of the neural feature ansatz over training, for several initialisation scales.

The caption of [NFA] Fig. 2 varies the scale of the first layer alone. Its remark that the second layer's UC-NFA is extremely
sensitive to the scale shows only when both hidden layers are scaled, so both can be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, SupportsFloat

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.measures.alignment import double_centered_ratio, nfa
from gramscope.theory.montecarlo import apply_mlp
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, Training, training_config
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, listed, mean, panels
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, build_model

#: name of a spectrum of the inputs -> α in λ_k = 1/(1+k^α), and how it is written
SPECTRA: dict[str, tuple[float | None, str]] = {
    "isotropic": (None, "isotropic"),
    "decay-1": (1.0, r"$\lambda_k \sim 1/(1+k)$"),
    "decay-2": (2.0, r"$\lambda_k \sim 1/(1+k^2)$"),
}
#: which layers' scale varies -> their number, and how it is written
VARIED = {"first": (1, "scale of layer 1 varied"), "hidden": (2, "scale of layers 1 and 2 varied")}
LAYERS = (1, 2)
#: a training step counted as early
EARLY = 10


@dataclass(frozen=True)
class Settings:
    """[NFA] Appendix H: 2 hidden ReLU layers of 256, d 32, n 256, step size 0.05, 800 steps. It gives no scales."""

    seeds: tuple[int, ...] = (0, 1, 2)
    spectra: tuple[str, ...] = ("isotropic",)
    varied: tuple[str, ...] = ("first",)
    scales: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    n: int = 256
    d: int = 32
    rank: int = 5
    width: int = 256
    lr: float = 0.05
    steps: int = 800
    every: int = 5


#: values of one layer of one net, from weights now and at the start, K, and K̄ where it is needed
Measures = dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], SupportsFloat]]
CENTRED: Measures = {
    "uncentered": lambda w, w0, k, _: nfa(w, k),
    "centered": lambda w, w0, k, _: nfa(w, k, w0, kind="centered"),
}
RATIO: Measures = {"ratio": lambda w, w0, k, centred: double_centered_ratio(w, k, w0, centred)}
PTK: Measures = {"ptk": lambda w, w0, k, centred: nfa(w, k, w0, centred, kind="ptk")}


def chain_config(settings: Any, options: Options, seed: int, alpha: float | None = None, **tables: Any) -> TrainConfig:
    """Full-batch descent of a bias-free ReLU net on chain monomials of its own draw ([NFA] §2), on the loss ½(f − y)²."""
    decay = {} if alpha is None else {"alpha": alpha}
    sizes = {"n_train": settings.n, "n_test": 1000, "d": settings.d, "rank": settings.rank}
    net = {"hidden": (settings.width,) * len(LAYERS), "activation": "relu", "bias": False, "init": "normal"}
    return training_config(
        settings,
        options,
        seeds=[seed],
        epochs=settings.steps,
        batch_size=0,
        evaluate_every=settings.steps,
        loss="half-squared",
        data={"name": "chain-monomial", "seed": seed, **sizes, **decay},
        method={"name": "sgd", "lr": settings.lr},
        **{**tables, "model": {"name": "mlp", **net, **tables.get("model", {})}},
    )


def _parts(measures: Measures, settings: Settings, options: Options) -> list[Training]:
    """One training for each spectrum, choice of varied layers and seed, with all scales."""
    for key, known in (("spectra", SPECTRA), ("varied", VARIED)):
        given = list(getattr(settings, key))
        if not set(given) <= set(known):
            raise InputError(f"{key} = {given}: choose of {', '.join(known)}")
    if min(settings.scales) <= 0:
        raise InputError(f"scales = {list(settings.scales)}: must be above zero")
    found = []
    for spectrum, varied, seed in product(settings.spectra, settings.varied, settings.seeds):
        count = VARIED[varied][0]
        scales = [[scale] * count + [1.0] * (len(LAYERS) + 1 - count) for scale in settings.scales]
        sweep, cadence = {"model.init_scale": scales}, {"every": settings.every}
        config = chain_config(settings, options, seed, SPECTRA[spectrum][0], sweep=sweep, measure=cadence)
        labels = {"spectrum": spectrum, "varied": varied}
        found.append(Training(f"{spectrum}-{varied}-seed-{seed}", config, measure=partial(_measure, measures, labels)))
    return found


def _measure(
    measures: Measures, labels: dict[str, str], model: nn.Module, job: Job, step: int
) -> Iterator[dict[str, Any]]:
    """Both layers of a net now, beside its start; K and K̄ are means of JᵀJ over the training set."""
    config, data = job.config, job.data
    start = build_model(config.model, config.seed, data.input_shape, 1).to(job.device)
    x, x_test = data.x_train.double(), data.x_test.double()
    w, w0 = ([p.detach().double() for p in net.parameters()] for net in (model, start))
    now, first = apply_mlp(w, x), apply_mlp(w0, x)
    sets = {"train_loss": (now, data.y_train), "test_loss": (apply_mlp(w, x_test), data.y_test)}
    losses = {name: float((f.outputs - y.squeeze(-1)).square().mean()) for name, (f, y) in sets.items()}
    for layer, (j, j0) in enumerate(zip(now.tangents[:-1], first.tangents[:-1], strict=True), start=1):
        kernel, centred = (rows.mT @ rows / len(x) for rows in (j, j - j0))
        matrices = (w[layer - 1], w0[layer - 1], kernel, centred)
        found = {name: float(measure(*matrices)) for name, measure in measures.items()}
        yield {**labels, "scale": config.model.options["init_scale"][0], "layer": layer, **losses, **found}


# -- claims -------------------------------------------------------------------------------------------------------
def _by_scale(results: Results[Settings], key: str, step: int, **match: Any) -> list[float]:
    """Means over seeds at one step, in the order of the scales."""
    found = results.records("measurement", step=step, **match)
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
            listed("layer {}: {}", LAYERS, map(_range, values)),
            all(min(found) > 0.7 and _width(found) < 0.1 for found in values),
        )


def throughout(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] §2.3: the C-NFA remains high through training at every scale."""
    for varied in results.settings.varied:
        lowest = []
        for layer in LAYERS:
            found = (
                results.records("measurement", varied=varied, layer=layer, scale=s) for s in results.settings.scales
            )
            lowest.append(min(min(curve(records, "step", "centered")[1]) for records in found))
        yield Claim(
            f"C-NFA above 0.5 at every step and scale ({VARIED[varied][1]})",
            "remains high throughout training",
            "lowest: " + listed("layer {}: {:.2f}", LAYERS, lowest),
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
            yield Claim(
                f"final UC-NFA varies by more than 0.2 over scales and more than C-NFA "
                f"(layer {layer}, {VARIED[varied][1]})",
                "UC-NFA sensitive, extremely in layer 2; C-NFA robust",
                f"UC {_range(uncentred)}, C {_range(centred)}",
                holds,
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
        records = results.records("measurement", varied=varied)
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
            records = results.records("measurement", spectrum=spectrum, layer=layer)
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
        partial(_parts, CENTRED),
        (early, throughout, final, test_loss),
        curves_figure,
    )


FIG2 = _curves("isotropic")
FIG7 = _curves("decay-1")
FIG8 = _curves("decay-2")
FIG4 = Experiment(
    Settings((0, 1, 2, 3), scales=(0.01, 0.1, 1.0), width=128),
    Settings(),
    partial(_parts, RATIO),
    (ratio_early, ratio_large),
    partial(layers_figure, "ratio", "double-centred / centred"),
)
FIG5 = Experiment(
    Settings((0, 1, 2, 3), ("isotropic", "decay-2"), scales=(0.01, 0.1, 1.0), width=128),
    Settings(spectra=("isotropic", "decay-2")),
    partial(_parts, PTK),
    (ptk_falls,),
    partial(layers_figure, "ptk", "PTK-centred NFA"),
)
