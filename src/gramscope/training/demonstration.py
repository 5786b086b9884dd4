"""The demonstration: three ways to train one small net on the digits, measured all the way."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gramscope.training.config import TrainConfig
from gramscope.training.layer_measures import WHILE_TRAINING
from gramscope.training.reporter import Reporter
from gramscope.training.train import train
from gramscope.training.trained import Trained

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "vcl": {"name": "vcl", "gamma": 1.0},
    "whiten-sgd": {"name": "whiten-sgd", "lr": 0.1, "momentum": 0.9},
}
#: beyond what is measured while training anyway
MEASURES = [*WHILE_TRAINING, "nc2_equinorm", "nc2_equiangular", "nc3", "surrogate_normalized", "vcs_gram_cosine"]


def demo_configs(
    *, epochs: float = 10, seeds: Sequence[int] = (0, 1, 2), device: str = "auto"
) -> dict[str, TrainConfig]:
    """One configuration a method: an MLP with two hidden layers on the shipped digits."""
    shared: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [64, 64], "activation": "gelu", "bias": [False, True, True]},
        "method": {"name": "sgd"},
        "seeds": list(seeds),
        "epochs": epochs,
        "device": device,
        "measure": {"every": max(1.0, epochs / 5), "samples": 500, "matrices": True, "names": MEASURES},
    }
    base = TrainConfig.from_dict(shared)
    return {name: replace(base, method=type(base.method).from_table(table)) for name, table in METHODS.items()}


def run_demo(configs: Mapping[str, TrainConfig], out: Path, *, reporter: Reporter | None = None) -> dict[str, Trained]:
    """Train every configuration into ``out/NAME``."""
    reporter = reporter or Reporter()
    found = {}
    for name, config in configs.items():
        reporter.note(f"{name}:")
        found[name] = train(config, out / name, reporter=reporter)
    return found


def summarise(trained: Mapping[str, Trained]) -> list[dict[str, Any]]:
    """One row a method: accuracies as mean ± 2 standard deviations over seeds, and what happened to the features."""
    rows = []
    for name, runs in trained.items():
        records = runs.records
        rows.append(
            {
                "method": name,
                "accuracy after 1 epoch": _spread(_at(records, "test_accuracy", epoch=1.0), percent=True),
                "at the end": _spread(_at(records, "test_accuracy"), percent=True),
                "target linearity after layer 1": _spread(_at(records, "target_linearity", layer="hidden2")),
                "before the readout": _spread(_at(records, "target_linearity", layer="readout")),
                "NFA of layer 1": _spread(_at(records, "nfa", layer="hidden1")),
            }
        )
    return rows


def _at(
    records: Sequence[dict[str, Any]], key: str, *, epoch: float | None = None, layer: str | None = None
) -> list[float]:
    """Each run's value of ``key`` at an epoch, the last one by default."""
    found: dict[str, float] = {}
    for record in records:
        right_epoch = epoch is None or record["epoch"] == epoch
        if record.get(key) is not None and right_epoch and (layer is None or record.get("layer") == layer):
            found[record["run"]] = record[key]
    return list(found.values())


def _spread(values: Sequence[float], *, percent: bool = False) -> str:
    if not values:
        return ""
    factor, digits, unit = (100, 1, " %") if percent else (1, 3, "")
    mean = factor * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}{unit}"
    return f"{mean:.{digits}f} ± {2 * factor * statistics.stdev(values):.{digits}f}{unit}"
