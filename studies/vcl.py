"""Does virtual covariance learning do what its paper says, and how does it compare with Muon?

    python studies/vcl.py select  --data cifar10 --data-dir DIR --out vcl.jsonl     # γ and learning rates on a validation split
    python studies/vcl.py claims  --data cifar10 --data-dir DIR --out vcl.jsonl     # 5 seeds, 20 epochs, test accuracy
    python studies/vcl.py rank    --data cifar10 --data-dir DIR --out vcl.jsonl     # default rank against the exact solver
    python studies/vcl.py tune    --data cifar10 --data-dir DIR --out vcl.jsonl     # Muon and VCL, same effort
    python studies/vcl.py compare --data cifar10 --data-dir DIR --out vcl.jsonl     # the tuned ones, 5 seeds
    python studies/vcl.py report  --out vcl.jsonl

Every finished run is one line of the output file; runs that are there already are skipped, so a study can be stopped and
taken up again. ``--device cuda`` runs on a GPU, ``--jobs N`` runs N at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gramscope as gs
from gramscope_lab.data.named_sets import load

#: γ and learning rates of the paper
GAMMAS = (5.0, 1.0, 0.5, 0.1, 0.05)
RATES = (0.1, 0.05, 0.01, 0.005)
BATCH = 64


@dataclass(frozen=True)
class Run:
    """One training run: everything that decides its result."""

    study: str
    data: str
    method: str
    epochs: int
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    #: images held out of the training set; the accuracy on them is reported too
    validation: int = 0
    #: training images used (0: all)
    images: int = 0
    width: int = 256
    depth: int = 1

    def key(self) -> str:
        """What tells runs apart."""
        return json.dumps(asdict(self), sort_keys=True)


# --- one run ----------------------------------------------------------------------------------------------------------


def optimizers(net: nn.Sequential, method: str, options: dict[str, Any]) -> list[Optimizer]:
    """The optimizers of a method; ``readout_lr`` is the rate of what VCL or Muon does not train."""
    options = {key: value for key, value in options.items() if key not in ("schedule", "warm_up", "bias")}
    readout = AdamW if options.pop("readout", "sgd") == "adamw" else SGD
    rate = options.pop("readout_lr", 0.1)
    if method == "vcl":
        return [gs.VCL(net, readout=partial(readout, lr=rate), **options)]
    if method in ("muon", "whitened-muon"):
        hidden = [m.weight for m in list(net)[:-1] if isinstance(m, nn.Linear)]
        rest = [p for p in net.parameters() if not any(p is q for q in hidden)]
        muon: Optimizer = Muon(hidden, weight_decay=0.0, **options)
        return [gs.GramWhitened(muon) if method == "whitened-muon" else muon, AdamW(rest, lr=rate)]
    return [{"sgd": SGD, "adamw": AdamW}[method](net.parameters(), **options)]


def build(d: int, run: Run, device: str) -> nn.Sequential:
    """Hidden layers of GELU units without bias, as in the paper, and a readout with bias; seeded by the run."""
    sizes = [d, *[run.width] * run.depth]
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out, bias=bool(run.options.get("bias", False))), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(run.width, 10))
    generator = torch.Generator().manual_seed(run.seed)
    with torch.no_grad():
        for layer in net:
            for parameter in layer.parameters():
                bound = layer.weight.shape[1] ** -0.5
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    return net.to(device)


def train(run: Run, data_dir: str | None, device: str, threads: int) -> dict[str, Any]:
    """Accuracies after every epoch, and seconds of training until then."""
    torch.set_num_threads(threads)
    x, y, held_out, test = split(run, data_dir, device)
    net = build(x.shape[1], run, device)
    found = optimizers(net, run.method, run.options)
    shuffler = torch.Generator().manual_seed(1000 + run.seed)
    steps = run.epochs * -(-len(x) // BATCH)
    linear: Callable[[int], float] = lambda t: max(0.0, 1 - t / steps)  # noqa: E731
    schedulers = [LambdaLR(o, linear) for o in found] if run.options.get("schedule") == "linear" else []
    spent, curve = 0.0, []
    start = time.perf_counter()
    if run.options.get("warm_up"):
        found[0].warm_up(batches(x, y, shuffler), F.cross_entropy, epochs=1)
    for _ in range(run.epochs):
        for bx, by in batches(x, y, shuffler):
            for optimizer in found:
                optimizer.zero_grad()
            F.cross_entropy(net(bx), by).backward()
            for optimizer in found:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        if device != "cpu":
            torch.cuda.synchronize()
        spent += time.perf_counter() - start
        curve.append({"test": accuracy(net, *test), "seconds": round(spent, 2)})
        if held_out is not None:
            curve[-1]["validation"] = accuracy(net, *held_out)
        start = time.perf_counter()
    return {"run": asdict(run), "curve": curve, "device": device, "threads": threads}


def split(run: Run, data_dir: str | None, device: str) -> tuple[Tensor, Tensor, Any, tuple[Tensor, Tensor]]:
    """Training inputs and labels, the held-out pair (or None) and the test pair; the split is the same for all seeds."""
    data = load(run.data, data_dir, download=False)
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(12345))
    x, y = data.x_train.flatten(1)[order].to(device), data.y_train[order].to(device)
    held_out = (x[: run.validation], y[: run.validation]) if run.validation else None
    end = run.validation + run.images if run.images else len(x)
    test = data.x_test.flatten(1).to(device), data.y_test.to(device)
    return x[run.validation : end], y[run.validation : end], held_out, test


def batches(x: Tensor, y: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled epoch."""
    order = torch.randperm(len(x), generator=generator).to(x.device)
    for start in range(0, len(x), BATCH):
        index = order[start : start + BATCH]
        yield x[index], y[index]


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Per cent right."""
    return round(100 * float((net(x).argmax(1) == y).double().mean()), 2)


# --- which runs make a study ------------------------------------------------------------------------------------------


def select(data: str) -> list[Run]:
    """The paper's grids, one seed, three epochs, 10 % held out."""
    common = {"study": "select", "data": data, "epochs": 3, "validation": 5000}
    vcl = [Run(method="vcl", options={"gamma": g, "warm_up": 1}, **common) for g in GAMMAS]
    return vcl + [Run(method="sgd", options={"lr": lr}, **common) for lr in RATES]


def claims(data: str, gamma: float, lr: float) -> list[Run]:
    """Five seeds, 20 epochs, the whole training set."""
    common = {"study": "claims", "data": data, "epochs": 20}
    return [
        run
        for seed in range(5)
        for run in (
            Run(method="vcl", options={"gamma": gamma, "warm_up": 1}, seed=seed, **common),
            Run(method="sgd", options={"lr": lr}, seed=seed, **common),
        )
    ]


def rank(data: str) -> list[Run]:
    """Default solver and larger ranks against the exact one, one epoch of half the images, three seeds."""
    common = {"study": "rank", "data": data, "method": "vcl", "epochs": 1, "images": 25600}
    solvers = ({}, {"rank": 320}, {"rank": 512}, {"solver": "exact"})
    return [Run(options={"gamma": 1.0, "warm_up": 1, **s}, seed=seed, **common) for seed in range(3) for s in solvers]


def tune(data: str) -> list[Run]:
    """Twelve settings each for Muon and for VCL: five epochs, a linear schedule, AdamW on the rest, one seed."""
    common = {"study": "tune", "data": data, "epochs": 5, "validation": 5000}
    rest = {"schedule": "linear", "bias": True}
    muon = [
        {"lr": lr, "readout_lr": readout_lr, **rest}
        for lr in (0.0025, 0.005, 0.01, 0.02)
        for readout_lr in (3e-4, 1e-3, 3e-3)
    ]
    vcl = [
        {"gamma": gamma, "alpha": alpha, "readout": "adamw", "readout_lr": 1e-3, "warm_up": 1, **rest}
        for gamma in (0.3, 1.0, 3.0)
        for alpha in (0.05, 0.1, 0.15, 0.2)
    ]
    runs = [Run(method="muon", options=options, **common) for options in muon]
    return runs + [Run(method="vcl", options=options, **common) for options in vcl]


def compare(data: str, chosen: Iterable[tuple[str, dict[str, Any]]]) -> list[Run]:
    """The chosen settings, five seeds, tested; Muon with Gram-whitened steps; the paper's algorithm, AdamW readout."""
    common = {"study": "compare", "data": data, "epochs": 5}
    paper = ("vcl", {"gamma": 1.0, "readout": "adamw", "readout_lr": 1e-3, "warm_up": 1})
    return [
        Run(method=method, options=options, seed=seed, **common)
        for seed in range(5)
        for method, options in (*chosen, paper)
    ]


# --- results ----------------------------------------------------------------------------------------------------------


def read(out: Path) -> list[dict[str, Any]]:
    """All finished runs."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def best_options(results: list[dict[str, Any]], study: str, data: str, method: str) -> dict[str, Any]:
    """The options with the best validation accuracy at any epoch's end."""
    runs = [r for r in results if (r["run"]["study"], r["run"]["data"], r["run"]["method"]) == (study, data, method)]
    if not runs:
        raise SystemExit(f"no {method} run of study {study!r} on {data} yet: run that first")
    options: dict[str, Any] = max(runs, key=lambda r: max(e["validation"] for e in r["curve"]))["run"]["options"]
    return options


def report(results: list[dict[str, Any]]) -> None:
    """A line for every setting: accuracies after epochs 1, 2, the last and the best one, mean ± standard deviation."""
    groups: dict[tuple[str, str, str, str], list[list[dict[str, float]]]] = defaultdict(list)
    for r in results:
        run = r["run"]
        shape = "" if (run["width"], run["depth"]) == (256, 1) else f" {run['depth']}×{run['width']}"
        groups[run["study"], run["data"], run["method"] + shape, json.dumps(run["options"])].append(r["curve"])
    for (study, data, method, options), curves in sorted(groups.items()):
        parts = [spread("1", [c[0]["test"] for c in curves])]
        if len(curves[0]) > 1:
            parts.append(spread("2", [c[1]["test"] for c in curves]))
            parts.append(spread(f"{len(curves[0])}", [c[-1]["test"] for c in curves]))
            parts.append(spread("best", [max(e["test"] for e in c) for c in curves]))
        if "validation" in curves[0][0]:
            parts.append(spread("best val", [max(e["validation"] for e in c) for c in curves]))
        parts.append(f"{statistics.mean(c[-1]['seconds'] / len(c) for c in curves):.1f} s/epoch")
        print(f"{study:8} {data:8} {method:10} {options}\n         {len(curves)} seeds: " + "; ".join(parts))


def spread(name: str, values: list[float]) -> str:
    """Mean ± standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{name}: {statistics.mean(values):.2f} ± {deviation:.2f}"


def main() -> None:
    """Run the parts of a study that are missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["select", "claims", "rank", "tune", "compare", "report"])
    parser.add_argument("--data", default="cifar10", help="cifar10 or mnist")
    parser.add_argument("--data-dir", default=None, help="folder with the official files")
    parser.add_argument("--out", type=Path, default=Path("vcl.jsonl"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a run")
    arguments = parser.parse_args()
    results = read(arguments.out)
    data = arguments.data
    if arguments.study == "report":
        report(results)
        return
    if arguments.study == "claims":
        gamma = best_options(results, "select", data, "vcl")["gamma"]
        runs = claims(data, gamma, best_options(results, "select", data, "sgd")["lr"])
    elif arguments.study == "compare":
        tuned = {method: best_options(results, "tune", data, method) for method in ("muon", "vcl")}
        runs = compare(data, [*tuned.items(), ("whitened-muon", tuned["muon"])])
    else:
        runs = {"select": select, "rank": rank, "tune": tune}[arguments.study](data)
    done = {Run(**r["run"]).key() for r in results}
    todo = [run for run in runs if run.key() not in done]
    print(f"{len(todo)} of {len(runs)} runs to do", flush=True)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        work = partial(train, data_dir=arguments.data_dir, device=arguments.device, threads=arguments.threads)
        for future in as_completed([pool.submit(work, run) for run in todo]):
            result = future.result()
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            run, last = result["run"], result["curve"][-1]
            print(
                run["method"],
                run["options"],
                "seed",
                run["seed"],
                [e["test"] for e in result["curve"]],
                last,
                flush=True,
            )


if __name__ == "__main__":
    main()
