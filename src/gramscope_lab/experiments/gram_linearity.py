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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from gramscope.measures.linearity import target_linearity
from gramscope_lab.data import load
from gramscope_lab.data.dataset import DataSet, generator
from gramscope_lab.data.synthetic import randomise_labels
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
from gramscope_lab.experiments.plots import (
    PALETTE,
    Figure,
    Line,
    band,
    curve,
    legend_below,
    listed,
    mean,
    panels,
    percent,
)
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


@dataclass(frozen=True)
class LayerRun:
    """All seeds of one setting of a net with ``depth`` hidden layers, counted from 1."""

    name: str
    depth: int
    evaluated: list[Record]
    measured: list[Record]

    def accuracy(self, part: str) -> Line:
        """Accuracy on the training or test set."""
        return curve(self.evaluated, "epoch", f"{part}_accuracy")

    def features(self, layer: int) -> list[Record]:
        """Measurements of the features of a hidden layer."""
        name = "readout" if layer == self.depth else f"hidden{layer + 1}"
        return [r for r in self.measured if r["layer"] == name]

    def line(self, layer: int, key: str = "target_linearity") -> Line:
        """A measure of one hidden layer over epochs."""
        return curve(self.features(layer), "epoch", key)

    def draw_layers(self, axes: Any, key: str = "target_linearity") -> None:
        """One curve per hidden layer."""
        for layer in range(1, self.depth + 1):
            band(axes, self.features(layer), "epoch", key, index=layer - 1, label=f"layer {layer}")

    def draw_accuracies(self, axes: Any) -> None:
        """Training and test accuracy, in colours that no layer has."""
        for index, part in enumerate(("train", "test")):
            key = f"{part}_accuracy"
            band(axes, self.evaluated, "epoch", key, index=index, color=PALETTE[6 - 2 * index], label=part)


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


def _runs(results: Results[Settings]) -> dict[str, list[LayerRun]]:
    """Every setting, for each data set."""
    s, sweep = results.settings, _sweep(results.settings)
    found: dict[str, list[LayerRun]] = {data: [] for data in s.data}
    for data, values in product(s.data, product(*sweep.values())):
        match: dict[str, Any] = {"part": part_name(s.method, data), **dict(zip(sweep, values, strict=True))}
        kinds = (results.records(kind, **match) for kind in ("evaluation", "measurement"))
        found[data].append(LayerRun(f"{data}, {listed('{} {:g}', sweep, values)}", len(s.hidden), *kinds))
    return found


def _judged(results: Results[Settings]) -> list[tuple[LayerRun, str]]:
    """For each data set the first setting and the one with the highest training accuracy; and if they hardly trained."""
    found = []
    for first, *others in _runs(results).values():
        best = max((first, *others), key=lambda run: run.accuracy("train").final)
        found += [first] if best is first else [first, best]
    ends = [(run, run.accuracy("train").final) for run in found]
    return [(run, f"hardly trained: {percent(end)} on the training set" if end < 0.4 else "") for run, end in ends]


def grow(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 4: TL and surrogate grow with training and with depth."""
    for run, untrained in _judged(results):
        for key, name, form in (("target_linearity", "TL", "{:.2f}"), ("surrogate", "surrogate", "{:.1e}")):
            lines = [run.line(layer, key).means for layer in range(1, run.depth + 1)]
            first, last = [values[0] for values in lines], [values[-1] for values in lines]
            yield Claim(
                f"{run.name}: {name} grows with training in every layer",
                "grows throughout training",
                listed(f"{form} → {form}", first, last),
                all(a < b for a, b in zip(first, last, strict=True)),
                untrained,
            )
            yield Claim(
                f"{run.name}: at the end {name} grows with depth",
                "increases with the layer",
                listed(form, last),
                all(a < b for a, b in pairwise(last)),
                untrained,
            )


def shapes(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] §4.3: the surrogate grows roughly exponentially, TL roughly logarithmically."""
    for run, untrained in _judged(results):
        epochs, linearity, _ = run.line(run.depth)
        logarithms = [math.log(value) for value in run.line(run.depth, "surrogate").means]
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
            yield Claim(f"{run.name}: last layer, {claim}", published, measured, better > worse, untrained)


def determination(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of the straight line through the points."""
    mx, my = mean(x), mean(y)
    xx, yy = (sum((v - m) ** 2 for v in values) for values, m in ((x, mx), (y, my)))
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy**2 / (xx * yy) if xx and yy else 0.0


def accuracies(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] §4.3: training and test accuracy, last-layer TL, of every setting."""
    for data, run in ((data, run) for data, runs in _runs(results).items() for run in runs):
        end = run.accuracy("train").x[-1]
        train, test = (run.accuracy(part).final for part in ("train", "test"))
        linearity = run.line(run.depth).final
        measured = f"train {percent(train)}, test {percent(test)}, TL {linearity:.2f}"
        claim = f"{run.name}: accuracies and last-layer TL after {end:g} epochs"
        if data not in PUBLISHED:
            yield Claim(claim, "of CIFAR-10 and CIFAR-100 alone", measured, None, "nothing published to compare")
            continue
        known = PUBLISHED[data]
        published = f"train > {known[0]:.0%}, test > {known[1]:.0%}, TL > {known[2]}"
        holds = all(value > wanted for value, wanted in zip((train, test, linearity), known, strict=True))
        early = f"published after {PUBLISHED_EPOCHS} epochs" if not holds and end < PUBLISHED_EPOCHS else ""
        yield Claim(claim, published, measured, None if early else holds, early)


def figure(results: Results[Settings]) -> Figure:
    """A row for each data set and setting: surrogate, target linearity, accuracies."""
    runs = [(data, run) for data, found in _runs(results).items() for run in found]
    page, axes = panels(len(runs), 3, width=2.6, height=2.0, sharex=True)
    for row, (data, run) in zip(axes, runs, strict=True):
        run.draw_layers(row[0], "surrogate")
        row[0].set_yscale("log")
        row[0].set_ylabel(run.name.replace(",", f", {results.settings.method}\n", 1))
        run.draw_layers(row[1])
        (inputs,) = results.records("input", data=data)
        row[1].axhline(inputs["target_linearity"], color="grey", linestyle=":", label="input")
        row[1].set_ylim(0, 1)
        run.draw_accuracies(row[2])
        row[2].set_ylim(0, 1.02)
        row[2].legend(loc="lower right")
    titles = (r"surrogate $\mathrm{tr}(Y^\top H H^\top Y)$", "target linearity", "accuracy")
    for place, title in zip(axes[0], titles, strict=True):
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
        given = partial(_with_noisy_test, config.data) if settings.noisy_test else None
        found.append(Training(_part(data, fraction), config, data=given))
    return found


def _part(data: str, fraction: float) -> str:
    return part_name(f"p-{fraction:g}", data)


def _with_noisy_test(table: DataTable) -> DataSet:
    data = load_data(table.model_copy(update={"label_noise": 0.0}))  # training gives its own samples their noise
    source = generator(table.seed, "label noise", "test")
    return replace(data, y_test=randomise_labels(data.y_test, table.label_noise, data.outputs, source))


def _noisy_runs(results: Results[Noisy], data: str) -> list[LayerRun]:
    """A run for each fraction."""
    s = results.settings
    kinds = ("evaluation", "measurement")
    runs = ((p, [results.records(kind, part=_part(data, p)) for kind in kinds]) for p in s.fractions)
    return [LayerRun(f"{data}, p = {p:g}", len(s.hidden), *records) for p, records in runs]


def falls(results: Results[Noisy]) -> Iterator[Claim]:
    """[Gram] Fig. 12: with p the last layer's TL falls and the generalisation gap grows."""
    fractions = results.settings.fractions
    for data in results.settings.data:
        runs = _noisy_runs(results, data)
        train, test = ([run.accuracy(part).final for run in runs] for part in ("train", "test"))
        last = [run.line(run.depth).final for run in runs]
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
    layer = max(1, len(results.settings.hidden) - 1)
    for data in results.settings.data:
        clean, *_, noisy = (run.line(layer) for run in _noisy_runs(results, data))
        early, half = (line.reaches((line.means[0] + max(line.means)) / 2) for line in (clean, noisy))
        yield Claim(
            f"{data}: layer {layer} has half its rise in TL later at the highest p than without noise",
            "sudden late increase at high p",
            f"epoch {half:g} and {early:g}",
            half > early,
        )


def noisy_figure(results: Results[Noisy]) -> Figure:
    """A column per fraction: target linearity of the hidden layers above, accuracies below."""
    runs = _noisy_runs(results, results.settings.data[0])
    page, axes = panels(2, len(runs), width=1.9, height=1.8, sharex=True, sharey="row")
    for column, run in zip(axes.T, runs, strict=True):
        run.draw_layers(column[0])
        run.draw_accuracies(column[1])
        column[0].set_title(run.name)
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
