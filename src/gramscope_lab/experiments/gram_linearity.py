"""gram-fig4, gram-fig9 and gram-fig12: target linearity and its surrogate, layer by layer, over training.

A layer is measured at its input, so the features of hidden layer ℓ are those that layer ℓ + 1, or the readout, receives.

gram-fig4 trains by SGD, gram-fig9 by Adam. At the printed rate (5·10⁻⁴, momentum 0.8) the published accuracies look out of
reach, and Adam's rate is not given. So several settings are run together, and the table says which of them have the
published accuracies. Growth and shapes are judged at the first setting (with SGD the printed one) and at the one with the
highest training accuracy.

In gram-fig12 a fraction p of the training labels is random. The authors' code randomises the test labels too;
``--set noisy_test=true`` does as they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from gramscope.measures.linearity import target_linearity
from gramscope_lab.data import load
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.experiments.accuracy_curves import first_epoch
from gramscope_lab.experiments.experiment import (
    Claim,
    Computation,
    Experiment,
    Options,
    Part,
    Recorder,
    Results,
    Training,
    part_name,
    training_config,
)
from gramscope_lab.experiments.plots import PALETTE, Figure, band, curve, legend_below, listed, mean, panels, percent
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import DataTable, TrainConfig
from gramscope_lab.training.job import load_data

#: glob of the layers that see hidden features: all but ``hidden1``
ABOVE_INPUT = "*[!1]"
#: data set -> published training accuracy, test accuracy and last-layer target linearity
PUBLISHED = {"cifar10": (0.9, 0.5, 0.5), "cifar100": (0.9, 0.2, 0.15)}
PUBLISHED_EPOCHS = 100
#: inputs that are not scaled to [0, 1]
SCALES = {"cifar100": "signed"}


# -- hidden layers of fully connected nets ------------------------------------------------------------------------
def layers_config(settings: Any, options: Options, samples: int, **tables: Any) -> TrainConfig:
    """A training that evaluates both sets and measures the hidden layers every ``settings.every`` epochs."""
    names = ("target_linearity", "surrogate")
    measure = {"every": settings.every, "samples": samples, "names": names, "layers": ABOVE_INPUT}
    always = {"evaluate_train": True, "evaluate_every": settings.every, "measure": measure}
    return training_config(settings, options, **always, **tables)


def features_of(records: Sequence[Record], layer: int, depth: int) -> list[Record]:
    """Measurements of the features of hidden layer ``layer`` (from 1) of ``depth``."""
    name = "readout" if layer == depth else f"hidden{layer + 1}"
    return [r for r in records if r.get("layer") == name]


def over_training(records: Sequence[Record], key: str, layer: int, depth: int) -> tuple[list[float], list[float]]:
    """Epochs and means over seeds of a measure of one hidden layer."""
    return curve(features_of(records, layer, depth), "epoch", key)[:2]


def by_depth(records: Sequence[Record], key: str, depth: int, epoch: float) -> list[float]:
    """Means over seeds at one epoch, hidden layer by hidden layer."""
    at = [r for r in records if r["epoch"] == epoch]
    return [mean(r[key] for r in features_of(at, layer, depth)) for layer in range(1, depth + 1)]


def draw_layers(axes: Any, records: Sequence[Record], key: str, depth: int) -> None:
    """One curve per hidden layer."""
    for layer in range(1, depth + 1):
        band(axes, features_of(records, layer, depth), "epoch", key, index=layer - 1, label=f"layer {layer}")


def draw_accuracies(axes: Any, records: Sequence[Record], factor: float = 1.0) -> None:
    """Training and test accuracy, in colours that no layer has."""
    for index, part in enumerate(("train", "test")):
        scaled = [{**r, "shown": factor * r[f"{part}_accuracy"]} for r in records]
        band(axes, scaled, "epoch", "shown", index=index, color=PALETTE[6 - 2 * index], label=part)


def half_rise(epochs: list[float], values: list[float]) -> float:
    """The epoch by which half of a rise is done."""
    return first_epoch(epochs, values, values[0] + 0.5 * (max(values) - values[0]))


# -- gram-fig4 and gram-fig9 --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    """[Gram] §4.3: four hidden layers of 256. Every rate of ``lrs`` with every one of ``momenta`` (SGD) is a setting."""

    seeds: tuple[int, ...] = (0, 1, 2)
    data: tuple[str, ...] = ("cifar10", "cifar100")
    method: str = "sgd"
    lrs: tuple[float, ...] = (0.0005, 0.005)
    momenta: tuple[float, ...] = (0.8, 0.95)
    hidden: tuple[int, ...] = (256, 256, 256, 256)
    batch_size: int = 64
    epochs: float = 100.0
    every: float = 1.0
    samples: int = 10_000


def _sweep(settings: Settings) -> dict[str, tuple[float, ...]]:
    return {"lr": settings.lrs} | ({"momentum": settings.momenta} if settings.method == "sgd" else {})


def parts(settings: Settings, options: Options) -> list[Part]:
    """One training per data set, with all seeds and settings, and the target linearity of its inputs."""
    found: list[Part] = []
    for data in settings.data:
        scale = {"scale": SCALES[data]} if data in SCALES else {}
        config = layers_config(
            settings,
            options,
            settings.samples,
            data={"name": data, **scale},
            model={"name": "mlp", "hidden": settings.hidden},
            method={"name": settings.method},
            sweep=_sweep(settings),
        )
        inputs = partial(_inputs, data, options.data_dir or None, scale, settings.samples)
        found += [Computation(part_name("input", data), inputs), Training(part_name(settings.method, data), config)]
    return found


def _inputs(name: str, folder: str | None, scale: dict[str, Any], samples: int, recorder: Recorder) -> None:
    data = load(name, folder, **scale).flat()
    n = min(samples, len(data.x_train))
    chosen = data.subset(n)
    recorder.record(
        "input", data=name, target_linearity=float(target_linearity(chosen.x_train, chosen.y_train)), samples=n
    )


@dataclass(frozen=True)
class _Run:
    """All seeds of one setting on one data set."""

    data: str
    text: str
    measured: list[Record]
    evaluated: list[Record]

    @property
    def end(self) -> float:
        """The last epoch."""
        return float(max(r["epoch"] for r in self.evaluated))

    def last(self, key: str) -> float:
        """Mean over seeds of an evaluation at the end."""
        return mean(r[key] for r in self.evaluated if r["epoch"] == self.end)

    @property
    def untrained(self) -> str:
        train = self.last("train_accuracy")
        return f"hardly trained: {percent(train)} on the training set" if train < 0.4 else ""


def _runs(results: Results[Settings]) -> list[_Run]:
    """Every setting on every data set."""
    s = results.settings
    sweep = _sweep(s)
    found = []
    for data, values in product(s.data, product(*sweep.values())):
        setting = dict(zip(sweep, values, strict=True))
        part = part_name(s.method, data)
        kinds = (results.records(kind, part=part, **setting) for kind in ("measurement", "evaluation"))
        found.append(_Run(data, listed("{} {:g}", setting, values), *kinds))
    return found


def _judged(results: Results[Settings]) -> list[_Run]:
    """For each data set the first setting and the one with the highest training accuracy."""
    found = []
    for data in results.settings.data:
        runs = [run for run in _runs(results) if run.data == data]
        best = max(runs, key=lambda run: run.last("train_accuracy"))
        found += [runs[0]] if best is runs[0] else [runs[0], best]
    return found


def grow(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 4: TL and surrogate grow with training and with depth."""
    depth = len(results.settings.hidden)
    for run in _judged(results):
        for key, name, form in (("target_linearity", "TL", "{:.2f}"), ("surrogate", "surrogate", "{:.1e}")):
            first, last = (by_depth(run.measured, key, depth, epoch) for epoch in (0.0, run.end))
            yield Claim(
                f"{run.data}, {run.text}: {name} grows with training in every layer",
                "grows throughout training",
                listed(f"{form} → {form}", first, last),
                all(a < b for a, b in zip(first, last, strict=True)),
                run.untrained,
            )
            yield Claim(
                f"{run.data}, {run.text}: at the end {name} grows with depth",
                "increases with the layer",
                listed(form, last),
                all(a < b for a, b in pairwise(last)),
                run.untrained,
            )


def shapes(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] §4.3: the surrogate grows roughly exponentially, TL roughly logarithmically."""
    depth = len(results.settings.hidden)
    for run in _judged(results):
        epochs, linearity = over_training(run.measured, "target_linearity", depth, depth)
        logarithms = [math.log(value) for value in over_training(run.measured, "surrogate", depth, depth)[1]]
        surrogates = [math.exp(value) for value in logarithms]
        late = [math.log(epoch) for epoch in epochs[1:]]
        fits = (
            ("TL follows log(epoch) better than the epoch", "roughly logarithmic",
             determination(late, linearity[1:]), determination(epochs[1:], linearity[1:])),
            ("the surrogate follows exp(epoch) better than the epoch", "roughly exponential",
             determination(epochs, logarithms), determination(epochs, surrogates)),
            ("TL follows log(surrogate) better than the surrogate", "consistent with Theorem 2",
             determination(logarithms, linearity), determination(surrogates, linearity)),
        )  # fmt: skip
        for claim, published, better, worse in fits:
            measured = f"R² {better:.2f} and {worse:.2f}"
            yield Claim(
                f"{run.data}, {run.text}: last layer, {claim}", published, measured, better > worse, run.untrained
            )


def determination(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of the straight line through the points."""
    mx, my = mean(x), mean(y)
    xx, yy = (sum((v - m) ** 2 for v in values) for values, m in ((x, mx), (y, my)))
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy**2 / (xx * yy) if xx and yy else 0.0


def accuracies(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] §4.3: training and test accuracy, last-layer TL, of every setting."""
    depth = len(results.settings.hidden)
    for run in _runs(results):
        train, test = (run.last(f"{part}_accuracy") for part in ("train", "test"))
        linearity = by_depth(run.measured, "target_linearity", depth, run.end)[-1]
        measured = f"train {percent(train)}, test {percent(test)}, TL {linearity:.2f}"
        claim = f"{run.data}, {run.text}: accuracies and last-layer TL after {run.end:g} epochs"
        if run.data not in PUBLISHED:
            yield Claim(claim, "of CIFAR-10 and CIFAR-100 alone", measured, None, "nothing published to compare")
            continue
        known = PUBLISHED[run.data]
        published = f"train > {known[0]:.0%}, test > {known[1]:.0%}, TL > {known[2]}"
        holds = all(value > wanted for value, wanted in zip((train, test, linearity), known, strict=True))
        early = f"published after {PUBLISHED_EPOCHS} epochs" if not holds and run.end < PUBLISHED_EPOCHS else ""
        yield Claim(claim, published, measured, None if early else holds, early)


def figure(results: Results[Settings]) -> Figure:
    """A row for each data set and setting: surrogate, target linearity, accuracies."""
    runs = _runs(results)
    depth = len(results.settings.hidden)
    page, axes = panels(len(runs), 3, width=2.6, height=2.0, sharex=True)
    for row, run in zip(axes, runs, strict=True):
        logarithms = [{**r, "log": math.log10(r["surrogate"])} for r in run.measured]
        draw_layers(row[0], logarithms, "log", depth)
        row[0].set_ylabel(f"{run.data}, {results.settings.method}\n{run.text}")
        draw_layers(row[1], run.measured, "target_linearity", depth)
        (inputs,) = results.records("input", data=run.data)
        row[1].axhline(inputs["target_linearity"], color="grey", linestyle=":", label="input")
        row[1].set_ylim(0, 1)
        draw_accuracies(row[2], run.evaluated, 100)
        row[2].set_ylim(0, 102)
        row[2].legend(loc="lower right")
    surrogate = r"$\log_{10}$ surrogate $\mathrm{tr}(Y^\top H H^\top Y)$"
    for place, title in zip(axes[0], (surrogate, "target linearity", "accuracy (%)"), strict=True):
        place.set_title(title)
    for place in axes[-1]:
        place.set_xlabel("epoch")
    legend_below(page, axes[0, 1])
    return page


_QUICK = Settings((0, 1), ("digits",), lrs=(0.02,), hidden=(64,) * 4, epochs=60.0, samples=2000)
_CLAIMS = (accuracies, grow, shapes)
FIG4 = Experiment(_QUICK, Settings(), parts, _CLAIMS, figure, classes=True)
FIG9 = Experiment(
    replace(_QUICK, method="adam", lrs=(0.0003, 0.001)),
    Settings(method="adam", lrs=(0.0001, 0.001)),
    parts,
    _CLAIMS,
    figure,
    classes=True,
)


# -- gram-fig12: random labels ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Noisy:
    """[Gram] B.8: three hidden layers of 256, labels of a fraction p drawn at random."""

    seeds: tuple[int, ...] = (0,)
    data: tuple[str, ...] = ("cifar10",)
    fractions: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    hidden: tuple[int, ...] = (256, 256, 256)
    lr: float = 0.005
    momentum: float = 0.95
    batch_size: int = 64
    epochs: float = 200.0
    every: float = 2.0
    samples: int = 10_000
    noisy_test: bool = False


def noisy_parts(settings: Noisy, options: Options) -> list[Training]:
    """One training for each data set and fraction."""
    found = []
    for data, fraction in product(settings.data, settings.fractions):
        config = layers_config(
            settings,
            options,
            settings.samples,
            data={"name": data, "label_noise": fraction},
            model={"name": "mlp", "hidden": settings.hidden},
            method={"name": "sgd", "lr": settings.lr, "momentum": settings.momentum},
        )
        given = _with_noisy_test(config.data) if settings.noisy_test else None
        found.append(Training(_part(data, fraction), config, data=given))
    return found


def _part(data: str, fraction: float) -> str:
    return part_name(f"p-{fraction:g}", data)


def _with_noisy_test(table: DataTable) -> Callable[[], DataSet]:
    def given() -> DataSet:
        data = load_data(table.model_copy(update={"label_noise": 0.0}))  # training gives its own samples their noise
        return replace(data, y_test=data.with_label_noise(table.label_noise, table.seed, test=True).y_test)

    return given


def _final(results: Results[Noisy], data: str, fraction: float) -> tuple[float, float, float]:
    """Training accuracy, test accuracy, and TL of the last hidden layer at the end."""
    part = _part(data, fraction)
    train, test = (curve(results.records("evaluation", part=part), "epoch", f"{k}_accuracy") for k in ("train", "test"))
    depth = len(results.settings.hidden)
    linearity = by_depth(results.records("measurement", part=part), "target_linearity", depth, train[0][-1])
    return train[1][-1], test[1][-1], linearity[-1]


def falls(results: Results[Noisy]) -> Iterator[Claim]:
    """[Gram] Fig. 12: with p the last layer's TL falls and the generalisation gap grows."""
    fractions = results.settings.fractions
    for data in results.settings.data:
        train, test, last = zip(*(_final(results, data, p) for p in fractions), strict=True)
        gaps = [a - b for a, b in zip(train, test, strict=True)]
        yield Claim(
            f"{data}: TL of the last layer is lower at p {fractions[-1]:g} than at p {fractions[0]:g}, by over 0.05",
            "falls with p, constant at high p",
            listed("p {:g}: {:.2f}", fractions, last),
            last[-1] < last[0] - 0.05,
        )
        yield Claim(
            f"{data}: train − test accuracy grows with p (by no less than −0.02 a step, by over 0.1 in all)",
            "grows",
            listed("p {:g}: {:.2f} − {:.2f}", fractions, train, test),
            all(b > a - 0.02 for a, b in pairwise(gaps)) and gaps[-1] > gaps[0] + 0.1,
        )


def late(results: Results[Noisy]) -> Iterator[Claim]:
    """[Gram] B.8: at high p the middle layers' TL rises late, at low p early."""
    depth = len(results.settings.hidden)
    layer = max(1, depth - 1)
    for data in results.settings.data:
        measured = (
            results.records("measurement", part=_part(data, results.settings.fractions[end])) for end in (0, -1)
        )
        early, half = (half_rise(*over_training(records, "target_linearity", layer, depth)) for records in measured)
        yield Claim(
            f"{data}: layer {layer} has half its rise in TL later at the highest p than without noise",
            "sudden late increase at high p",
            f"epoch {half:g} and {early:g}",
            half > early,
        )


def noisy_figure(results: Results[Noisy]) -> Figure:
    """A column per fraction: target linearity of the hidden layers above, accuracies below."""
    settings = results.settings
    data = settings.data[0]
    page, axes = panels(2, len(settings.fractions), width=1.9, height=1.8, sharex=True, sharey="row")
    for column, fraction in zip(axes.T, settings.fractions, strict=True):
        part = _part(data, fraction)
        draw_layers(column[0], results.records("measurement", part=part), "target_linearity", len(settings.hidden))
        draw_accuracies(column[1], results.records("evaluation", part=part))
        column[0].set_title(f"{data}, p = {fraction:g}")
        column[1].set_xlabel("epoch")
        column[1].set_ylim(0, 1.03)
    axes[0, 0].set_ylabel("target linearity")
    axes[1, 0].set_ylabel("accuracy")
    axes[1, 0].legend(loc="center right")
    legend_below(page, axes[0, 0])
    return page


FIG12 = Experiment(
    Noisy(
        data=("digits",), fractions=(0.0, 0.5, 0.75, 1.0), hidden=(128, 128, 128), lr=0.03, epochs=150.0, every=3.0,
        samples=2000,
    ),
    Noisy(),
    noisy_parts,
    (falls, late),
    noisy_figure,
    classes=True,
)  # fmt: skip
