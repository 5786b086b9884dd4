"""Does a column of the table tell, at the moment of memorisation, whether and when a run will grok?

    python studies/grokking_alarm.py run --device cuda --workers 14 --out grokking_alarm.json
    python studies/grokking_alarm.py show grokking_alarm.json

Runs learn x + y mod 47 with three hidden layers of 256, under AdamW. They differ in weight decay, share of the pairs that is
trained on, and seed. All columns are measured on training samples, at steps in geometric progression. ``show`` takes each run
at the first measured step with 99 % training accuracy ("memorised") and asks of each column of each layer how well it separates
runs that later reach 95 % test accuracy from those that do not. Runs that test well already at memorisation are left out. The
column is chosen on the runs of even seeds and judged on those of odd seeds; the baselines that need no choice (training loss,
norm of all weights, the decay itself) are judged on the same runs.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs

P, WIDTH, RATE, BATCH, SAMPLES = 47, 256, 1e-3, 128, 768
DECAYS, SHARES, SEEDS = (0.0, 0.3, 1.0, 2.0), (0.55, 0.7), 6
SIZES = (2 * P, WIDTH, WIDTH, WIDTH, P)
MEMORISED, GROKKED = 0.99, 0.95
BASELINES = ("network.loss", "network.weight_norm", "setting.decay", "setting.share")


def settings() -> list[dict[str, float]]:
    """Decay, share and seed of every run."""
    return [{"decay": d, "share": s, "seed": i} for d, s, i in product(DECAYS, SHARES, range(SEEDS))]


def snapshots(steps: int) -> list[int]:
    """0 and about eight steps in each factor of ten, from 30 to the last."""
    count = 1 + round(8 * math.log10(steps / 30))
    return [0, *sorted({round(30 * (steps / 30) ** (i / (count - 1))) for i in range(count)})]


def pairs() -> tuple[Tensor, Tensor]:
    """All pairs as two one-hot vectors side by side, and their sums."""
    x, y = torch.cartesian_prod(torch.arange(P), torch.arange(P)).T
    return torch.cat([nn.functional.one_hot(x, P), nn.functional.one_hot(y, P)], 1).float(), (x + y) % P


def network(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Outputs of all runs, ``[runs, n, P]``, of inputs ``[runs, n, 2P]``."""
    for i, (W, b) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(b[:, None], x.relu() if i else x, W.mT)
    return x


def train(steps: int, device: str) -> tuple[list[dict[str, float]], list[Tensor], list[dict[str, Any]]]:
    """Train all runs side by side; settings, training indices of each, and snapshots with accuracies."""
    runs, (X, Y) = settings(), pairs()
    generators = [torch.Generator().manual_seed(1000 + int(run["seed"])) for run in runs]
    orders = [torch.randperm(len(X), generator=g) for g in generators]
    trained = [order[: round(run["share"] * len(X))] for order, run in zip(orders, runs, strict=True)]
    weights, biases = [], []
    for d, k in pairwise(SIZES):
        bound = d**-0.5
        weights.append(torch.stack([(torch.rand(k, d, generator=g) * 2 - 1) * bound for g in generators]).to(device))
        biases.append(torch.stack([(torch.rand(k, generator=g) * 2 - 1) * bound for g in generators]).to(device))
    parameters = [p.requires_grad_() for p in (*weights, *biases)]
    optimizer = torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.98), weight_decay=0.0)
    shrink = torch.tensor([1 - RATE * run["decay"] for run in runs], device=device)
    X, Y = X.to(device), Y.to(device)
    is_train = torch.zeros(len(runs), len(X), dtype=torch.bool)
    for row, chosen in zip(is_train, trained, strict=True):
        row[chosen] = True
    is_train = is_train.to(device)
    lengths = torch.tensor([len(t) for t in trained], device=device)
    table = nn.utils.rnn.pad_sequence(trained, batch_first=True).to(device)
    draws = torch.Generator(device=device).manual_seed(7)
    wanted, stored = set(snapshots(steps)), []
    for step in range(steps + 1):
        if step in wanted:
            with torch.no_grad():
                hits = torch.cat(
                    [
                        network(X[None], [w[i : i + 1] for w in weights], [b[i : i + 1] for b in biases]).argmax(-1)
                        == Y
                        for i in range(len(runs))
                    ]
                )
            found = [(hits & mask).sum(1) / mask.sum(1) for mask in (is_train, ~is_train)]
            copies = [[p[i].detach().cpu().clone() for p in parameters] for i in range(len(runs))]
            stored.append({"step": step, "weights": copies, "train": found[0].tolist(), "test": found[1].tolist()})
        place = (torch.rand(len(runs), BATCH, generator=draws, device=device) * lengths[:, None]).long()
        chosen = table.gather(1, place)
        loss = nn.functional.cross_entropy(
            network(X[chosen], weights, biases).flatten(0, 1), Y[chosen].flatten()
        ) * len(runs)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in parameters:
                p.mul_(shrink.view(-1, *[1] * (p.dim() - 1)))
        optimizer.step()
    return runs, trained, stored


def measured(task: tuple[list[Tensor], Tensor]) -> dict[str, float]:
    """All columns of one snapshot on training samples, ``{layer.column: value}``."""
    parameters, chosen = task
    torch.set_num_threads(1)
    half = len(parameters) // 2
    modules: list[nn.Module] = []
    for W, b in zip(parameters[:half], parameters[half:], strict=True):
        linear = nn.Linear(W.shape[1], W.shape[0])
        linear.load_state_dict({"weight": W, "bias": b})
        modules += [linear, nn.ReLU()]
    X, Y = pairs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = gs.measure(
            nn.Sequential(*modules[:-1]), (X[chosen[:SAMPLES]], Y[chosen[:SAMPLES]]), nn.CrossEntropyLoss(),
            measures="all", progress=False,
        )  # fmt: skip
    row = {f"{layer}.{column}": value for layer, cells in table.rows.items() for column, value in cells.items()}
    row["network.loss"] = table.network["loss"]
    row["network.weight_norm"] = math.sqrt(sum(float(p.square().sum()) for p in parameters))
    return {name: float(value) for name, value in row.items() if value is not None and math.isfinite(value)}


def run(steps: int, device: str, workers: int, out: Path) -> None:
    """Train, measure every snapshot, and store the numbers."""
    runs, trained, stored = train(steps, device)
    tasks = [(weights, chosen) for s in stored for weights, chosen in zip(s["weights"], trained, strict=True)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(measured, tasks, chunksize=8))
    records = []
    for i, setting in enumerate(runs):
        known = [
            {"step": s["step"], "train": s["train"][i], "test": s["test"][i], "values": rows[j * len(runs) + i]}
            for j, s in enumerate(stored)
        ]
        records.append({"setting": setting, "records": known})
    out.write_text(json.dumps({"steps": steps, "runs": records}))
    print(f"{len(runs)} runs, {len(stored)} snapshots: {out}")


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


def show(path: Path) -> None:
    """Print what was found."""
    data = json.loads(path.read_text())
    cases = []
    for item in data["runs"]:
        records = item["records"]
        at = next((r for r in records if r["train"] >= MEMORISED), None)
        if at is None or at["test"] >= GROKKED:
            continue
        grok = next((r["step"] for r in records if r["step"] > at["step"] and r["test"] >= GROKKED), None)
        values = at["values"] | {f"setting.{name}": value for name, value in item["setting"].items()}
        cases.append({"values": values, "grok": grok, "at": at["step"], "seed": item["setting"]["seed"]})
    groups = [[c for c in cases if c["seed"] % 2 == odd] for odd in (0, 1)]
    counts = [(sum(c["grok"] is not None for c in g), len(g)) for g in groups]
    print(f"{len(data['runs'])} runs of {data['steps']} steps; {len(cases)} memorise first")
    print(f"of these grok, of all: {counts[0]} with even seeds, {counts[1]} with odd seeds")

    def sides(group: list[dict[str, Any]], name: str, sign: float = 1.0) -> tuple[list[float], list[float]]:
        known = [c for c in group if name in c["values"]]
        return tuple(
            [sign * c["values"][name] for c in known if (c["grok"] is not None) == want] for want in (True, False)
        )  # type: ignore[return-value]

    names = sorted(set.intersection(*(set(c["values"]) for c in cases)) - {"setting.seed"})
    scored = [(auroc(*sides(groups[0], name)), name) for name in names]
    columns = [(max(a, 1 - a), 1.0 if a >= 0.5 else -1.0, name) for a, name in scored]
    columns.sort(key=lambda row: -row[0])
    best = [row for row in columns if row[2] not in BASELINES][:8]
    print(f"{len(names)} columns of layers tried on even seeds; the best eight and the baselines, judged on odd seeds:")
    print(f"{'column':42} {'even':>6} {'odd':>14} {'false alarms':>13} {'log lead ρ':>11}")
    for a, sign, name in [*best, *[row for row in columns if row[2] in BASELINES]]:
        good, bad = sides(groups[1], name, sign)
        calm, _ = sides(groups[0], name, sign)
        limit = sorted(calm)[len(calm) // 10] if calm else math.nan  # nine of ten even runs that grok are above
        alarms = sum(v >= limit for v in bad) / max(len(bad), 1)
        lead = [(c["values"][name], math.log(c["grok"] / c["at"])) for c in cases if c["grok"] is not None]
        print(
            f"{name:42} {a:6.2f} {auroc(good, bad):6.2f} ± {error_of(good, bad):.2f} {alarms:13.0%} {_spearman(lead):11.2f}"
        )
    leads = sorted(c["grok"] / c["at"] for c in cases if c["grok"] is not None)
    if leads:
        middle = leads[len(leads) // 2]
        print(f"steps to grokking over steps to memorisation: {leads[0]:.1f} to {leads[-1]:.1f}, median {middle:.1f}")


def _spearman(points: list[tuple[float, float]]) -> float:
    if len(points) < 3:
        return math.nan
    ranks = torch.tensor(points, dtype=torch.float64).argsort(0).argsort(0).double()
    return float(torch.corrcoef(ranks.T)[0, 1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--steps", type=int, default=60_000)
    command.add_argument("--device", default="cpu")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--out", type=Path, default=Path("grokking_alarm.json"))
    commands.add_parser("show").add_argument("path", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.steps, arguments.device, arguments.workers, arguments.out)
    else:
        show(arguments.path)
