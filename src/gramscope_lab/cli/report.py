"""``gramscope report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Optional

import typer

from gramscope.errors import InputError
from gramscope_lab.cli.console import messages, print_json, results

_Path = Optional[Path]  # noqa: UP045 - typer reads it at run time
_Names = Optional[list[str]]  # noqa: UP045


def command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directories or groups; several are compared.")
    ],
    out: Annotated[
        _Path,
        typer.Option(help="Folder to write to (default: RUN/figures, or report for several runs).", show_default=False),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Also write every figure as PNG and PDF.")] = True,
    live: Annotated[bool, typer.Option("--live", help="Serve the report and refresh it while the runs go on.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to serve on; all but 127.0.0.1 and ::1 are reachable from the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on (0: any free one).")] = 8787,
    allow_host: Annotated[
        _Names,
        typer.Option(help="A further host name under which browsers may ask; may be repeated.", show_default=False),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON.")] = False,
) -> None:
    """Show runs: one HTML page that needs no network, and the same figures as PNG and PDF.

    [bold]Examples[/bold]

      gramscope report runs/x

      gramscope report runs/sgd runs/vcl --out comparison

      gramscope report --live runs/x
    """
    if live:
        if out is not None or json:
            raise InputError("--live serves the report and writes nothing; leave out --out and --json")
        _serve(runs, host, port, open_, allow_host or [])
        return
    from gramscope_lab.report.write import write_report

    report = write_report(runs, out, figures=figures)
    if json:
        print_json({"page": report.page, "figures": list(report.figures)})
    else:
        results().print(f"report: {report.page}", soft_wrap=True, markup=False)
        if report.figures:
            messages().print(f"{len(report.figures)} figures (PNG and PDF) beside it", markup=False)
    if open_:
        webbrowser.open(report.page.resolve().as_uri())


def _serve(runs: list[Path], host: str, port: int, open_: bool, names: list[str]) -> None:
    from gramscope_lab.report.live import is_reachable, make_server

    with make_server(runs, host, port, names=names) as server:
        if is_reachable(host):
            messages().print(f"warning: with --host {host} everybody on the network can read this report", markup=False)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{server.server_port}/"
        results().print(f"live report: {address}", soft_wrap=True, markup=False)
        messages().print("Ctrl-C stops it", markup=False)
        if open_:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            messages().print("stopped", markup=False)
