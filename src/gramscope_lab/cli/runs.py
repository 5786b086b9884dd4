"""``gramscope runs``: list runs and show their results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gramscope.errors import GramscopeError, InputError
from gramscope_lab.cli.console import print_json, print_table, results, without_empty
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import CONFIG, RECORDS, natural
from gramscope_lab.runs.records import last_record

app = typer.Typer(no_args_is_help=True, help="List runs and show their results.")
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs"),
    json: _Json = False,
) -> None:
    """List the runs below a folder, with their state and last result.

    Example: gramscope runs list
    """
    rows = [_summary_or_error(run) for run in _below(folder)]
    if json:
        print_json(rows)
    elif rows:
        print_table("", without_empty(rows, "error"))
    else:
        results().print(f"no runs below {folder}; make one with: gramscope train --data digits")


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    json: _Json = False,
) -> None:
    """Show a run: configuration, how to repeat it, environment, and its evaluations.

    Example: gramscope runs show runs/x
    """
    directory = RunDirectory.open(run)
    evaluations = directory.records("evaluation")
    if json:
        facts = {"summary": summary(directory), "config": directory.config, "environment": directory.environment}
        print_json({**facts, "evaluations": evaluations})
        return
    console = results()
    print_table(str(run), [summary(directory)])
    if "method" in directory.config:
        console.print(f"Repeat it: gramscope train {directory.path / CONFIG}")
    facts = directory.environment
    if facts:
        console.print(f"Made with torch {facts.get('torch')} on {facts.get('device')}, {facts.get('started')}")
    hidden = {"kind", "method", "lr", "gamma", "step"}
    last: dict[Any, dict[str, Any]] = {str(record.get("run")): record for record in evaluations}
    rows = evaluations if len(last) == 1 else list(last.values())
    if rows:
        print_table(
            "Evaluations" if len(last) == 1 else "Last evaluations", rows, [k for k in rows[0] if k not in hidden]
        )


def summary(run: RunDirectory) -> dict[str, Any]:
    """One line about a run or group."""
    finals = [last_record(one.at(RECORDS), "evaluation") or {} for one in run.runs()]
    scores, epochs = ([r[key] for r in finals if _is_number(r.get(key))] for key in ("test_accuracy", "epoch"))
    return {
        **_identity(run, run.status()),
        "epoch": min(epochs, default=None),
        "test_accuracy": sum(scores) / len(scores) if scores else None,
    }


def _identity(run: RunDirectory, state: str) -> dict[str, Any]:
    """Facts about a run that need no records."""
    config = run.config
    tables = {key: config.get(key) for key in ("data", "model", "method")}
    names = {key: table.get("name") if isinstance(table, dict) else None for key, table in tables.items()}
    return {"run": str(run.path), "state": state, **names, "runs": sum(1 for _ in run.runs())}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _summary_or_error(run: RunDirectory) -> dict[str, Any]:
    """One line about a run, with the error if it cannot be read."""
    try:
        return {**summary(run), "error": None}
    except (GramscopeError, OSError) as error:
        reason = str(error)
    try:
        known = _identity(run, "unreadable")
    except (GramscopeError, OSError):
        known = {"run": str(run.path), "state": "unreadable"}
    return {**known, "error": reason}


def _below(folder: Path) -> list[RunDirectory]:
    if not folder.is_dir():
        if folder == Path("runs"):
            return []
        raise InputError(f"{folder} is not a folder")
    here = RunDirectory(folder)
    if here.exists():
        return [here]
    found = (
        inner for inner in here.folders() if inner.exists() or inner.members()
    )  # a group may have no configuration
    return sorted(found, key=lambda run: natural(run.path.name))
