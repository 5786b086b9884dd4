"""Run directories with made-up numbers, written the way training writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layer_snapshots import save_diagonals, save_spectra

MEASURES = (
    "target_linearity", "surrogate", "surrogate_normalized", "nfa", "effective_rank", "vcs_cosine", "weight_norm",
    "nc1", "nc2_equinorm", "nc2_equiangular", "nc3", "my_own",
)  # fmt: skip


def value(measure: str, seed: int, epoch: int, depth: int, speed: float) -> float:
    """A number that differs with everything it depends on."""
    progress = 1 - math.exp(-speed * epoch)
    return (0.3 + 0.1 * depth + 0.3 * progress + 0.01 * seed) * (1000.0 if measure == "surrogate" else 1.0)


def accuracy(seed: int, epoch: int, speed: float) -> float:
    return 0.1 + 0.8 * (1 - math.exp(-speed * epoch)) + 0.01 * seed


def write_run(
    path: Path,
    *,
    method: str = "sgd",
    seed: int = 0,
    lr: float = 0.1,
    speed: float = 0.5,
    epochs: int = 4,
    layers: Sequence[str] = ("hidden1", "readout"),
    snapshots: bool = True,
    finished: bool = True,
) -> RunDirectory:
    """One run of ten steps an epoch."""
    config = {
        "seeds": [seed],
        "epochs": float(epochs),
        "batch_size": 8,
        "data": {"name": "digits", "dir": ""},
        "model": {"name": "mlp", "hidden": [6]},
        "method": {"name": method, "lr": lr},
    }
    run = RunDirectory.create(path, config)
    run.write_environment({"torch": "2.9.0", "device": "cpu", "command": ["/somewhere/bin/gramscope", "train"]})
    for epoch in range(epochs + 1):
        append_epoch(run, epoch, seed=seed, speed=speed, layers=layers)
        if snapshots:
            g = torch.Generator().manual_seed(seed + epoch)
            spectra = {layer: torch.rand(5, generator=g).sort(descending=True).values for layer in layers}
            save_spectra(run, 10 * epoch, spectra)
            nfm = torch.rand(3, 3, generator=g)
            images = {"nfm": nfm, "agop": nfm + 0.1 * torch.rand(3, 3, generator=g), "vcs": nfm - 0.5}
            save_diagonals(run, 10 * epoch, {layers[0]: images})
    if finished:
        run.append({"kind": "end", "step": 10 * epochs, "finished": True, "reason": ""})
    return run


def append_epoch(
    run: RunDirectory, epoch: int, *, seed: int = 0, speed: float = 0.5, layers: Sequence[str] = ("hidden1", "readout")
) -> None:
    """The records of one epoch, with the file closed again."""
    head = {"step": 10 * epoch, "epoch": float(epoch), "method": "sgd", "seed": seed}
    test = accuracy(seed, epoch, speed)
    evaluation = {"batch_loss": None if epoch == 0 else 1 - test, "test_loss": 1.2 - test, "test_accuracy": test}
    records: list[dict[str, Any]] = [{"kind": "evaluation", **head, **evaluation, "seconds": 0.5 * epoch}]
    for depth, layer in enumerate(layers):
        numbers: dict[str, float | None] = {name: value(name, seed, epoch, depth, speed) for name in MEASURES}
        if layer != layers[-1]:
            numbers["nc3"] = None
        records.append({"kind": "measurement", **head, "layer": layer, **numbers})
    run.append(*records)


CLAIMS = (
    {"claim": "it learns", "published": "46 %", "measured": "90 %", "holds": True, "reason": ""},
    {"claim": "it never fails", "published": "yes", "measured": "no", "holds": False, "reason": "it did"},
    {"claim": "it is best", "published": "yes", "measured": "maybe", "holds": None, "reason": "too few seeds"},
)


def write_group(path: Path) -> Path:
    """Two methods with two seeds each, and claims."""
    for method, speed in (("sgd", 0.3), ("vcl", 0.9)):
        members = RunDirectory.create(path / method, {"method": {"name": method}, "seeds": [0, 1]})
        for seed in (0, 1):
            write_run(members.path / f"seed-{seed}", method=method, seed=seed, speed=speed)
    claims = RunDirectory.create(path / "claims", {"part": "claims"})
    claims.append(*({"kind": "claim", **claim} for claim in CLAIMS), {"kind": "end", "finished": True})
    return path
