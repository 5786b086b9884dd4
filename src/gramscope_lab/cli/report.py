"""``gramscope report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Optional

import typer

from gramscope_lab.cli.console import messages, print_json, results

_Path = Optional[Path]  # noqa: UP045 - typer reads it at run time


def command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directories or groups; several are compared.")
    ],
    out: Annotated[
        _Path,
        typer.Option(help="Folder to write to (default: RUN/figures, or report for several runs).", show_default=False),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Write the page again while the runs go on; browsers read it again.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print its path as JSON.")] = False,
) -> None:
    """Show runs: one HTML page that needs no network.

    [bold]Examples[/bold]

      gramscope report runs/x

      gramscope report runs/sgd runs/vcl --out comparison

      gramscope report --live runs/x
    """
    from gramscope_lab.report import write_live_report, write_report

    def show(page: Path) -> None:
        if json:
            print_json({"page": page})
        else:
            results().print(f"report: {page}", soft_wrap=True, markup=False)
        if open_:
            webbrowser.open(page.resolve().as_uri())

    if not live:
        show(write_report(runs, out))
        return
    messages().print("written again while the runs go on; Ctrl-C stops that", markup=False)
    try:
        write_live_report(runs, out, began=show)
    except KeyboardInterrupt:
        messages().print("stopped", markup=False)
