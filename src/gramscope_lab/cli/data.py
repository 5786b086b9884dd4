"""``gramscope data``: list and fetch data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gramscope_lab.data.named_sets import Entry

app = typer.Typer(no_args_is_help=True, help="List and fetch data sets.")

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
    from gramscope_lab.data.downloads import data_root
    from gramscope_lab.data.named_sets import catalogue

    root = data_root(data_dir)
    rows = [{**entry.to_dict(), "folder": _folder(entry, root)} for entry in catalogue()]
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


def _folder(entry: Entry, root: Path) -> str | None:
    """The folder a downloaded set lies in."""
    from gramscope_lab.data.downloads import locate

    files = locate(entry.source, root) if entry.source else None
    return str(next(iter(files.values())).parent) if files else None


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
    """Download data sets, check their SHA-256 and unpack them.

    Example: gramscope data fetch mnist cifar10
    """
    from gramscope_lab.cli.console import print_json
    from gramscope_lab.data.downloads import data_root, ensure
    from gramscope_lab.data.named_sets import catalogue, find_entry

    root = data_root(data_dir)
    entries = [entry for entry in catalogue() if entry.source] if names == ["all"] else [find_entry(n) for n in names]
    results = []
    for entry in entries:
        if entry.source:
            ensure(entry.source, root, force=force)
        folder = _folder(entry, root)
        results.append({"name": entry.name, "kind": entry.kind, "folder": folder})
        if not as_json:
            typer.echo(f"{entry.name}: {folder}" if folder else f"{entry.name}: nothing to fetch, it is {entry.kind}")
    if as_json:
        print_json(results)
