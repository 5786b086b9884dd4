"""Three fine-tunings: does a column at 10 % of training rank the runs by final validation loss better than the loss does?

    python studies/over_training.py train FOLDER
    python studies/fine_tuning_alarm.py run FOLDER/step1500 fine_tuning_alarm.jsonl --workers 2
    python studies/fine_tuning_alarm.py show fine_tuning_alarm.jsonl

The character model of ``over_training.py`` is fine-tuned to English prose (Python's help topics), to Markdown (the pages of
this project) and to sums of numbers, ten times each, with learning rate, weight decay and seed drawn at random. At 10 % of
the steps all default columns are measured. ``show`` prints Spearman's ρ with the final validation loss. The columns are chosen
on two of the fine-tunings and judged on the third; errors are bootstraps over runs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from grokking_alarm import spearman
from over_training import characters, draw, encode, fit, held_out_loss
from torch import Tensor
from transformers import GPT2LMHeadModel

import gramscope as gs

RUNS, STEPS, EARLY, BATCH = 10, 80, 8, 8
BASELINES = ("validation loss", "training loss", "weight norm", "setting.rate", "setting.decay")


def texts() -> dict[str, str]:
    """The text of each fine-tuning."""
    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    numbers = random.Random(0)
    sums = "".join(f"{a}+{b}={a + b}\n" for a, b in (numbers.sample(range(1000), 2) for _ in range(20_000)))
    found = {
        "prose": "".join(topics.topics[name] for name in sorted(topics.topics)),
        "markdown": "".join(page.read_text(encoding="utf-8") for page in pages),
        "sums": sums,
    }
    return {name: characters(text)[:200_000] for name, text in found.items()}


def known(model: GPT2LMHeadModel, tokens: Tensor) -> dict[str, float]:
    """Columns on training sequences by ``layer.column``, and the baselines."""
    cut = len(tokens) * 9 // 10
    table = gs.measure(model.eval(), [draw(tokens[:cut], torch.Generator().manual_seed(5), BATCH)], progress=False)
    cells = {f"{layer}.{column}": x for layer, row in table.rows.items() for column, x in row.items()}
    cells["weight norm"] = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
    cells["training loss"], cells["validation loss"] = table.network["loss"], held_out_loss(model, tokens[cut:], 3)
    model.train()
    return {name: float(x) for name, x in cells.items() if x is not None and math.isfinite(x)}


def one_run(base: Path, task: str, index: int) -> dict[str, Any]:
    """One fine-tuning: what is known at 10 % of its steps, and its final validation loss."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chance = random.Random(f"{task} {index}")
    setting = {"rate": 10 ** chance.uniform(-4, -1.7), "decay": chance.choice((0.0, 0.1, 1.0)), "seed": index}
    tokens = encode(texts()[task])
    cut = len(tokens) * 9 // 10
    model = GPT2LMHeadModel.from_pretrained(base)
    values: dict[str, float] = {}

    def after(step: int) -> None:
        if step == EARLY:
            values.update(known(model, tokens))

    fit(model, tokens[:cut], STEPS, setting["rate"], index, setting["decay"], BATCH, after)
    values |= {f"setting.{name}": setting[name] for name in ("rate", "decay")}
    return {"task": task, "setting": setting, "values": values, "final": held_out_loss(model, tokens[cut:], 3)}


def run(base: Path, out: Path, workers: int) -> None:
    """Make all fine-tunings and store each as soon as it is done."""
    out.write_text("")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(one_run, base, task, i) for i in range(RUNS) for task in texts()]):
            with out.open("a") as file:
                file.write(json.dumps(done.result()) + "\n")


def show(path: Path) -> None:
    """Print how well the final validation loss is ranked."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    tasks = {task: [r for r in found if r["task"] == task] for task in sorted({r["task"] for r in found})}
    names = sorted(set.intersection(*(set(r["values"]) for r in found)))
    columns = [name for name in names if name not in BASELINES]

    def rho(task: str, name: str) -> float:
        return spearman([(r["values"][name], r["final"]) for r in tasks[task]])

    def error(task: str, name: str) -> float:
        chance, points = random.Random(0), [(r["values"][name], r["final"]) for r in tasks[task]]
        draws = [spearman(chance.choices(points, k=len(points))) for _ in range(300)]
        return float(torch.tensor(draws).std())

    print(f"{len(found)} runs, {len(columns)} columns; final validation losses " + ", ".join(
        f"{task} {min(r['final'] for r in runs):.2f} to {max(r['final'] for r in runs):.2f}" for task, runs in tasks.items()
    ))  # fmt: skip
    for task in tasks:
        others = [t for t in tasks if t != task]
        scored = [(sum(rho(t, name) for t in others) / len(others), name) for name in columns]
        best = sorted(scored, key=lambda row: -abs(row[0]))[:3]
        print(f"{task}: Spearman's ρ with the final loss, columns chosen on {' and '.join(others)}")
        for name in [*(name for _, name in best), *(name for name in BASELINES if name in names)]:
            print(f"  {name:58} {rho(task, name):6.2f} ± {error(task, name):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("base", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--workers", type=int, default=2)
    commands.add_parser("show").add_argument("path", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.base, arguments.out, arguments.workers)
    else:
        show(arguments.path)
