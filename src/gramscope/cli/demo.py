"""``gramscope demo``."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

from gramscope.cli.console import TerminalReporter, news, print_json, print_table
from gramscope.errors import MissingExtraError


def command(
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where to write [default: demo, numbered].", show_default=False),
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
    from gramscope.training.demo import demo_configs, run_demo, summarise

    began = time.perf_counter()
    out = out or free_name("demo")
    configs = demo_configs(epochs=epochs, seeds=range(seeds), device=device)
    rows = summarise(run_demo(configs, out, reporter=TerminalReporter()))
    written = write_figures(out)
    if json:
        print_json({"path": out, "summary": rows, "written": written})
        return
    print_table(f"digits, {epochs:g} epochs, {seeds} seeds: mean ± 2σ", rows)
    news().print(f"done in {time.perf_counter() - began:.0f} s; everything is in {out}")
    for path in written:
        news().print(f"  {path}")


def free_name(name: str) -> Path:
    """A directory of this name, numbered if it is taken."""
    number = 1
    while (path := Path(name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def write_figures(out: Path) -> list[Path]:
    """The report if it is there, else plain figures; nothing, with a note, where matplotlib is missing."""
    try:
        if find_spec("gramscope.report.build") is not None:
            from gramscope.report.build import write_report  # type: ignore[import-not-found]

            return [Path(path) for path in write_report([out])]
        from gramscope.cli.figures import demo_figures

        return demo_figures(out)
    except MissingExtraError as error:
        news().print(str(error))
        return []
