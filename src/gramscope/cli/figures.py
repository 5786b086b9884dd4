"""The demonstration's figures, from its records."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from gramscope.errors import MissingExtraError
from gramscope.runs.directory import RunDirectory


def demo_figures(path: Path) -> list[Path]:
    """Accuracy over training with ±2σ bands, target linearity of every layer, and the first layer's diagonals."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'gramscope[report]'") from error
    root = RunDirectory.open(path)
    groups = root.members()
    figure = Figure(figsize=(4 * (1 + len(groups)), 3.2), layout="constrained")
    axes = figure.subplots(1, 1 + len(groups))
    for group in groups:
        _band(axes[0], group.records("evaluation"), "test_accuracy", group.name)
    axes[0].set(xlabel="epoch", ylabel="test accuracy", title="accuracy, mean ± 2σ")
    axes[0].legend()
    for axis, group in zip(axes[1:], groups, strict=True):
        records = group.records("measurement")
        for layer in dict.fromkeys(record["layer"] for record in records):
            _band(axis, [r for r in records if r["layer"] == layer], "target_linearity", layer)
        axis.set(xlabel="epoch", ylabel="target linearity", title=group.name, ylim=(0, 1))
        axis.legend()
    written = [_save(figure, root, "training")]
    figure = Figure(figsize=(6.5, 2.2 * len(groups)), layout="constrained")
    for row, group in enumerate(groups):
        _diagonals(figure, row, len(groups), group)
    return [*written, _save(figure, root, "diagonals")]


def _band(axis: Any, records: list[dict[str, Any]], key: str, label: str) -> None:
    by_epoch: dict[float, list[float]] = {}
    for record in records:
        if record.get(key) is not None:
            by_epoch.setdefault(record["epoch"], []).append(record[key])
    epochs = sorted(by_epoch)
    means = [statistics.fmean(by_epoch[epoch]) for epoch in epochs]
    widths = [2 * statistics.stdev(by_epoch[e]) if len(by_epoch[e]) > 1 else 0.0 for e in epochs]
    (line,) = axis.plot(epochs, means, label=label)
    low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
    axis.fill_between(epochs, low, high, color=line.get_color(), alpha=0.2)


def _diagonals(figure: Any, row: int, rows: int, group: RunDirectory) -> None:
    """The first layer's diagonals of WᵀW, AGOP and the summed virtual covariance shifts, as 8×8 images."""
    run = next(group.runs())
    matrices = run.load_artefact(run.artefacts()[-1])
    titles = {"gram": "diag WᵀW", "agop": "diag AGOP", "vcs": "diag ΣVCS"}
    for column, (key, title) in enumerate(titles.items()):
        axis = figure.add_subplot(rows, len(titles), row * len(titles) + column + 1)
        axis.imshow(matrices[f"hidden1/{key}"].reshape(8, 8).numpy(), cmap="viridis")
        axis.set(title=f"{group.name}: {title}", xticks=[], yticks=[])


def _save(figure: Any, root: RunDirectory, name: str) -> Path:
    path = root.figure_path(f"{name}.png")
    figure.savefig(path, dpi=150)
    figure.savefig(root.figure_path(f"{name}.pdf"))
    return path
