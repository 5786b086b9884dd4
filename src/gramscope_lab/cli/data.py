"""``gramscope data``: list, fetch and verify data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    from gramscope_lab.cli.console import print_json, print_table
    from gramscope_lab.data.locate import data_root, locate
    from gramscope_lab.data.named_sets import catalogue

    root = data_root(data_dir)
    found = {entry.name: locate(entry.source, root) for entry in catalogue() if entry.source}
    rows = []
    for entry in catalogue():
        place = found.get(entry.name)
        rows.append({**entry.to_dict(), "folder": str(place.folder) if place else None})
    if as_json:
        print_json(rows)
        return
    table = [
        {
            "name": row["name"],
            "kind": _state(row),
            "train / test": f"{row['train']:,} / {row['test']:,}",
            "input": "×".join(map(str, row["input_shape"])),
            "outputs": f"{row['classes']} classes" if row["classes"] else "1 value",
            "about": f"{row['description']}. {row['citation']}",
        }
        for row in rows
    ]
    print_table(f"data sets (data directory: {root})", table)


def _state(row: dict[str, Any]) -> str:
    if row["kind"] != "downloaded":
        return str(row["kind"])
    return "on disk" if row["folder"] else f"to fetch, {row['download_bytes'] / 1e6:.0f} MB"


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
    from gramscope_lab.cli.console import print_json
    from gramscope_lab.data.download import fetch as fetch_source
    from gramscope_lab.data.locate import data_root
    from gramscope_lab.data.named_sets import catalogue, find_entry

    root = data_root(data_dir)
    entries = [entry for entry in catalogue() if entry.source] if names == ["all"] else [find_entry(n) for n in names]
    results = []
    for entry in entries:
        folder = fetch_source(entry.source, root, force=force).folder if entry.source else None
        results.append({"name": entry.name, "kind": entry.kind, "folder": str(folder) if folder else None})
        if not as_json:
            typer.echo(f"{entry.name}: {folder}" if folder else f"{entry.name}: nothing to fetch, it is {entry.kind}")
    if as_json:
        print_json(results)


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Names; every set on disk when left out.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compare the files on disk with the published digests; exit code 1 if one differs.

    Example: gramscope data verify cifar10 --data-dir ~/data
    """
    from gramscope_lab.cli.console import print_json, print_table
    from gramscope_lab.data.locate import data_root, locate
    from gramscope_lab.data.named_sets import catalogue, find_entry
    from gramscope_lab.data.verify import verify as verify_source

    root = data_root(data_dir)
    if names:
        entries = [find_entry(name) for name in names]
    else:
        entries = [entry for entry in catalogue() if entry.source and locate(entry.source, root)]
    checks = [(entry.name, check) for entry in entries if entry.source for check in verify_source(entry.source, root)]
    rows = [{"name": name, "file": str(check.path), "state": check.state, "note": check.note} for name, check in checks]
    if as_json:
        print_json(rows)
    elif rows:
        print_table("", rows)
    else:
        typer.echo(f"no downloaded data set in {root}")
    if any(check.state == "bad" for _, check in checks):
        raise typer.Exit(1)
