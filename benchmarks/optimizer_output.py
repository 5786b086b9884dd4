"""The comparison of optimizers as tables in Markdown, and as a picture of scores over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizer_peers import FACTORS, ITSELF, OURS, Competitor, competitors
from benchmarks.optimizer_tasks import TASKS
from benchmarks.optimizers import Line, Trial, common_rate, lines, mean_and_error, validation_means
from gramscope.errors import InputError

#: what counts as equal to the linear schedule: points, share of the loss, standard errors of the difference
POINTS, SHARE, ERRORS = 0.3, 0.005, 2.0
By = Mapping[str, Line]


def report(trials: Sequence[Trial], methods: Sequence[Competitor] | None = None) -> str:
    """All tables, each under a sentence that says what it shows."""
    methods = methods or competitors()
    known = [*TASKS["full"], *TASKS["quick"]]
    place = {task: known.index(task) if task in known else len(known) for task in {(t.net, t.data) for t in trials}}
    found = sorted(lines(trials, methods), key=lambda line: (place[line.net, line.data], line.steps))
    cells: dict[tuple[str, str, int], dict[str, Line]] = {}
    for line in found:
        cells.setdefault((line.net, line.data, line.steps), {})[line.method] = line
    if any(m.name == OURS for m in methods):
        cells = {cell: by for cell, by in cells.items() if OURS in by}
    tuned = [m.name for m in methods if m.rates]
    plain = [m.name for m in methods if not m.rates and m.name != ITSELF]
    plain += [f"{m.name}, one rate" for m in methods if m.common_rate]
    without, chosen = "without tuning, or with one rate for all tasks", "with the rate that validation chose"
    parts = [_against_itself(cells.values()), _beside(cells.values(), plain, without)]
    parts += [_beside(cells.values(), [OURS, *tuned], chosen), _edges(found)]
    parts += [_sensitivity(trials, methods, place), _seconds(cells.values(), [*plain, *tuned])]
    return "\n\n".join(part for part in parts if part)


def _against_itself(cells: Iterable[By]) -> str:
    """FreeMuon, which does not know the end, beside its form with a linear schedule: paired differences over seeds."""
    rows, reached = [], 0
    for ours, theirs in ((by[OURS], by[ITSELF]) for by in cells if OURS in by and ITSELF in by):
        seeds = sorted(ours.tests.keys() & theirs.tests.keys())
        if not seeds:
            continue
        mean, error = mean_and_error([ours.tests[seed] - theirs.tests[seed] for seed in seeds])
        least = SHARE * abs(theirs.score) if theirs.score < 0 else POINTS
        met = mean >= -max(least, 0.0 if math.isnan(error) else ERRORS * error)
        reached += met
        both = (_number(line, statistics.fmean(line.tests[seed] for seed in seeds)) for line in (ours, theirs))
        difference = f"{'+' if mean >= 0 else '−'}{_number(ours, mean)}{_spread(ours, error)}"
        rows.append((*_names(ours), *both, difference, "yes" if met else "**no**"))
    head = ("net, data", "steps", "FreeMuon", "linear schedule", "difference (+ is better)", "as good")
    text = (
        f"FreeMuon beside its form with a linear schedule to the known end. As good in {reached} of {len(rows)} cells."
    )
    return f"{text}\n\n{_markdown(head, rows)}" if rows else ""


def _beside(cells: Iterable[By], names: Sequence[str], text: str) -> str:
    """Scores of FreeMuon and others, the best in bold."""
    cells = [by for by in cells if sum(name in by for name in names) > 1]
    names = [name for name in names if any(name in by for by in cells)]
    rows, ahead = [], 0
    for by in cells:
        best = max(by[name].score for name in names if name in by)
        ahead += OURS in by and by[OURS].score == best
        entries = [_score(by[name]) if name in by else "" for name in names]
        marked = [f"**{e}**" if e and by[n].score == best else e for n, e in zip(names, entries, strict=True)]
        rows.append((*_names(next(iter(by.values()))), *marked))
    head = f"Methods {text}." + (f" FreeMuon is best in {ahead} of {len(rows)} cells." if OURS in names else "")
    return f"{head}\n\n{_markdown(('net, data', 'steps', *names), rows)}" if rows else ""


def _edges(found: Iterable[Line]) -> str:
    at_edge = (line for line in found if line.at_edge)
    rows = [f"{x.method} on {x.net}, {x.data}, {x.steps:,} steps (rate {x.rate:g})" for x in at_edge]
    return f"Warning: the best rate is the least or largest that was tried: {'; '.join(rows)}." if rows else ""


def _sensitivity(trials: Sequence[Trial], methods: Sequence[Competitor], place: Mapping[tuple[str, str], int]) -> str:
    """Validation scores at multiples of the step length, and of the one rate for all tasks, where FreeMuon has them."""
    groups: dict[tuple[str, str, int], dict[str, list[Trial]]] = {}
    for trial in trials:
        groups.setdefault(trial.cell, {}).setdefault(trial.method, []).append(trial)
    rows = []
    for cell in sorted(groups, key=lambda cell: (place[cell[:2]], cell[2])):
        by = groups[cell]
        if {t.rate for t in by.get(OURS, ())} != set(FACTORS):
            continue
        for method in (m for m in methods if m.name in by and (m.common_rate or not m.rates)):
            middle = common_rate(trials, method, cell[2]) if method.rates else 1.0
            means = validation_means(by[method.name])
            near = [next((s for r, s in means.items() if abs(r / (f * middle) - 1) < 0.15), None) for f in FACTORS]
            label = f"{method.name}, rate {middle:g}" if method.rates else method.name
            if sum(score is not None for score in near) > 2:
                rows.append((f"{cell[0]}, {cell[1]}", f"{cell[2]:,}", label, *map(_value, near)))
    table = _markdown(("net, data", "steps", "method", *(f"× {f:g}" for f in FACTORS)), rows)
    text = "Validation scores at multiples of the step length, or of the one rate for all tasks."
    return f"{text}\n\n{table}" if rows else ""


def _seconds(cells: Iterable[By], names: Sequence[str]) -> str:
    """Milliseconds of a step, the least of all runs on a task."""
    least: dict[str, dict[str, float]] = {}
    for by in cells:
        for name in (name for name in names if name in by and ", one rate" not in name):
            line = by[name]
            own = least.setdefault(_names(line)[0], {})
            own[name] = min(own.get(name, math.inf), 1e3 * line.seconds / line.steps)
    names = [name for name in names if any(name in own for own in least.values())]
    rows = [(task, *(f"{own[name]:.1f}" if name in own else "" for name in names)) for task, own in least.items()]
    return f"Milliseconds of a step.\n\n{_markdown(('net, data', *names), rows)}" if rows else ""


def _names(line: Line) -> tuple[str, str]:
    return f"{line.net}, {line.data}", f"{line.steps:,}"


def _score(line: Line) -> str:
    rate = "" if line.rate is None else f" ({line.rate:g})"
    return _number(line, line.score) + _spread(line, line.error) + rate


def _spread(line: Line, error: float) -> str:
    return "" if math.isnan(error) else f" ± {_number(line, error)}"


def _number(line: Line, value: float) -> str:
    """Per cent with one digit, a loss per character with three, without the sign that lets more be better."""
    return f"{abs(value):.3f}" if line.score < 0 else f"{abs(value):.1f}"


def _value(score: float | None) -> str:
    if score is None:
        return ""
    return f"{-score:.3f}" if score < 0 else f"{score:.1f}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruled = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


#: methods in the picture: more lines than these cannot be told apart
PICTURED = (OURS, "NadamW", "Muon", "AdamW", "SGD, momentum", "ScheduleFreeAdamW", "Prodigy")


def draw(trials: Sequence[Trial], path: Path, methods: Sequence[Competitor] | None = None) -> None:
    """Draw for each task the test score over the seconds of training, a line for each method of ``PICTURED`` (or of those run).

    Args:
        trials: runs of :func:`~benchmarks.optimizers.compare_optimizers`.
        path: of the picture; its ending gives the format.
        methods: those to choose from; all by default.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise InputError("the picture needs matplotlib: pip install 'gramscope[lab]'") from error
    found = lines(trials, methods)
    names = list(dict.fromkeys(line.method for line in found))
    names = [name for name in PICTURED if name in names] or names
    tasks = list(dict.fromkeys((line.net, line.data) for line in found))
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows + 0.6), squeeze=False)
    tuned = {line.method for line in found if line.rate is not None}
    for axis, task in zip(axes.flat, tasks, strict=False):
        for name in names:
            own = sorted((x for x in found if (x.net, x.data, x.method) == (*task, name)), key=lambda x: x.steps)
            style: dict[str, Any] = {"color": f"C{names.index(name)}", "linestyle": "--" if name in tuned else "-"}
            style |= {"color": "black", "linewidth": 2.4, "zorder": 3} if name == OURS else {}
            pace = min((x.seconds / x.steps for x in own), default=0.0)
            axis.plot([pace * x.steps for x in own], [x.score for x in own], marker=".", label=name, **style)
        axis.set_xscale("log")
        axis.set_title(f"{task[0]}, {task[1]}", fontsize=10)
        axis.tick_params(labelsize=8)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    figure.supylabel("accuracy or 100 R² (%), or minus the loss", fontsize=10)
    figure.supxlabel("seconds of training (dashed: with a rate that validation chose)", fontsize=10)
    figure.tight_layout()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=10, frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
