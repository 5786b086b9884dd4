"""``gramscope demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from gramscope.cli.console import TerminalReporter, news, print_json, print_table, results
from gramscope.errors import MissingExtraError
from gramscope.runs.directory import free_path


def command(
    out: Annotated[
        Optional[Path],  # noqa: UP045
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
    from gramscope.training.demonstration import demo_configs, run_demo, summarise

    began = time.perf_counter()
    out = out or free_path("demo")
    configs = demo_configs(epochs=epochs, seeds=range(seeds), device=device)
    rows = summarise(run_demo(configs, out, reporter=TerminalReporter()))
    report = write_report(out)
    if json:
        print_json({"path": out, "summary": rows, "report": report})
        return
    print_table(f"digits, {epochs:g} epochs, {seeds} seeds: mean ± 2σ", rows)
    news().print(f"done in {time.perf_counter() - began:.0f} s; records and checkpoints are in {out}")
    if report is not None:
        results().print(f"report: {report}")


def write_report(out: Path, *, figures: bool = True) -> Path | None:
    """The report, with static figures too if asked; none, with a note, where its libraries are missing."""
    from gramscope.report import write

    try:
        return write.write_report([out], figures=figures).page
    except MissingExtraError as error:
        news().print(str(error))
        return None
