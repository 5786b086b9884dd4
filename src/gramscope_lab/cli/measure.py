"""``gramscope measure``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramscope.errors import InputError
from gramscope_lab.cli.console import print_json, results
from gramscope_lab.cli.flags import parse_assignments, refuse_unused
from gramscope_lab.spread import spread
from gramscope_lab.training.config import DataTable, MeasureTable, ModelTable

if TYPE_CHECKING:
    from gramscope.measures.table import Table
    from gramscope_lab.training.layer_measures import Measured


_OWN = "Your own net"
_FOLDER = "A model of transformers"
#: options of the three forms alone
_OF_OWN = {"model", "weights", "data", "data_dir", "loss", "set_"}
_OF_FOLDERS = {"text", "length", "out"}
_OF_RUNS = {"every", "part", "device", "per_seed", "trust", "json"}


def command(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(help="A run, a group of runs, a checkpoint, or the folder of a model of transformers."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every kept checkpoint, in order, not only the newest.")] = False,
    model: Annotated[
        str | None, typer.Option(help="package.module:factory, or mlp, cnn …", rich_help_panel=_OWN)
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights: .safetensors or .pt.", rich_help_panel=_OWN)] = None,
    data: Annotated[str | None, typer.Option(help="Data set or .npz file.", rich_help_panel=_OWN)] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(help="Folder of downloaded sets (default: GRAMSCOPE_DATA, or the cache).", rich_help_panel=_OWN),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="auto (the default), cross-entropy, mse or half-squared.", rich_help_panel=_OWN)
    ] = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="Options: model.width=64, data.seed=3.", rich_help_panel=_OWN, show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    text: Annotated[
        Path | None,
        typer.Option(help="Text for a model of transformers, cut by its own tokenizer.", rich_help_panel=_FOLDER),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of --text.", rich_help_panel=_FOLDER)] = 128,
    out: Annotated[
        Path | None, typer.Option(help="Where its table and maps go (default: NAME-measured).", rich_help_panel=_FOLDER)
    ] = None,
    part: Annotated[str, typer.Option(help="Samples of which part: train, validation or test.")] = "train",
    samples: Annotated[int, typer.Option(help="Samples to measure on.")] = 1000,
    layers: Annotated[str, typer.Option(help="Glob of the layers, such as 'hidden*'.", show_default=False)] = "",
    measures: Annotated[
        str | None,
        typer.Option(help="Measures with commas between, or all (default: the usual ones).", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    per_seed: Annotated[
        bool, typer.Option("--per-seed", help="One table a seed instead of mean ± standard deviation over seeds.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the run's configuration name a function of your own as the net.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one table a run.")] = False,
) -> None:
    """Measure every layer of trained nets: ours from a run directory, or your own.

    [bold]Examples[/bold]

      gramscope measure runs/x

      gramscope measure runs/x --all --measures target_linearity,nfa --json

      gramscope measure runs/x/seed-0/checkpoints/step-000000069

      gramscope measure path/to/gpt2 --text book.txt

      gramscope measure --model mypackage.nets:build --weights w.safetensors --data mydata.npz
    """
    names = tuple(name.strip() for name in measures.split(",")) if measures else ()
    table = MeasureTable(samples=samples, layers=layers, names=names)
    if run is not None and (run / "config.json").is_file():
        refuse_unused(context, _OF_RUNS | _OF_OWN - {"data"}, f"with the model of transformers in {run}")
        columns = list(names) or None
        measure_folder(run, text, None if data is None else Path(data), samples, length, layers or None, columns, out)
        return
    if run is not None:
        refuse_unused(
            context, _OF_OWN | _OF_FOLDERS, f"with the run {run}, which is measured as its configuration says"
        )
        from gramscope_lab.training.layer_measures import measure_runs

        found = list(measure_runs(run, table, part=part, every=every, device=device, trust=trust))
    elif model is not None and data is not None:
        refuse_unused(context, (_OF_RUNS | _OF_FOLDERS) - {"part", "device", "json"}, "with a net of your own")
        from gramscope_lab.training.layer_measures import measure_own

        net, source = _own_tables(model, data, data_dir, set_)
        found = [measure_own(net, weights, source, table, loss=loss or "auto", part=part, device=device)]
    else:
        raise InputError("name a run directory, or your own net with --model and --data (and --weights)")
    if json:
        print_json([item.to_dict() for item in found])
        return
    for title, shown in _tables(found, per_seed, every):
        results().print(title)
        for line in str(shown).splitlines():
            results().print(line)


def measure_folder(
    folder: Path,
    text: Path | None,
    arrays: Path | None,
    samples: int,
    length: int,
    layers: str | None,
    columns: list[str] | None,
    out: Path | None,
) -> None:
    """Measure the model of transformers in a folder; print its table, store it, and draw each column."""
    from gramscope import measure
    from gramscope.instruments.checkpoints import open_model
    from gramscope.measures.table import NARROW
    from gramscope_lab.data.sequences import read_sequences

    batches = read_sequences(text, arrays, folder, samples=min(samples, 256), length=length)
    table = measure(open_model(folder), batches, measures=columns, layers=layers)
    view = table.by_block()
    others = replace(table, notes={name: note for name, note in table.notes.items() if name not in view.notes})
    typer.echo("\n".join([str(view), *others.remarks(NARROW)]))
    place = Path(f"{folder.resolve().name}-measured") if out is None else out
    place.mkdir(parents=True, exist_ok=True)
    table.save(place / "table.json")
    for column in table.columns:
        if any(value is not None for value in table.column(column).values()):
            table.plot(column).savefig(place / f"{column}.png", dpi=150)
    typer.echo(f"table and maps of {len(table.columns)} measures: {place}", err=True)


def _own_tables(model: str, data: str, data_dir: str | None, settings: list[str]) -> tuple[ModelTable, DataTable]:
    options = parse_assignments(settings)
    for key, value in options.items():
        if key not in ("model", "data") or not isinstance(value, dict):
            raise InputError(f"--set {key}: set model.KEY or data.KEY, such as model.width=64")
    net = ModelTable.from_table({"name": model, **options.get("model", {})})
    return net, DataTable.from_table({"name": data, "dir": data_dir or "", **options.get("data", {})})


def _tables(found: Sequence[Measured], per_seed: bool, every: bool) -> Iterator[tuple[str, Table]]:
    """Title and table of each run, or of all seeds of one setting together."""
    groups: dict[Any, list[Measured]] = {}
    for item in found:
        setting = item.name if per_seed else re.sub(r"[,/]?\bseed-\d+$", "", item.name)
        groups.setdefault((setting, item.step if every else None), []).append(item)
    for (setting, _), items in groups.items():
        name = items[0].name if len(items) == 1 else f"{setting} {len(items)} seeds, mean ± σ".strip()
        steps = sorted({item.step for item in items if item.step is not None})
        epochs = sorted({item.epoch for item in items if item.epoch is not None})
        when = f", step {_range(steps)} (epoch {_range(epochs)})" if steps else ""
        yield name + when, items[0].table if len(items) == 1 else _over_seeds([item.table for item in items])


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def _over_seeds(tables: Sequence[Table]) -> Table:
    """Mean ± standard deviation of each entry over the tables that have it."""
    from gramscope.measures.table import Table, with_errors

    rows: dict[str, dict[str, float | None]] = {}
    deviations: dict[str, dict[str, float]] = {}
    for layer in dict.fromkeys(layer for table in tables for layer in table):
        for name in dict.fromkeys(name for table in tables for name in table.columns):
            values = [x for table in tables if (x := table.rows.get(layer, {}).get(name)) is not None]
            found = spread(values)
            rows.setdefault(layer, {})[name] = None if found is None else found.mean
            deviations.setdefault(layer, {}).update({} if found is None else {name: found.deviation})
    notes = {name: note for table in tables for name, note in table.notes.items()}
    return Table(with_errors(rows, deviations), notes=notes)
