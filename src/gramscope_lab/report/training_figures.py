"""Accuracy and loss over training, and their last values."""

from __future__ import annotations

from collections.abc import Sequence

from gramscope_lab.report.blocks import distinct
from gramscope_lab.report.figures import Panel, View, line, single_points
from gramscope_lab.report.read import Curve, Run, Runs, Setting, is_number, shorten, spread_sentence

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
    """Accuracy, loss, and both at the end of training where there is something to compare."""
    found = [_over_training(runs, "accuracy"), _over_training(runs, "loss"), _last_values(runs)]
    return [panel for panel in found if panel is not None]


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
    views, drawn = [], list[Curve]()
    for clock in (runs.clock, "seconds"):
        curves = [[(s, s.curve(f"{part}_{what}", None, clock)) for s in runs.settings] for part in parts]
        if not any(curve for own in curves for _, curve in own):
            continue
        drawn += [curve for own in curves for _, curve in own]
        at = f"{clock} %{{x:.4~g}}"
        facets = [
            [
                trace
                for s, curve in own
                if curve
                for trace in line(s.name, s.index, curve.times, curve.values, at, False)
            ]
            for own in curves
        ]
        label = "over seconds of training" if clock == "seconds" else f"over {clock}s"
        titles = [PARTS.get(part, part) for part in parts]
        views.append(View(label, facets, titles, {"title.text": clock}, {"matches": True}))
    if not views:
        return None
    summary, formula = _TERMS[what]
    return Panel(
        what,
        "Training",
        what.capitalize(),
        f"For each setting; lines are means over seeds. {spread_sentence(runs)}",
        views,
        terms=[(what, summary, formula)],
        log_switch=what == "loss" and all(value.mean > 1e-300 for curve in drawn for value in curve.values),
    )


def _last_values(runs: Runs) -> Panel | None:
    """The last value of each setting, side by side."""
    keys = evaluated_keys(runs)
    if len(runs.all) < 2 or not keys:
        return None
    names = distinct(shorten(setting.name) for setting in runs.settings)
    facets = [[point for s in runs.settings for point in _end(s, names[s.index], key, runs.clock)] for key in keys]
    view = View("", facets, [key_text(key).capitalize() for key in keys], {"type": "category", "title.text": ""})
    sentence = f"The last value of each setting: the point is the mean over seeds. {spread_sentence(runs)}"
    return Panel("ends", "Training", "Last values", sentence, [view])


def _end(setting: Setting, name: str, key: str, clock: str) -> list[dict[str, object]]:
    curve = setting.curve(key, None, clock)
    return [single_points(setting.name, setting.index, [name], curve.values[-1:])] if curve else []
