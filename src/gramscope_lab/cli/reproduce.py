"""``gramscope reproduce``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramscope.errors import GramscopeError, InputError
from gramscope_lab.cli.console import TerminalReporter, messages, print_json, print_table, results, without_empty
from gramscope_lab.cli.flags import Gpus, ParallelOption, parse_assignments, parse_seeds, refuse_unused

if TYPE_CHECKING:
    from gramscope_lab.experiments.experiment import Reproduction

_HOLDS = {True: "yes", False: "no", None: "open"}


def command(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Experiments, or all.", show_default=False)] = [],  # noqa: B006 - typer copies it
    scale: Annotated[
        str, typer.Option(help="quick (two minutes at most) or paper (the published settings).")
    ] = "quick",
    data: Annotated[str | None, typer.Option(help="Data sets, with commas between.", show_default=False)] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of downloaded sets.", show_default=False)] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (5), or which (0,3,7).", show_default=False)] = None,
    set_: Annotated[
        list[str], typer.Option("--set", help="Any other setting: steps=400. Can be repeated.", show_default=False)
    ] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    parallel: ParallelOption = "auto",
    gpus: Gpus = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory (default: runs/NAME-SCALE); with several names their parent.", show_default=False
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force/--resume", help="Start again, or go on with what is in the directory.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reproduce published results: run, draw the figure, and compare every claim with what was measured.

    What is complete in the run directory is kept, so the same command goes on after an interruption, and draws and
    judges again without training once all is there. A claim that does not hold is reported, and the command still succeeds.

    [bold]Examples[/bold]

      gramscope reproduce --list

      gramscope reproduce nfa-fig1

      gramscope reproduce nfa-fig2 --scale paper --seeds 5

      gramscope reproduce all --scale quick --out runs/quick
    """
    if list_:
        used = ("context", "list_", "json")
        refuse_unused(context, [name for name in context.params if name not in used], "with --list")
        _list(json)
        return
    if not names:
        raise InputError("name an experiment, or all; gramscope reproduce --list shows them")
    if scale not in ("quick", "paper"):
        raise InputError(f"--scale {scale}: use quick or paper")
    from gramscope_lab.experiments.catalogue import catalogue, find
    from gramscope_lab.experiments.experiment import Options, default_directory, reproduce
    from gramscope_lab.training.train import Parallel

    chosen = [entry.name for entry in catalogue()] if names == ["all"] else [find(name).name for name in names]
    values = _values(data, seeds, set_)
    options = Options(scale, data_dir or "", device)  # type: ignore[arg-type]
    run = partial(
        reproduce,
        options=options,
        values=values,
        force=force,
        reporter=TerminalReporter(),
        parallel=Parallel(parallel, gpus),
    )
    if len(chosen) == 1:
        made = run(chosen[0], out=out)
        print_json(made.to_dict()) if json else _show(made)
    else:
        paths = {name: None if out is None else out / default_directory(name, options).name for name in chosen}
        _several(paths, run, json)


def _several(paths: dict[str, Path | None], run: Callable[..., Reproduction], json: bool) -> None:
    """Run one after the other; an experiment that cannot run does not stop the rest, but the command fails."""
    from gramscope_lab.training.reporter import Interrupted

    summary: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for name, path in paths.items():
        try:
            made = run(name, out=path)
        except Interrupted:
            raise
        except GramscopeError as error:
            messages().print(f"{name}: {error}")
            summary.append({"experiment": name, "seconds": None, "hold": None, "claims": None, "note": str(error)})
            found.append({"name": name, "error": str(error)})
            continue
        if not json:
            _show(made)
        found.append(made.to_dict())
        hold, claims = sum(claim.holds is True for claim in made.claims), len(made.claims)
        summary.append({"experiment": name, "seconds": made.seconds, "hold": hold, "claims": claims, "note": ""})
    print_json(found) if json else print_table("all", summary)
    if any("error" in item for item in found):
        raise typer.Exit(1)


def _show(made: Reproduction) -> None:
    from gramscope_lab.report import write_report

    rows = [
        {
            "claim": c.claim,
            "published": c.published,
            "measured": c.measured,
            "holds?": _HOLDS[c.holds],
            "reason": c.reason,
        }
        for c in made.claims
    ]
    entry = made.entry
    title = f"{entry.name} ({entry.source}), {made.options.scale} scale, {made.seconds:.0f} s"
    print_table(title, without_empty(rows, "reason"))
    results().print(f"figure: {made.figures[0]}")
    results().print(f"report: {write_report([made.path])}")


def _values(data: str | None, seeds: str | None, settings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = parse_assignments(settings)
    if data is not None:
        values["data"] = tuple(name.strip() for name in data.split(",") if name.strip())
    if seeds is not None:
        values["seeds"] = tuple(parse_seeds(seeds))
    return values


def _list(json: bool) -> None:
    from gramscope_lab.experiments.catalogue import PAPERS, catalogue

    entries = [entry.to_dict() for entry in catalogue()]
    if json:
        print_json(entries)
        return
    print_table("", entries)
    for number in sorted({entry["source"].split()[0] for entry in entries}):
        results().print(f"{number}: {PAPERS[number]}")
