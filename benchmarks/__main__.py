"""``python -m benchmarks NAME``: measure speed as ratios, or compare optimizers. Run it in a checkout; it is not installed."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gramscope.errors import GramscopeError, InputError

#: name → what it compares
BENCHMARKS = {
    "measure": "measuring every layer against plain forward and backward passes",
    "vcl": "steps of FreeMuon and VCL beside SGD, AdamW and Muon: time, memory, CUDA graphs",
    "whiten": "Gram-whitened steps against the optimizers they wrap",
    "peers": "gramscope against scikit-learn, curvlinops and xrfm: time and memory",
    "train": "training epochs against pure arithmetic; many runs at once",
}
#: runs all of them
ALL = "all"
#: comparisons of results rather than speed
COMPARISONS = {"optimizers": "FreeMuon against methods without tuning and tuned ones: scores, sensitivity, seconds"}
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
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks: stopped\n")
        return 130
    except GramscopeError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2 if isinstance(error, InputError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    threads = "On a busy machine set OMP_NUM_THREADS=1: times are then those of the processor, without other programs'."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=threads)
    names = [*BENCHMARKS, *COMPARISONS, ALL]
    parser.add_argument("name", nargs="?", choices=names, help="all runs every comparison of speed; no name lists them")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 …")
    parser.add_argument("--seconds", type=float, help="time for each comparison")
    parser.add_argument("--json", action="store_true", help="print JSON")
    only = parser.add_argument_group(
        "optimizers alone",
        "A comparison that was stopped goes on where it stopped when it is started again with the same --records.",
    )
    only.add_argument("--scale", choices=["quick", "full"], default="quick", help="full: nine tasks, needs --data-dir")
    only.add_argument("--data-dir", help="folder with MNIST and CIFAR-10")
    only.add_argument(
        "--task", action="append", help="NET:DATA, such as mlp:mnist, in place of the scale's; repeatable"
    )
    only.add_argument("--method", action="append", help="beginning of a name, such as Muon; repeatable; all by default")
    only.add_argument("--steps", help="budgets, such as 10,100")
    only.add_argument("--seeds", type=int, default=3, help="runs of each method at each rate")
    only.add_argument("--factors", action="store_true", help="also 0.1 to 10 times the step length of untuned methods")
    only.add_argument(
        "--records", type=Path, help="file of all runs, a JSON line each; those it holds are not run again"
    )
    only.add_argument("--print", action="store_true", help="run nothing: print the tables of the runs in --records")
    only.add_argument("--picture", type=Path, help="draw scores over time here")
    return parser


def _speed(options: argparse.Namespace) -> None:
    """Run one comparison of speed, or all."""
    others = ["data_dir", "task", "method", "steps", "factors", "records", "print", "picture"]
    if any(getattr(options, name) for name in others):
        raise InputError(f"{options.name} takes only --device, --seconds and --json; the others are for optimizers")
    try:
        device = str(torch.empty(0, device=options.device).device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device = {options.device!r}: use cpu, cuda, cuda:1 … ({str(error).splitlines()[0]})"
        ) from error
    chosen = list(BENCHMARKS) if options.name == ALL else [options.name]
    rows: dict[str, list[object]] = {}
    threads = torch.get_num_threads()
    for name in chosen:
        torch.set_num_threads(threads)  # peers leave one
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
    """Compare optimizers, print the tables (as JSON one line for each method), and draw."""
    from benchmarks.optimizer_output import draw, report
    from benchmarks.optimizer_peers import competitors
    from benchmarks.optimizers import Records, compare_optimizers, lines

    tasks = [(net, data) for net, _, data in (text.partition(":") for text in options.task)] if options.task else None
    try:
        budgets = [int(part) for part in options.steps.split(",")] if options.steps else None
    except ValueError as error:
        raise InputError(f"steps = {options.steps!r}: give whole numbers with commas, such as 10,100") from error
    if budgets is not None and min(budgets) < 1:
        raise InputError(f"steps = {options.steps!r}: a run needs at least one step")
    if options.seeds < 1:
        raise InputError(f"seeds = {options.seeds}: at least one is needed")
    if options.print and options.records is None:
        raise InputError("--print shows the runs in --records: name that file")
    methods = [m for m in competitors() if options.method is None or m.name.startswith(tuple(options.method))]
    if not methods:
        raise InputError(f"method = {options.method}: there are {'; '.join(m.name for m in competitors())}")
    records = Records(options.records)
    if options.print:
        trials = [t for t in records.trials() if tasks is None or (t.net, t.data) in tasks]
        trials = [t for t in trials if budgets is None or t.steps in budgets]
    else:
        trials = compare_optimizers(
            options.scale,
            data_dir=options.data_dir,
            device=options.device,
            tasks=tasks,
            budgets=budgets,
            seeds=options.seeds,
            methods=methods,
            factors=options.factors,
            records=records,
            tell=(lambda text: None) if options.json else partial(print, flush=True),
        )
    print(
        json.dumps([asdict(row) for row in lines(trials, methods)], indent=1)
        if options.json
        else report(trials, methods)
    )
    if options.picture is not None:
        draw(trials, options.picture, methods)


if __name__ == "__main__":
    sys.exit(main())
