"""``gramscope demo``: three ways to train one small net on the digits, measured all the way."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gramscope.errors import InputError
from gramscope_lab.cli.console import TerminalReporter, messages, print_json, print_table, results
from gramscope_lab.runs.files import free_path

if TYPE_CHECKING:
    from gramscope_lab.report.read import Runs
    from gramscope_lab.training.config import TrainConfig

METHODS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    {"name": "vcl"},
    {"name": "free-muon"},
)
#: beyond what is measured while training anyway
MEASURES = ("nc2_equinorm", "nc2_equiangular", "nc3", "vcs_gram_cosine")


def command(
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write (default: demo, numbered).", show_default=False),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the digits.")] = 10,
    seeds: Annotated[int, typer.Option(help="Seeds of each method.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a small net on the digits with SGD, VCL and FreeMuon, and look inside: under a minute.

    Every layer is measured through training. Records and a report are written to a directory of its own.

    Example: gramscope demo
    """
    from gramscope_lab.report import write_report
    from gramscope_lab.report.read import read_runs
    from gramscope_lab.report.summary import sentences
    from gramscope_lab.training.train import train

    began = time.perf_counter()
    out = out or free_path("demo")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose another --out")
    reporter = TerminalReporter()
    for method in METHODS:
        reporter.note(f"{method['name']}:")
        train(configuration(method, epochs, range(seeds), device), out / method["name"], reporter=reporter)
    page = write_report([out])
    runs = read_runs([out])
    seen, layers = sentences(runs), layer_rows(runs)
    if json:
        print_json({"path": out, "summary": seen, "layers": layers, "report": page})
        return
    print_table(f"digits, {epochs:g} epochs, means of {len(runs.all) // len(METHODS)} seeds: start → end", layers)
    for sentence in seen:
        line = f"- {sentence}".replace(" %", "\u00a0%")
        results().print(textwrap.fill(line, 79, subsequent_indent="  "), markup=False, highlight=False)
    messages().print(f"done in {time.perf_counter() - began:.0f} s; records and checkpoints are in {out}")
    results().print(f"report: {page}")


def configuration(method: dict[str, Any], epochs: float, seeds: Sequence[int], device: str) -> TrainConfig:
    """An MLP with two hidden layers on the shipped digits."""
    from gramscope_lab.training.config import TrainConfig
    from gramscope_lab.training.layer_measures import WHILE_TRAINING

    names = [*WHILE_TRAINING, *MEASURES]
    return TrainConfig.from_dict({
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [64, 64], "activation": "gelu", "bias": [False, True, True]},
        "method": method,
        "seeds": list(seeds),
        "epochs": epochs,
        "device": device,
        "measure": {"every": max(1.0, epochs / 5), "samples": 500, "matrices": True, "names": names},
    })  # fmt: skip


def layer_rows(runs: Runs) -> list[dict[str, str]]:
    """One row for each method and layer: what the layer was at the start and is at the end, beside the nulls."""
    rows = []
    order = [method["name"] for method in METHODS]
    for setting in sorted(runs.settings, key=lambda setting: order.index(setting.name)):
        for layer in runs.measures.get("target_linearity", []):
            names = ("target_linearity", "target_linearity_null", "nfa", "nfa_null", "effective_rank")
            curves = [[v.mean for v in setting.curve(name, layer, runs.clock).values] for name in names]
            linear, null, nfa, nfa_null, rank = curves
            above = [a - b for a, b in zip(nfa, nfa_null, strict=False)]
            rows.append({
                "method": setting.name,
                "layer": layer,
                "target linearity": _course(linear),
                "null": f"{null[-1]:.2f}" if null else "",
                "nfa − null": _course(above),
                "effective rank": _course(rank, ".1f"),
            })  # fmt: skip
    return rows


def _course(values: Sequence[float], form: str = ".2f") -> str:
    """The first and the last value."""
    return f"{values[0]:{form}} → {values[-1]:{form}}" if values else ""
