"""A picture of score against rate, one panel for each task and budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizer_peers import Competitor, competitors
from benchmarks.optimizers import Trial, validation_means
from gramscope.errors import InputError

#: how the lines look
_STYLES: dict[str, dict[str, Any]] = {
    "VCL": {"color": "tab:red", "linewidth": 2.4},
    "VCL, all steps": {"color": "tab:red", "linestyle": ":"},
    "Muon": {"color": "tab:blue"},
    "Muon, decay 0.1": {"color": "tab:cyan"},
    "AdamW": {"color": "tab:green"},
    "SGD, momentum": {"color": "tab:orange"},
    "SOAP": {"color": "tab:purple"},
}


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
        raise InputError("the picture needs matplotlib: pip install 'gramscope[report]'") from error
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
                    axis.plot(*zip(*points, strict=True), marker=".", label=name, **_STYLES.get(name, {}))
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
    figure.supxlabel(
        "rate (VCL: γ, or the length of all steps) over the middle of the grid", fontsize=8, y=0.3 / size[1]
    )
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
