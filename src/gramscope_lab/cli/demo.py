"""``gramscope demo``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.cli.console import TerminalReporter, messages, print_json, print_table, results
from gramscope_lab.runs.layout import free_path
from gramscope_lab.spread import spread_text

if TYPE_CHECKING:
    from gramscope_lab.training.trained import Trained


def command(
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write (default: demo, numbered).", show_default=False),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the digits.")] = 10,
    seeds: Annotated[int, typer.Option(help="Seeds of each method.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a small net on the digits with SGD, VCL and whitened SGD, and look inside: under two minutes.

    Every layer is measured through training. Figures, records and a report are written to a directory of its own.

    Example: gramscope demo
    """
    from gramscope_lab.training.demonstration import demo_configs, run_demo

    began = time.perf_counter()
    out = out or free_path("demo")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose another --out")
    configs = demo_configs(epochs=epochs, seeds=range(seeds), device=device)
    rows = summarise(run_demo(configs, out, reporter=TerminalReporter()))
    report = write_report(out)
    if json:
        print_json({"path": out, "summary": rows, "report": report})
        return
    over = "1 seed" if seeds == 1 else f"{seeds} seeds: mean ± 2σ"
    print_table(f"digits, {epochs:g} epochs, {over}", rows)
    messages().print(f"done in {time.perf_counter() - began:.0f} s; records and checkpoints are in {out}")
    if report is not None:
        results().print(f"report: {report}")


def write_report(out: Path) -> Path | None:
    """Write the report; print a note and return None where its libraries are missing."""
    from gramscope_lab import report

    try:
        return report.write_report([out])
    except MissingExtraError as error:
        messages().print(str(error))
        return None


def summarise(trained: Mapping[str, Trained]) -> list[dict[str, Any]]:
    """One row a method: accuracies and measures of the features as mean ± 2 standard deviations over seeds."""
    rows = []
    for method, runs in trained.items():
        row = {"method": method}
        for heading, key, epoch, layer in (
            ("accuracy after 1 epoch", "test_accuracy", 1.0, None),
            ("at the end", "test_accuracy", None, None),
            ("target linearity after layer 1", "target_linearity", None, "hidden2"),
            ("before the readout", "target_linearity", None, "readout"),
            ("NFA of layer 1", "nfa", None, "hidden1"),
        ):
            found = _at(runs.records, key, epoch=epoch, layer=layer)
            if key == "test_accuracy":
                row[heading] = f"{spread_text([100 * value for value in found], '.1f', '.1f', 2)} %" if found else ""
            else:
                row[heading] = spread_text(found, ".3f", ".3f", 2) if found else ""
        rows.append(row)
    return rows


def _at(
    records: Sequence[dict[str, Any]], key: str, *, epoch: float | None = None, layer: str | None = None
) -> list[float]:
    """Each run's value of ``key`` at an epoch, the last one by default."""
    found: dict[str, float] = {}
    for record in records:
        right_epoch = epoch is None or record["epoch"] == epoch
        if record.get(key) is not None and right_epoch and (layer is None or record.get("layer") == layer):
            found[record["run"]] = record[key]
    return list(found.values())
