"""``gramscope measure``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from gramscope.cli.console import news, print_json, print_table
from gramscope.cli.flags import parse_assignments
from gramscope.errors import InputError
from gramscope.training.config_tables import DataTable, MeasureTable, ModelTable

_Path = Optional[Path]  # noqa: UP045 - typer reads it at run time
_Text = Optional[str]  # noqa: UP045

_OWN = "Your own net"


def command(
    run: Annotated[_Path, typer.Argument(help="A run, a group of runs, or one checkpoint folder.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every kept checkpoint, in order, not only the newest.")] = False,
    model: Annotated[_Text, typer.Option(help="package.module:factory, or mlp, cnn …", rich_help_panel=_OWN)] = None,
    weights: Annotated[_Path, typer.Option(help="Weights: .safetensors or .pt.", rich_help_panel=_OWN)] = None,
    data: Annotated[_Text, typer.Option(help="Data set or .npz file.", rich_help_panel=_OWN)] = None,
    data_dir: Annotated[
        _Text,
        typer.Option(help="Folder of downloaded sets (default: GRAMSCOPE_DATA, or the cache).", rich_help_panel=_OWN),
    ] = None,
    loss: Annotated[
        _Text, typer.Option(help="auto (the default), cross-entropy, mse or half-squared.", rich_help_panel=_OWN)
    ] = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="Options: model.width=64, data.seed=3.", rich_help_panel=_OWN, show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    part: Annotated[str, typer.Option(help="Samples of which part: train, validation or test.")] = "train",
    samples: Annotated[int, typer.Option(help="Samples to measure on.")] = 1000,
    layers: Annotated[str, typer.Option(help="Glob of the layers, such as 'hidden*'.", show_default=False)] = "",
    measures: Annotated[
        _Text, typer.Option(help="Measures with commas between (default: the usual ones).", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every layer of trained nets: ours from a run directory, or your own.

    [bold]Examples[/bold]

      gramscope measure runs/x

      gramscope measure runs/x --all --measures target_linearity,nfa --json

      gramscope measure runs/x/seed-0/checkpoints/step-000000069

      gramscope measure --model mypackage.nets:build --weights w.safetensors --data mydata.npz
    """
    names = tuple(name.strip() for name in measures.split(",")) if measures else ()
    table = MeasureTable(samples=samples, layers=layers, names=names)
    if run is not None:
        if model or weights or data:
            raise InputError("measure either a run directory, or your own net with --model and --data, not both")
        own = {"--data-dir": data_dir, "--loss": loss, "--set": set_}
        given = [flag for flag, value in own.items() if value]
        if given:
            raise InputError(f"{run} is measured as its own configuration says: leave out {', '.join(given)}")
        from gramscope.training.layer_measures import measure_runs

        found = list(measure_runs(run, table, part=part, every=every, device=device))
    elif model is not None and data is not None:
        if every:
            raise InputError("--all chooses checkpoints of a run; your own net has the weights of --weights")
        from gramscope.training.layer_measures import measure_own

        net, source = _own_tables(model, data, data_dir, set_)
        found = [measure_own(net, weights, source, table, loss=loss or "auto", part=part, device=device)]
    else:
        raise InputError("name a run directory, or your own net with --model and --data (and --weights)")
    if json:
        print_json([item.to_dict() for item in found])
        return
    for item in found:
        title = item.name if item.step is None else f"{item.name}, step {item.step} (epoch {item.epoch:g})"
        print_measures(title, item.table.rows)
    for note in dict.fromkeys(f"{where}: {reason}" for item in found for where, reason in item.table.notes.items()):
        news().print(f"note: {note}")


def _own_tables(model: str, data: str, data_dir: str | None, settings: list[str]) -> tuple[ModelTable, DataTable]:
    options = parse_assignments(settings)
    for key, value in options.items():
        if key not in ("model", "data") or not isinstance(value, dict):
            raise InputError(f"--set {key}: set model.KEY or data.KEY, such as model.width=64")
    net = ModelTable.from_table({"name": model, **options.get("model", {})})
    return net, DataTable.from_table({"name": data, "dir": data_dir or "", **options.get("data", {})})


def print_measures(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of layers by measures, lying on its side when there are more measures than layers."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    shown = [name for name in columns if any(row.get(name) is not None for row in rows.values())]
    if len(shown) > max(len(rows), 6):
        table = [{"measure": m} | {layer: row.get(m) for layer, row in rows.items()} for m in shown]
    else:
        table = [{"layer": layer} | {m: row.get(m) for m in shown} for layer, row in rows.items()]
    print_table(title, table, verbatim=True)
