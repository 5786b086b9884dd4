"""``gramscope data``: list, fetch and verify data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List, fetch and verify data sets.")

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", envvar="GRAMSCOPE_DATA", help="Folder with the data sets.", show_default="the user's cache"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_sets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List every data set: what it is, where it comes from and whether it is on disk.

    Example: gramscope data list --data-dir ~/data
    """
    from gramscope.data.locate import data_root, locate
    from gramscope.data.registry import catalogue

    root = data_root(data_dir)
    rows = []
    for entry in catalogue():
        found = locate(entry.source, root) if entry.source else None
        rows.append((entry, str(found.folder) if found else None))
    if as_json:
        typer.echo(json.dumps([{**entry.to_dict(), "folder": folder} for entry, folder in rows], indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"data sets (data directory: {root})", title_justify="left", show_lines=False)
    for heading in ("name", "kind", "train / test", "input", "outputs"):
        table.add_column(heading, no_wrap=True)
    table.add_column("about", ratio=1)
    for entry, folder in rows:
        size = sum(file.size for file in entry.source.archives) if entry.source else 0
        kind = entry.kind if not entry.source else ("on disk" if folder else f"to fetch, {size / 1e6:.0f} MB")
        table.add_row(
            entry.name,
            kind,
            f"{entry.train:,} / {entry.test:,}",
            "×".join(map(str, entry.input_shape)),
            f"{entry.classes} classes" if entry.classes else "1 value",
            f"{entry.description}. [dim]{entry.citation}[/dim]",
        )
    Console().print(table)


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="Names from `gramscope data list`, or `all`.")],
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are not the official ones.")] = False,
    as_json: Json = False,
) -> None:
    """Download data sets, check their SHA-256 and unpack them. A broken download is resumed.

    Example: gramscope data fetch mnist cifar10
    """
    from gramscope.data.download import fetch as fetch_source
    from gramscope.data.locate import data_root
    from gramscope.data.registry import catalogue, find_entry

    root = data_root(data_dir)
    entries = [entry for entry in catalogue() if entry.source] if names == ["all"] else [find_entry(n) for n in names]
    results = []
    for entry in entries:
        folder = fetch_source(entry.source, root, force=force).folder if entry.source else None
        results.append({"name": entry.name, "kind": entry.kind, "folder": str(folder) if folder else None})
        if not as_json:
            typer.echo(f"{entry.name}: {folder}" if folder else f"{entry.name}: nothing to fetch, it is {entry.kind}")
    if as_json:
        typer.echo(json.dumps(results, indent=2))


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Names; every set on disk when left out.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compare the files on disk with the published digests; exit code 1 if one differs.

    Example: gramscope data verify cifar10 --data-dir ~/data
    """
    from gramscope.data.locate import data_root, locate
    from gramscope.data.registry import catalogue, find_entry
    from gramscope.data.verify import verify as verify_source

    root = data_root(data_dir)
    if names:
        entries = [find_entry(name) for name in names]
    else:
        entries = [entry for entry in catalogue() if entry.source and locate(entry.source, root)]
    checks = [(entry.name, check) for entry in entries if entry.source for check in verify_source(entry.source, root)]
    if as_json:
        rows = [{"name": n, "path": str(c.path), "state": c.state, "note": c.note} for n, c in checks]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for name, check in checks:
            typer.echo(f"{check.state:9}  {name}  {check.path}  ({check.note})")
        if not checks:
            typer.echo(f"no downloaded data set in {root}")
    if any(check.state == "bad" for _, check in checks):
        raise typer.Exit(1)
