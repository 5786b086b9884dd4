"""gram-fig4 and gram-fig9: target linearity and its surrogate, layer by layer, over training with SGD and with Adam.

At the printed rate (5·10⁻⁴, momentum 0.8) the published accuracies look out of reach, and Adam's rate is not given. So
several settings are run, and the table says which of them has the published accuracies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gramscope.data import load
from gramscope.experiments.comparing import part_name, percent
from gramscope.experiments.core import Claim, Computation, Experiment, Options, Part, Recorder, Results, Training
from gramscope.experiments.gram_layers import by_depth, determination, draw_layers, measure_table, over_training
from gramscope.experiments.plots import PALETTE, band, legend_below, mean, panels
from gramscope.measures.linearity import target_linearity
from gramscope.runs.records import Record
from gramscope.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: data set -> published training accuracy, test accuracy and last-layer target linearity
PUBLISHED = {"cifar10": (0.9, 0.5, 0.5), "cifar100": (0.9, 0.2, 0.15)}
#: inputs that are not scaled to [0, 1]
SCALES = {"cifar100": "signed"}


@dataclass(frozen=True)
class Settings:
    """003 §4.3: four hidden layers of 256. ``lrs`` and ``momenta`` go together, one setting each."""

    seeds: tuple[int, ...] = (0, 1, 2)
    data: tuple[str, ...] = ("cifar10",)
    method: str = "sgd"
    lrs: tuple[float, ...] = (0.0005, 0.005)
    momenta: tuple[float, ...] = (0.8, 0.95)
    hidden: tuple[int, ...] = (256, 256, 256, 256)
    batch_size: int = 64
    epochs: float = 100.0
    every: float = 1.0
    samples: int = 10_000


def _settings(settings: Settings) -> list[dict[str, Any]]:
    """Options of the method, one a setting."""
    if settings.method == "sgd":
        return [{"lr": lr, "momentum": momentum} for lr, momentum in zip(settings.lrs, settings.momenta, strict=True)]
    return [{"lr": lr} for lr in settings.lrs]


def _name(method: str, options: dict[str, Any]) -> str:
    return "-".join([method, *(f"{value:g}" for value in options.values())])


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in options.items())


def parts(settings: Settings, options: Options) -> list[Part]:
    """One training for each data set and setting, and the target linearity of the inputs."""
    found: list[Part] = []
    for data in settings.data:
        inputs = Computation(
            part_name("input", data),
            lambda recorder, data=data: _inputs(settings, options, data, recorder),  # type: ignore[misc]
        )
        found.append(inputs)
        for method in _settings(settings):
            name = part_name(_name(settings.method, method), data)
            found.append(Training(name, _config(settings, options, data, method)))
    return found


def _config(settings: Settings, options: Options, data: str, method: dict[str, Any]) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "seeds": settings.seeds,
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "evaluate_train": True,
            "evaluate_every": settings.every,
            "device": options.device,
            "data": {"name": data, "dir": options.data_dir, **_scale(data)},
            "model": {"name": "mlp", "hidden": settings.hidden},
            "method": {"name": settings.method, **method},
            "measure": measure_table(settings.every, settings.samples),
        }
    )


def _scale(data: str) -> dict[str, Any]:
    return {"scale": SCALES[data]} if data in SCALES else {}


def _inputs(settings: Settings, options: Options, data: str, recorder: Recorder) -> None:
    found = load(data, options.data_dir or None, **_scale(data)).flat()
    n = min(settings.samples, len(found.x_train))
    x, y = found.subset(n).x_train, found.subset(n).y_train
    recorder.record("input", data=data, target_linearity=float(target_linearity(x, y)), samples=n)


# -- claims -------------------------------------------------------------------------------------------------------
def _runs(results: Results[Settings]) -> list[tuple[str, str, list[Record], list[Record]]]:
    """Data set, setting as text, measurements and evaluations."""
    s = results.settings
    found = []
    for data in s.data:
        for method in _settings(s):
            part = part_name(_name(s.method, method), data)
            measured, evaluated = (results.records(kind, part=part) for kind in ("measurement", "evaluation"))
            found.append((data, _text(method), measured, evaluated))
    return found


def _last(results: Results[Settings], records: list[Record], key: str) -> float:
    return mean(r[key] for r in records if r["epoch"] == results.settings.epochs)


def _untrained(results: Results[Settings], evaluated: list[Record]) -> str:
    train = _last(results, evaluated, "train_accuracy")
    return f"hardly trained: {percent(train)} on the training set" if train < 0.4 else ""


def grow(results: Results[Settings]) -> list[Claim]:
    """003 Fig. 4: TL and surrogate grow with training and with depth."""
    rows = []
    depth, end = len(results.settings.hidden), results.settings.epochs
    for data, text, measured, evaluated in _runs(results):
        reason = _untrained(results, evaluated)
        for key, name, form in (("target_linearity", "TL", "{:.2f}"), ("surrogate", "surrogate", "{:.1e}")):
            first, last = (by_depth(measured, key, depth, epoch) for epoch in (0.0, end))
            rows.append(
                Claim(
                    f"{data}, {text}: {name} grows with training in every layer",
                    "grows throughout training",
                    ", ".join(f"{form.format(a)} → {form.format(b)}" for a, b in zip(first, last, strict=True)),
                    all(a < b for a, b in zip(first, last, strict=True)),
                    reason,
                )
            )
            rows.append(
                Claim(
                    f"{data}, {text}: at the end {name} grows with depth",
                    "increases with the layer",
                    ", ".join(form.format(value) for value in last),
                    all(a < b for a, b in pairwise(last)),
                    reason,
                )
            )
    return rows


def shapes(results: Results[Settings]) -> list[Claim]:
    """003 §4.3: the surrogate grows roughly exponentially, TL roughly logarithmically."""
    rows = []
    depth = len(results.settings.hidden)
    for data, text, measured, evaluated in _runs(results):
        reason = _untrained(results, evaluated)
        epochs, linearity = over_training(measured, "target_linearity", depth, depth)
        logarithms = [math.log(value) for value in over_training(measured, "surrogate", depth, depth)[1]]
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
            measure = f"R² {better:.2f} and {worse:.2f}"
            why = reason or ("" if better > worse else _shape(epochs, logarithms))
            rows.append(Claim(f"{data}, {text}: last layer, {claim}", published, measure, better > worse, why))
    return rows


def _shape(epochs: list[float], values: list[float]) -> str:
    """Where the steepest rise is, when it is not at the start."""
    steepest = max(range(1, len(values)), key=lambda i: values[i] - values[i - 1])
    if steepest <= len(values) // 10:
        return "steepest at the start, then nearly straight"
    return f"S-shaped: log(surrogate) rises most at epoch {epochs[steepest]:g}, slowly before and after"


def accuracies(results: Results[Settings]) -> list[Claim]:
    """003 §4.3: training and test accuracy, last-layer TL."""
    rows = []
    depth, end = len(results.settings.hidden), results.settings.epochs
    for data, text, measured, evaluated in _runs(results):
        train, test = (_last(results, evaluated, f"{part}_accuracy") for part in ("train", "test"))
        linearity = by_depth(measured, "target_linearity", depth, end)[-1]
        known = PUBLISHED.get(data)
        claimed = f"train > {known[0]:.0%}, test > {known[1]:.0%}, TL > {known[2]}" if known else "not of this data set"
        rows.append(
            Claim(
                f"{data}, {text}: accuracies and last-layer TL at the end",
                claimed,
                f"train {percent(train)}, test {percent(test)}, TL {linearity:.2f}",
                None if known is None else train > known[0] and test > known[1] and linearity > known[2],
                "nothing published for this data set" if known is None else f"after {end:g} epochs",
            )
        )
    return rows


# -- figure -------------------------------------------------------------------------------------------------------
def figure(results: Results[Settings]) -> Figure:
    """A row for each data set and setting: surrogate, target linearity, accuracies."""
    runs = _runs(results)
    depth = len(results.settings.hidden)
    page, axes = panels(len(runs), 3, width=2.6, height=2.0, sharex=True)
    for row, (data, text, measured, evaluated) in zip(axes, runs, strict=True):
        logarithms = [{**r, "log": math.log10(r["surrogate"])} for r in measured]
        draw_layers(row[0], logarithms, "log", depth)
        row[0].set_ylabel(f"{data}, {results.settings.method}\n{text}")
        draw_layers(row[1], measured, "target_linearity", depth)
        (inputs,) = results.records("input", data=data)
        row[1].axhline(inputs["target_linearity"], color="grey", linestyle=":", label="input")
        row[1].set_ylim(0, 1)
        for index, part in enumerate(("train", "test")):
            scaled = [{**r, "percent": 100 * r[f"{part}_accuracy"]} for r in evaluated]
            band(row[2], scaled, "epoch", "percent", index=index, color=PALETTE[6 - 2 * index], label=part)
        row[2].set_ylim(0, 102)
        row[2].legend(loc="lower right")
    for place, title in zip(
        axes[0],
        (r"$\log_{10}$ surrogate $\mathrm{tr}(Y^\top H H^\top Y)$", "target linearity", "accuracy (%)"),
        strict=True,
    ):
        place.set_title(title)
    for place in axes[-1]:
        place.set_xlabel("epoch")
    legend_below(page, axes[0, 1])
    return page


_QUICK = {"seeds": (0, 1), "data": ("digits",), "hidden": (64,) * 4, "epochs": 60.0, "samples": 2000}
FIG4 = Experiment(
    Settings(**_QUICK, lrs=(0.02, 0.02), momenta=(0.8, 0.95)),  # type: ignore[arg-type]
    Settings(),
    parts,
    (grow, shapes, accuracies),
    figure,
)
FIG9 = Experiment(
    Settings(**_QUICK, method="adam", lrs=(0.0003, 0.001)),  # type: ignore[arg-type]
    Settings(method="adam", lrs=(0.0001, 0.001)),
    parts,
    (grow, shapes, accuracies),
    figure,
)
