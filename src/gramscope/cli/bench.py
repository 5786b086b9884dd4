"""``gramscope bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gramscope.bench.benchmarks import ALL, BENCHMARKS, COMPARISONS, run_benchmark
from gramscope.cli.console import messages, print_json, results, show
from gramscope.errors import InputError


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join([*BENCHMARKS, *COMPARISONS])}, or all (of speed); without a name they are listed."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "cpu",
    seconds: Annotated[
        float | None,
        typer.Option(help="Time for each comparison.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    scale: Annotated[str, typer.Option(help="Of optimizers: quick, on shipped data, or full.")] = "quick",
    data_dir: Annotated[str | None, typer.Option(help="Of optimizers: folder with MNIST and CIFAR-10.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Of optimizers: NET:DATA, such as mlp:mnist, in place of the scale's. Repeatable."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Of optimizers: budgets, such as 10,100.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Of optimizers: seeds of each run.", min=1)] = None,
    records: Annotated[
        Path | None, typer.Option(help="Of optimizers: JSON lines of all runs; those it holds are not run again.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Of optimizers: draw accuracy against rate here.")] = None,
) -> None:
    """Measure speed: ratios of interleaved medians, taken in one run; or compare optimizers.

    [bold]Examples[/bold]

      gramscope bench

      gramscope bench train

      gramscope bench vcl --device cuda --json

      gramscope bench all --json > bench.json

      gramscope bench optimizers --scale full --data-dir data --records runs.jsonl --picture rates.png
    """
    if name is None:
        rows = [{"name": key, "what": what} for key, what in (BENCHMARKS | COMPARISONS).items()]
        show("", rows, json)
        return
    known = {**BENCHMARKS, **COMPARISONS, ALL: "every comparison of speed"}
    if name not in known:
        raise InputError(f"benchmark {name!r} is not known; there are: {', '.join(known)}")
    from gramscope.training.job import resolve_device

    device = str(resolve_device(device))
    if name == "optimizers":
        _optimizers(scale, data_dir, device, task, steps, seeds, records, picture, json)
        return
    if any((data_dir, task, steps, seeds, records, picture)) or scale != "quick":
        raise InputError(f"bench {name} takes only --device, --seconds and --json; the others are for bench optimizers")
    chosen = list(BENCHMARKS) if name == ALL else [name]
    benchmarks = {key: run_benchmark(key, device=device, seconds=seconds) for key in chosen}
    if not json:
        messages().print(f"measuring {name} on {device}: {known[name]} …")
    found: dict[str, list[dict[str, Any]]] = {}
    for key, measured in benchmarks.items():
        found[key] = []
        if name == ALL and not json:
            results().print(key)
        for row in measured:
            found[key].append(row.to_dict())
            if not json:
                results().print(row.line())
    if json:
        print_json(found if name == ALL else found[name])


def _optimizers(
    scale: str,
    data_dir: str | None,
    device: str,
    task: list[str] | None,
    steps: str | None,
    seeds: int | None,
    records: Path | None,
    picture: Path | None,
    json: bool,
) -> None:
    """Compare optimizers, print their scores and what rates do to them (as JSON one line for each method), and draw."""
    from gramscope.bench.optimizer_table import rate_table, score_table
    from gramscope.bench.optimizers import compare_optimizers, lines

    tasks = [(net, data) for net, _, data in (text.partition(":") for text in task)] if task else None
    try:
        budgets = [int(part) for part in steps.split(",")] if steps else None
    except ValueError as error:
        raise InputError(f"steps = {steps!r}: give whole numbers separated by commas, such as 10,100") from error
    if budgets is not None and min(budgets) < 1:
        raise InputError(f"steps = {steps!r}: a run needs at least one step")
    trials = compare_optimizers(
        scale,
        data_dir=data_dir,
        device=device,
        tasks=tasks,
        budgets=budgets,
        seeds=seeds,
        records=records,
        tell=(lambda text: None) if json else messages().print,
    )
    found = lines(trials)
    if json:
        print_json([line.to_dict() for line in found])
    else:
        print(f"{score_table(found)}\n\nMedian over rates / spread (largest − least):\n\n{rate_table(found)}")
    if picture is not None:
        from gramscope.bench.optimizer_picture import draw

        draw(trials, picture)
