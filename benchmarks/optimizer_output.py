"""The comparison of optimizers as two tables in Markdown, scores and what rates do to them, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizer_peers import Competitor, competitors
from benchmarks.optimizers import Line, Trial, validation_means
from gramscope.errors import InputError

#: method → its column in the table of rates, and its line in the picture
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FreeMuon": ("FreeMuon", {"color": "tab:red", "linewidth": 2.4}),
    "Muon": ("Muon", {"color": "tab:blue"}),
    "Muon, decay 0.1": ("Muon, decay", {"color": "tab:cyan"}),
    "AdamW": ("AdamW", {"color": "tab:green"}),
    "SGD, momentum": ("SGD", {"color": "tab:orange"}),
    "SOAP": ("SOAP", {"color": "tab:purple"}),
}


def score_table(lines: Iterable[Line]) -> str:
    """Mean ± standard error of FreeMuon and of the best peer, with its rate; bold where it is at or above every peer."""
    rows = []
    for task, here in _by_task(lines):
        ours = next((line for line in here if line.method == "FreeMuon"), None)
        peers = [line for line in here if line.method != "FreeMuon"]
        if ours is not None and peers:
            best = max(peers, key=lambda line: line.score)
            own = _score(ours)
            peer = f"{_score(best)} ({_METHODS[best.method][0]}, rate {best.rate:g})"
            rows.append((*task, f"**{own}**" if ours.score >= best.score else own, peer, str(ours.seeds)))
    return _markdown(("net, data", "steps", "FreeMuon", "best peer", "seeds"), rows)


def rate_table(lines: Iterable[Line]) -> str:
    """Median over the rates of each method and, after a stroke, the spread."""
    lines = list(lines)
    methods = [name for name in _METHODS if any(line.method == name for line in lines)]
    rows = []
    for task, here in _by_task(lines):
        known = (line for line in here if not math.isnan(line.spread))
        by = {line.method: f"{_number(line, line.median)} / {_number(line, line.spread)}" for line in known}
        rows.append((*task, *(by.get(name, "") for name in methods)))
    return _markdown(("net, data", "steps", *(_METHODS[name][0] for name in methods)), rows)


def _by_task(lines: Iterable[Line]) -> list[tuple[tuple[str, str], list[Line]]]:
    found: dict[tuple[str, str, int], list[Line]] = {}
    for line in lines:
        found.setdefault((line.net, line.data, line.steps), []).append(line)
    return [((f"{net}, {data}", f"{steps:,}"), here) for (net, data, steps), here in found.items()]


def _score(line: Line) -> str:
    found = _number(line, line.score)
    return found if math.isnan(line.error) else f"{found} ± {_number(line, line.error)}"


def _number(line: Line, value: float) -> str:
    """Per cent with one digit, a loss per character with three, without the sign that lets more be better."""
    return f"{abs(value):.3f}" if line.data == "text" else f"{value:.1f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruled = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def draw(trials: Sequence[Trial], path: Path, methods: Sequence[Competitor] | None = None) -> None:
    """Draw validation scores, means over seeds, against the rate as a multiple of the middle of each method's grid.

    Args:
        trials: runs of :func:`~benchmarks.optimizers.compare_optimizers`.
        path: of the picture; its ending gives the format.
        methods: whose grids give the middle.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise InputError("the picture needs matplotlib: pip install 'gramscope[lab]'") from error
    middles = {m.name: sorted(m.rates)[len(m.rates) // 2] for m in methods or competitors(soap=True)}
    tasks = list(dict.fromkeys((t.net, t.data) for t in trials))
    budgets = sorted({t.steps for t in trials})
    size = (2.4 * len(budgets) + 1, 2.0 * len(tasks) + 0.8)
    figure, axes = plt.subplots(len(tasks), len(budgets), figsize=size, squeeze=False, sharex=True)
    for row, task in zip(axes, tasks, strict=True):
        for axis, steps in zip(row, budgets, strict=True):
            here = [t for t in trials if (t.net, t.data) == task and t.steps == steps]
            scores: list[float] = []
            for name in (name for name in middles if any(t.method == name for t in trials)):
                own = [t for t in here if t.method == name]
                means = validation_means(own, {t.rate for t in own})
                points = sorted((rate / middles[name], score) for rate, score in means.items())
                if points:
                    axis.plot(*zip(*points, strict=True), marker=".", label=name, **_METHODS.get(name, ("", {}))[1])
                scores += means.values()
            scores.sort()
            if scores:  # a diverged run must not hide the others
                low = scores[len(scores) // 4]
                axis.set_ylim(low - 0.6 * (scores[-1] - low) - 1e-6, scores[-1] + 0.1 * (scores[-1] - low) + 1e-6)
            axis.set_xscale("log")
            axis.set_title(f"{task[0]}, {task[1]}, {steps:,} steps", fontsize=8)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel("− loss" if task[1] == "text" else "accuracy, %", fontsize=8)
    found = [axis.get_legend_handles_labels() for axis in axes.flat]
    handles, labels = max(found, key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", fontsize=8, frameon=False)
    label = "rate (FreeMuon: the length of all steps) over the middle of the grid"
    figure.supxlabel(label, fontsize=8, y=0.3 / size[1])
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
