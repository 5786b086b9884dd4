"""Accuracy over epochs of methods with a sweep each: the setting chosen from the records, and what is read off its curve.

The part that trains a method on a data set is called ``METHOD-DATA``; it holds all seeds of all settings of the sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gramscope.errors import InputError
from gramscope_lab.experiments.experiment import Results
from gramscope_lab.experiments.plots import Figure, Line, band, curve, legend_below, panels, percent
from gramscope_lab.runs.records import Record
from gramscope_lab.spread import Spread, spread


@dataclass(frozen=True)
class Curve:
    """Test accuracy over epochs of one setting."""

    setting: str
    records: list[Record] = field(repr=False)

    @cached_property
    def line(self) -> Line:
        """Means and deviations over seeds."""
        return curve(self.records, "epoch", "test_accuracy")

    @property
    def finals(self) -> Spread | None:
        """The last accuracies of all seeds."""
        return spread(r["test_accuracy"] for r in self.records if r["epoch"] == self.line.x[-1])


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
        setting = max(settings, key=lambda name: curve(settings[name], "epoch", "validation_accuracy").best[0])
    return Curve(setting, settings[setting])


def compare_finals(first: Curve, second: Curve) -> tuple[float, str]:
    """Difference of the final mean accuracies in points; and as text both accuracies, difference and standard error."""
    error = 100 * math.sqrt(sum(s.deviation**2 / s.count for s in (first.finals, second.finals) if s is not None))
    a, b = first.line.final, second.line.final
    difference = 100 * (a - b)
    return difference, f"{percent(a)} and {percent(b)} ({difference:+.1f} ± {error:.1f})"


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
