"""gram-fig12: target linearity and generalisation when a fraction p of the training labels is random.

The authors' code randomises the test labels too. Here only the training labels are; ``--set noisy_test=true`` does as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from gramscope_lab.data.dataset import DataSet
from gramscope_lab.experiments.accuracy_curves import part_name
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results
from gramscope_lab.experiments.gram_layers import by_depth, draw_layers, layers_config, over_training
from gramscope_lab.experiments.parts import Training
from gramscope_lab.experiments.plots import PALETTE, Figure, band, curve, legend_below, panels
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.config_tables import DataTable
from gramscope_lab.training.job import load_data


@dataclass(frozen=True)
class Settings:
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


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training for each data set and fraction."""
    found = []
    for data in settings.data:
        for fraction in settings.fractions:
            config = _config(settings, options, data, fraction)
            given = _with_noisy_test(config.data) if settings.noisy_test else None
            found.append(Training(_part(data, fraction), config, data=given))
    return found


def _part(data: str, fraction: float) -> str:
    return part_name(f"p-{fraction:g}", data)


def _config(settings: Settings, options: Options, data: str, fraction: float) -> TrainConfig:
    return layers_config(
        settings,
        options,
        settings.samples,
        data={"name": data, "dir": options.data_dir, "label_noise": fraction},
        model={"name": "mlp", "hidden": settings.hidden},
        method={"name": "sgd", "lr": settings.lr, "momentum": settings.momentum},
    )


def _with_noisy_test(table: DataTable) -> Callable[[], DataSet]:
    def given() -> DataSet:
        clean = DataTable.from_table({**table.to_table(), "label_noise": 0.0})
        data = load_data(clean)  # training gives its own samples their noise
        return replace(data, y_test=data.with_label_noise(table.label_noise, table.seed, test=True).y_test)

    return given


# -- claims -------------------------------------------------------------------------------------------------------
def _final(results: Results[Settings], data: str, fraction: float) -> tuple[float, float, list[float]]:
    """Training accuracy, test accuracy, and TL of the hidden layers at the end."""
    part = _part(data, fraction)
    accuracies = [curve(results.records("evaluation", part=part), "epoch", f"{k}_accuracy") for k in ("train", "test")]
    measured = results.records("measurement", part=part)
    linearity = by_depth(measured, "target_linearity", len(results.settings.hidden), accuracies[0][0][-1])
    return accuracies[0][1][-1], accuracies[1][1][-1], linearity


def falls(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 12: with p the last layer's TL falls and the generalisation gap grows."""
    fractions = results.settings.fractions
    for data in results.settings.data:
        found = [_final(results, data, p) for p in fractions]
        last = [linearity[-1] for *_, linearity in found]
        gaps = [train - test for train, test, _ in found]
        yield Claim(
            f"{data}: TL of the last layer is lower at p {fractions[-1]:g} than at p {fractions[0]:g}, by over 0.05",
            "falls with p, constant at high p",
            ", ".join(f"p {p:g}: {value:.2f}" for p, value in zip(fractions, last, strict=True)),
            last[-1] < last[0] - 0.05,
        )
        yield Claim(
            f"{data}: train − test accuracy grows with p (by no less than −0.02 a step, by over 0.1 in all)",
            "grows",
            ", ".join(f"p {p:g}: {a:.2f} − {b:.2f}" for p, (a, b, _) in zip(fractions, found, strict=True)),
            all(b > a - 0.02 for a, b in pairwise(gaps)) and gaps[-1] > gaps[0] + 0.1,
        )


def late(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.8: at high p the middle layers' TL rises late, at low p early."""
    depth = len(results.settings.hidden)
    for data in results.settings.data:
        halves = []
        for fraction in (results.settings.fractions[0], results.settings.fractions[-1]):
            measured = results.records("measurement", part=_part(data, fraction))
            epochs, values = over_training(measured, "target_linearity", max(1, depth - 1), depth)
            level = values[0] + 0.5 * (max(values) - values[0])
            halves.append(next(e for e, value in zip(epochs, values, strict=True) if value >= level))
        yield Claim(
            f"{data}: layer {max(1, depth - 1)} has half its rise in TL later at the highest p than without noise",
            "sudden late increase at high p",
            f"epoch {halves[1]:g} and {halves[0]:g}",
            halves[1] > halves[0],
        )


# -- figure -------------------------------------------------------------------------------------------------------
def figure(results: Results[Settings]) -> Figure:
    """A column per fraction: target linearity of the hidden layers above, accuracies below."""
    settings = results.settings
    data = settings.data[0]
    page, axes = panels(2, len(settings.fractions), width=1.9, height=1.8, sharex=True, sharey="row")
    for column, fraction in zip(axes.T, settings.fractions, strict=True):
        part = _part(data, fraction)
        draw_layers(column[0], results.records("measurement", part=part), "target_linearity", len(settings.hidden))
        for index, name in enumerate(("train", "test")):
            evaluated = results.records("evaluation", part=part)
            colour = PALETTE[6 - 2 * index]
            band(column[1], evaluated, "epoch", f"{name}_accuracy", index=index, color=colour, label=name)
        column[0].set_title(f"{data}, p = {fraction:g}")
        column[1].set_xlabel("epoch")
        column[1].set_ylim(0, 1.03)
    axes[0, 0].set_ylabel("target linearity")
    axes[1, 0].set_ylabel("accuracy")
    axes[1, 0].legend(loc="center right")
    legend_below(page, axes[0, 0])
    return page


FIG12 = Experiment(
    Settings(
        data=("digits",), fractions=(0.0, 0.5, 0.75, 1.0), hidden=(128, 128, 128), lr=0.03, epochs=150.0, every=3.0,
        samples=2000,
    ),
    Settings(),
    parts,
    (falls, late),
    figure,
    classes=True,
)  # fmt: skip
