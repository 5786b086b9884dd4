"""Accuracy over epochs of methods with a sweep each: the setting chosen from the records, and what is read off its curve.

The part that trains a method on a data set is called ``METHOD-DATA``; it holds all seeds of all settings of the sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gramscope.errors import InputError
from gramscope_lab.experiments.experiment import Results
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, mean, panels, percent
from gramscope_lab.runs.records import Record
from gramscope_lab.spread import spread


@dataclass(frozen=True)
class Curve:
    """Accuracy over epochs of one setting, the mean over its seeds."""

    setting: str
    records: list[Record] = field(repr=False)
    key: str = "test_accuracy"

    @property
    def points(self) -> tuple[list[float], list[float], list[float]]:
        """Epochs, means, deviations."""
        return curve(self.records, "epoch", self.key)

    @property
    def final(self) -> float:
        """Mean accuracy after the last epoch."""
        return self.points[1][-1]

    @property
    def best(self) -> tuple[float, float]:
        """Highest mean accuracy, and the epoch it is first reached."""
        epochs, means, _ = self.points
        top = max(means)
        return top, epochs[means.index(top)]

    def at(self, epoch: float) -> float:
        """Mean accuracy at the first recorded epoch from ``epoch`` on, or at the last one recorded."""
        epochs, means, _ = self.points
        return next((value for e, value in zip(epochs, means, strict=True) if e >= epoch), means[-1])

    def reaches(self, accuracy: float) -> float:
        """First epoch with at least this mean accuracy; infinite if there is none."""
        return first_epoch(*self.points[:2], accuracy)

    def final_values(self) -> list[float]:
        """The last accuracy of every seed."""
        last = self.points[0][-1]
        return [r[self.key] for r in self.records if r["epoch"] == last]

    def spread_over_training(self) -> float:
        """Deviation over seeds, averaged over the second half of the epochs."""
        deviations = self.points[2]
        return mean(deviations[len(deviations) // 2 :])


def first_epoch(epochs: list[float], values: list[float], level: float) -> float:
    """The first epoch with at least this value; infinite if there is none."""
    return next((e for e, value in zip(epochs, values, strict=True) if value >= level), math.inf)


def settings_of(results: Results[Any], part: str) -> dict[str, list[Record]]:
    """Evaluations of a part with all its seeds, by setting; a setting is a text such as ``lr 0.01``."""
    found: dict[str, list[Record]] = {}
    for record in results.records("evaluation", part=part):
        found.setdefault(_setting(record), []).append(record)
    if not found:
        raise InputError(f"{results.directory.path} has no evaluations of {part}")
    return found


def _setting(record: Record) -> str:
    _, _, member = record["run"].partition("/")
    pairs = [item.partition("-") for item in member.split(",") if item]
    chosen = [f"{key} {value}" for key, _, value in pairs if key != "seed"]
    if not chosen and "lr" in record:
        chosen = [f"lr {record['lr']:g}"]
    return ", ".join(chosen)


def choose(results: Results[Any], part: str) -> Curve:
    """The setting with the highest mean accuracy at any epoch on the validation part."""
    settings = settings_of(results, part)
    setting = next(iter(settings))
    if len(settings) > 1:
        setting = max(settings, key=lambda name: Curve(name, settings[name], "validation_accuracy").best[0])
    return Curve(setting, settings[setting])


def compare_finals(first: Curve, second: Curve) -> tuple[float, str]:
    """Difference of the final mean accuracies in points; and as text both accuracies, difference and standard error."""
    found = [spread(curve.final_values()) for curve in (first, second)]
    difference = 100 * (first.final - second.final)
    error = 100 * math.sqrt(sum(s.deviation**2 / s.count for s in found if s is not None))
    return difference, f"{percent(first.final)} and {percent(second.final)} ({difference:+.1f} ± {error:.1f})"


def accuracy_figure(shown: Mapping[str, Mapping[str, Curve]], columns: int = 4) -> Figure:
    """Test accuracy after every epoch, mean ± 2σ over seeds: a panel for each title, a curve for each method in it."""
    rows = -(-len(shown) // columns)
    page, axes = panels(rows, min(len(shown), columns), width=2.9, height=2.4)
    for place, (title, curves) in zip(axes.flat, shown.items(), strict=False):
        for index, (label, chosen) in enumerate(curves.items()):
            scaled = [{**r, "percent": 100 * r["test_accuracy"]} for r in chosen.records if r["epoch"] > 0]
            band(place, scaled, "epoch", "percent", index=index, label=label)
        place.set_title(title)
        settings = (f"{label}: {chosen.setting.replace('_', ' ')}" for label, chosen in curves.items())
        place.set_xlabel("\n".join(["epoch", *settings]))
        low, high = place.get_ylim()
        place.set_ylim(max(low, 0), min(high, 101))
    for place in list(axes.flat)[len(shown) :]:
        place.set_visible(False)
    axes[0, 0].set_ylabel("test accuracy (%)")
    legend_below(page, axes[0, 0])
    return page
