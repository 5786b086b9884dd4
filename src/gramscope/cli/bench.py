"""``gramscope bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from gramscope.bench.benchmarks import BENCHMARKS, run_benchmark
from gramscope.cli.console import messages, show


def command(
    name: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(BENCHMARKS)}; without a name they are listed."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "cpu",
    seconds: Annotated[
        float | None,
        typer.Option(help="Time for each comparison.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure speed: ratios of interleaved medians, taken in one run.

    [bold]Examples[/bold]

      gramscope bench

      gramscope bench train

      gramscope bench vcl --device cuda --json
    """
    if name is None:
        rows = [{"name": key, "what": what} for key, what in BENCHMARKS.items()]
        show("", rows, json)
        return
    from gramscope.training.job import resolve_device

    device = str(resolve_device(device))
    if not json:
        messages().print(f"measuring {name} on {device}: {BENCHMARKS.get(name, '')} …")
    found = [row.to_dict() for row in run_benchmark(name, device=device, seconds=seconds)]
    show("", found, json)
