"""``python -m benchmarks NAME``: measure speed as ratios, or compare optimizers. Run it in a checkout; it is not installed."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gramscope.errors import GramscopeError, InputError

#: name → what it compares
BENCHMARKS = {
    "measure": "measuring every layer against plain forward and backward passes",
    "vcl": "VCL's solvers and FreeMuon against SGD, AdamW and Muon",
    "whiten": "Gram-whitened steps against the optimizers they wrap",
    "peers": "gramscope against scikit-learn, curvlinops, xrfm and plain programs: time and memory",
    "train": "training epochs against pure arithmetic and a DataLoader; many runs at once",
    "scale": "how time grows in samples, widths, layers and processes, and flops beside the matmul peak",
}
#: runs all of them
ALL = "all"
#: comparisons of results rather than speed
COMPARISONS = {"optimizers": "FreeMuon against tuned SGD, AdamW and Muon: accuracy, spread over rates, seconds"}
#: name → module of this folder, where they differ
_MODULES = {"measure": "measure_speed", "vcl": "vcl_speed", "train": "train_speed"}


def run_benchmark(name: str, *, device: str = "cpu", seconds: float | None = None) -> Iterator[Any]:
    """Run one benchmark; each row comes as soon as it is measured.

    Args:
        name: a key of :data:`BENCHMARKS`; its module is imported now.
        device: where to run it.
        seconds: time to spend on each comparison; the benchmark's own choice by default.
    """
    if seconds is not None and not 0 <= seconds < math.inf:
        raise InputError(f"seconds = {seconds:g}: must be a finite number of at least 0")
    arguments = {} if seconds is None else {"seconds": seconds}
    rows: Iterator[Any] = import_module(f"benchmarks.{_MODULES.get(name, name)}").run(device=device, **arguments)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, run, print a line for each row, or JSON; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.name is None:
            for name, text in (BENCHMARKS | COMPARISONS).items():
                print(f"{name:<12}{text}")
        elif options.name == "optimizers":
            _optimizers(options)
        else:
            _speed(options)
    except GramscopeError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2 if isinstance(error, InputError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*BENCHMARKS, *COMPARISONS, ALL]
    parser.add_argument("name", nargs="?", choices=names, help="all runs every comparison of speed; no name lists them")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 …")
    parser.add_argument("--seconds", type=float, help="time for each comparison")
    parser.add_argument("--json", action="store_true", help="print JSON")
    only = parser.add_argument_group("optimizers alone")
    only.add_argument("--scale", choices=["quick", "full"], default="quick", help="quick: on shipped data")
    only.add_argument("--data-dir", help="folder with MNIST and CIFAR-10")
    only.add_argument(
        "--task", action="append", help="NET:DATA, such as mlp:mnist, in place of the scale's; repeatable"
    )
    only.add_argument("--steps", help="budgets, such as 10,100")
    only.add_argument("--seeds", type=int, help="seeds of each run")
    only.add_argument("--records", type=Path, help="JSON lines of all runs; those it holds are not run again")
    only.add_argument("--picture", type=Path, help="draw accuracy against rate here")
    return parser


def _speed(options: argparse.Namespace) -> None:
    """Run one comparison of speed, or all."""
    if any((options.data_dir, options.task, options.steps, options.seeds, options.records, options.picture)):
        raise InputError(f"{options.name} takes only --device, --seconds and --json; the others are for optimizers")
    try:
        device = str(torch.device(options.device))
    except RuntimeError as error:
        raise InputError(f"device = {options.device!r}: use cpu, cuda, cuda:1 …") from error
    chosen = list(BENCHMARKS) if options.name == ALL else [options.name]
    rows: dict[str, list[object]] = {}
    for name in chosen:
        rows[name] = []
        if not options.json:
            print(f"{name} on {device}: {BENCHMARKS[name]}", flush=True)
        for row in run_benchmark(name, device=device, seconds=options.seconds):
            rows[name].append(asdict(row))
            if not options.json:
                print(row.line(), flush=True)
    if options.json:
        print(json.dumps(rows if options.name == ALL else rows[options.name], indent=1))


def _optimizers(options: argparse.Namespace) -> None:
    """Compare optimizers, print their scores and what rates do to them (as JSON one line for each method), and draw."""
    from benchmarks.optimizer_output import draw, rate_table, score_table
    from benchmarks.optimizers import compare_optimizers, lines

    tasks = [(net, data) for net, _, data in (text.partition(":") for text in options.task)] if options.task else None
    try:
        budgets = [int(part) for part in options.steps.split(",")] if options.steps else None
    except ValueError as error:
        raise InputError(
            f"steps = {options.steps!r}: give whole numbers separated by commas, such as 10,100"
        ) from error
    if budgets is not None and min(budgets) < 1:
        raise InputError(f"steps = {options.steps!r}: a run needs at least one step")
    trials = compare_optimizers(
        options.scale,
        data_dir=options.data_dir,
        device=options.device,
        tasks=tasks,
        budgets=budgets,
        seeds=options.seeds,
        records=options.records,
        tell=(lambda text: None) if options.json else print,
    )
    rows = lines(trials)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(f"{score_table(rows)}\n\nMedian over rates / spread (largest − least):\n\n{rate_table(rows)}")
    if options.picture is not None:
        draw(trials, options.picture)


if __name__ == "__main__":
    sys.exit(main())
