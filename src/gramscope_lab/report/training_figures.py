"""Accuracy and loss over training."""

from __future__ import annotations

from collections.abc import Sequence

from gramscope_lab.report.figures import Panel, Trace, View, line
from gramscope_lab.report.read import Run, Runs, Setting, is_number, spread_sentence

#: parts of the data on which a net is evaluated
PARTS = {
    "test": "Test",
    "validation": "Validation",
    "train": "Training",
    "batch": "Training batches",
    "monitored": "Monitored sample",
}
_TERMS = {
    "accuracy": ("share of samples (or labelled tokens) classified correctly", "(1/n) Σ_i [argmax f(x_i) = y_i]"),
    "loss": ("mean loss of a sample (or labelled token)", "(1/n) Σ_i L_i"),
}


def training_panels(runs: Runs) -> list[Panel]:
    """Accuracy and loss, where they were recorded."""
    return [panel for what in _TERMS if (panel := _over_training(runs, what)) is not None]


def evaluated_keys(runs: Runs) -> list[str]:
    """Everything that was evaluated, accuracies first: ``test_accuracy``, ``test_loss`` …"""
    return [f"{part}_{what}" for what in _TERMS for part in _parts(runs.all, what)]


def key_text(key: str) -> str:
    """An evaluated key as people say it.

    >>> key_text("test_accuracy")
    'test accuracy'
    """
    part, _, what = key.rpartition("_")
    return f"{PARTS.get(part, part).lower()} {what}"


def _parts(runs: Sequence[Run], what: str) -> list[str]:
    """Parts of the data for which ``accuracy`` or ``loss`` was recorded, test first."""
    numbers = {key for run in runs for record in run.evaluations for key, value in record.items() if is_number(value)}
    found = {key.removesuffix(f"_{what}") for key in numbers if key.endswith(f"_{what}")}
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


def _over_training(runs: Runs, what: str) -> Panel | None:
    parts = _parts(runs.all, what)
    curves = [s.curve(f"{part}_{what}", None, runs.clock) for s in runs.settings for part in parts]
    positive = all(value.mean > 1e-300 for curve in curves for value in curve.values)
    scales = ("linear", "log") if what == "loss" and positive else ("linear",)
    views = []
    for clock, scale in [*((runs.clock, scale) for scale in scales), ("seconds", "linear")]:
        facets = [[t for s in runs.settings for t in _lines(s, f"{part}_{what}", clock, scale)] for part in parts]
        label = f"over {clock}, logarithmic" if scale == "log" else f"over {clock}"
        titles = [PARTS.get(part, part) for part in parts]
        if any(facets):
            views.append(View(label, facets, titles, {"title.text": clock}, {"matches": True, "type": scale}))
    if not views:
        return None
    sentence = f"For each setting; lines are means over seeds. {spread_sentence(runs)}"
    return Panel(what, "Training", what.capitalize(), sentence, views, terms=[(what, *_TERMS[what])])


def _lines(setting: Setting, key: str, clock: str, scale: str) -> list[Trace]:
    curve = setting.curve(key, None, clock)
    at = f"{clock} %{{x:.4~g}}"
    return line(setting.name, setting.index, curve.times, curve.values, at, scale == "log") if curve else []
