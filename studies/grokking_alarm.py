"""Does a column of the table tell, at the moment of memorisation, whether and when a run will grok?

    python studies/grokking_alarm.py run grokking_alarm.jsonl
    python studies/grokking_alarm.py show grokking_alarm.jsonl

Sixty runs learn x + y mod 23 with two hidden layers of 64, under AdamW. They differ in weight decay, share of the pairs that
is trained on, and seed. All columns are measured on the training pairs, at the start and at the first step with 99 % training
accuracy ("memorised"; a look every 50 steps); a line of the file is one run. ``show`` asks of each column of each layer, and of
its change since the start, how well it separates runs that later reach 90 % test accuracy from those that do not within 5,000
steps. Runs that test well already when they have memorised are left out. The column is chosen on the runs of even seeds and
judged on those of odd seeds; the baselines that need no choice (training loss, norm of all weights, and the settings
themselves) are judged on the same runs.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs

P, WIDTH, RATE, BATCH, STEPS, EVERY = 23, 64, 3e-3, 64, 5000, 50
DECAYS, SHARES, SEEDS = (0.0, 1.0, 0.3, 1.5, 0.6), (0.6, 0.7, 0.8), 4
SIZES = (2 * P, WIDTH, WIDTH, P)
MEMORISED, GROKKED = 0.99, 0.9
BASELINES = (
    "network.loss", "network.weight_norm", "setting.decay", "setting.share", "other seeds", "held-out accuracy",
)  # fmt: skip


def pairs() -> tuple[Tensor, Tensor]:
    """All pairs as two one-hot vectors side by side, and their sums."""
    x, y = torch.cartesian_prod(torch.arange(P), torch.arange(P)).T
    return torch.cat([nn.functional.one_hot(x, P), nn.functional.one_hot(y, P)], 1).float(), (x + y) % P


def network(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Outputs of all runs, ``[runs, n, P]``, of inputs ``[runs, n, 2P]``."""
    for i, (W, b) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(b[:, None], x.relu() if i else x, W.mT)
    return x


def train(decay: float, share: float, steps: int) -> list[dict[str, Any]]:
    """Train the seeds of one setting side by side; what was measured of each, at every snapshot."""
    torch.set_num_threads(1)
    X, Y = pairs()
    generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(SEEDS)]
    trained = torch.stack([torch.randperm(len(X), generator=g)[: round(share * len(X))] for g in generators])
    weights, biases = [], []
    for d, k in pairwise(SIZES):
        bound = d**-0.5
        weights.append(torch.stack([(torch.rand(k, d, generator=g) * 2 - 1) * bound for g in generators]))
        biases.append(torch.stack([(torch.rand(k, generator=g) * 2 - 1) * bound for g in generators]))
    parameters = [p.requires_grad_() for p in (*weights, *biases)]
    optimizer = torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.98), weight_decay=decay)
    draws = torch.Generator().manual_seed(7)
    runs: list[dict[str, Any]] = [
        {"setting": {"decay": decay, "share": share, "seed": i}, "memorised": None, "grokked": None}
        for i in range(SEEDS)
    ]
    for step in range(steps + 1):
        if step % EVERY == 0:
            for i, found in enumerate(runs):
                watch(found, step, [p[i].detach() for p in parameters], trained[i])
        chosen = trained.gather(1, torch.randint(trained.shape[1], (SEEDS, BATCH), generator=draws))
        outputs = network(X[chosen], weights, biases).flatten(0, 1)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(outputs, Y[chosen].flatten()) * SEEDS).backward()
        optimizer.step()
    return runs


def run(out: Path, steps: int, workers: int) -> None:
    """Train all settings, in so many processes, and store each as soon as it is done: a line for each run."""
    out.write_text("")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train, d, s, steps) for d, s in product(DECAYS, SHARES)]):
            with out.open("a") as file:
                file.writelines(json.dumps(found) + "\n" for found in done.result())


def watch(run: dict[str, Any], step: int, parameters: list[Tensor], trained: Tensor) -> None:
    """Note when a run memorises and groks; measure it at the start and when it has memorised."""
    half, (X, Y) = len(parameters) // 2, pairs()
    modules: list[nn.Module] = []
    for W, b in zip(parameters[:half], parameters[half:], strict=True):
        linear = nn.Linear(W.shape[1], W.shape[0])
        linear.load_state_dict({"weight": W, "bias": b})
        modules += [linear, nn.ReLU()]
    net = nn.Sequential(*modules[:-1])
    with torch.no_grad():
        hits = (net(X).argmax(-1) == Y).double()
    run["train"] = float(hits[trained].mean())
    run["test"] = float(hits[torch.ones(len(X), dtype=torch.bool).index_fill(0, trained, False)].mean())
    if step == 0:
        run["start"] = measured(net, X[trained], Y[trained])
    if run["memorised"] is None and run["train"] >= MEMORISED:
        run |= {"memorised": step, "test then": run["test"], "values": measured(net, X[trained], Y[trained])}
    if run["grokked"] is None and run["test"] >= GROKKED:
        run["grokked"] = step


def measured(net: nn.Module, X: Tensor, Y: Tensor) -> dict[str, float]:
    """All columns on training samples, ``{layer.column: value}``, and the baselines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = gs.measure(net, (X, Y), nn.CrossEntropyLoss(), measures="all", progress=False)
    row = {f"{layer}.{column}": value for layer, cells in table.rows.items() for column, value in cells.items()}
    row["network.loss"] = table.network["loss"]
    row["network.weight_norm"] = math.sqrt(sum(float(p.detach().square().sum()) for p in net.parameters()))
    return {name: float(value) for name, value in row.items() if value is not None and math.isfinite(value)}


def auroc(positive: list[float], negative: list[float]) -> float:
    """The probability that a value of the first is above one of the second; ties count half.

    >>> auroc([2.0, 3.0], [1.0, 2.0])
    0.875
    """
    pairs_ = [(a > b) + 0.5 * (a == b) for a in positive for b in negative]
    return sum(pairs_) / len(pairs_) if pairs_ else math.nan


def error_of(positive: list[float], negative: list[float], draws: int = 500) -> float:
    """The bootstrap standard error of an AUROC, over runs."""
    if not (positive and negative):
        return math.nan
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(draws):
        picks = [
            [part[j] for j in torch.randint(len(part), (len(part),), generator=generator)]
            for part in (positive, negative)
        ]
        found.append(auroc(*picks))
    return float(torch.tensor(found).std())


def cases_of(path: Path) -> list[dict[str, Any]]:
    """Runs that memorise before they generalise, with all that is known of them then."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    cases = []
    for item in runs:
        if item["memorised"] is None or item["test then"] >= GROKKED:
            continue
        setting = item["setting"]
        values = item["values"] | {f"setting.{name}": value for name, value in setting.items()}
        values |= {f"{n} (change)": x - item["start"][n] for n, x in item["values"].items() if n in item["start"]}
        others = [r["grokked"] is not None for r in runs if r["setting"]["seed"] % 2 != setting["seed"] % 2
                  and all(r["setting"][n] == setting[n] for n in ("decay", "share"))]  # fmt: skip
        values["other seeds"] = sum(others) / len(others)
        values["held-out accuracy"] = item["test then"]
        lead = None if item["grokked"] is None else item["grokked"] / item["memorised"]
        cases.append({"values": values, "lead": lead, **setting})
    print(f"{len(runs)} runs; {len(cases)} memorise before they generalise")
    return cases


def sides(cases: list[dict[str, Any]], name: str, sign: float = 1.0) -> tuple[list[float], list[float]]:
    """Values of a column in runs that grok, and in the others."""
    known = [(c["lead"] is not None, sign * c["values"][name]) for c in cases if name in c["values"]]
    return [x for groks, x in known if groks], [x for groks, x in known if not groks]


def show(path: Path) -> None:
    """Print what was found."""
    cases = cases_of(path)
    even, odd = ([c for c in cases if c["seed"] % 2 == rest] for rest in (0, 1))
    for title, group in (("even", even), ("odd", odd)):
        print(f"{sum(c['lead'] is not None for c in group)} of {len(group)} with {title} seeds grok")
    names = sorted(set.intersection(*(set(c["values"]) for c in cases)) - {"setting.seed"})
    scored = [(auroc(*sides(even, name)), name) for name in names]
    ranked = sorted(((max(a, 1 - a), 1.0 if a >= 0.5 else -1.0, name) for a, name in scored), key=lambda row: -row[0])
    best = [row for row in ranked if row[2] not in BASELINES][:6]
    print(
        f"{len(names) - len(BASELINES)} columns tried on even seeds; the best and the baselines, judged on odd seeds:"
    )
    print(f"{'column':38} {'even':>5} {'odd':>12} {'share .8':>13} {'false alarms':>13} {'ρ with log lead':>16}")
    for a, sign, name in [*best, *(row for row in ranked if row[2] in BASELINES)]:
        good, bad = sides(odd, name, sign)
        same = sides([c for c in cases if c["share"] == max(SHARES)], name, sign)
        limit = min(sides(even, name, sign)[0])  # at which no run of even seeds that groks is missed
        alarms = sum(x >= limit for x in bad) / max(len(bad), 1)
        lead = [(sign * c["values"][name], math.log(c["lead"])) for c in cases if c["lead"] is not None]
        print(f"{name:38} {a:5.2f} {auroc(good, bad):5.2f} ± {error_of(good, bad):.2f} {auroc(*same):6.2f} ± "
              f"{error_of(*same):.2f} {alarms:12.0%} {spearman(lead):16.2f}")  # fmt: skip
    leads = sorted(c["lead"] for c in cases if c["lead"] is not None)
    print(
        f"steps until grokking over steps until memorisation: {leads[0]:.1f} to {leads[-1]:.1f}, median {median(leads):.1f}"
    )


def spearman(points: list[tuple[float, float]]) -> float:
    """The correlation of ranks; ties have the mean of theirs.

    >>> round(spearman([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0), (4.0, 4.0)]), 6)
    0.8
    """
    if len(points) < 3:
        return math.nan
    columns = torch.tensor(points, dtype=torch.float64).T
    below = (columns[:, :, None] > columns[:, None]).double().sum(2)
    ties = (columns[:, :, None] == columns[:, None]).double().sum(2)
    ranks = below + ties / 2
    return float(torch.corrcoef(ranks)[0, 1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.path, arguments.steps, arguments.workers)
    else:
        show(arguments.path)
