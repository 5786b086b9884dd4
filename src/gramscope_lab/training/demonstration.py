"""The demonstration: three ways to train one small net on the digits, measured all the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.layer_measures import WHILE_TRAINING
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.train import Trained, train

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "vcl": {"name": "vcl", "gamma": 1.0},
    "whiten-sgd": {"name": "whiten-sgd", "lr": 0.1, "momentum": 0.9},
}
#: beyond what is measured while training anyway
MEASURES = [
    *WHILE_TRAINING,
    "nfa_null",
    "nc2_equinorm",
    "nc2_equiangular",
    "nc3",
    "surrogate_normalized",
    "vcs_gram_cosine",
]


def demo_configs(
    *, epochs: float = 10, seeds: Sequence[int] = (0, 1, 2), device: str = "auto"
) -> dict[str, TrainConfig]:
    """One configuration a method: an MLP with two hidden layers on the shipped digits."""
    shared: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [64, 64], "activation": "gelu", "bias": [False, True, True]},
        "seeds": list(seeds),
        "epochs": epochs,
        "device": device,
        "measure": {"every": max(1.0, epochs / 5), "samples": 500, "matrices": True, "names": MEASURES},
    }
    return {name: TrainConfig.from_dict({**shared, "method": table}) for name, table in METHODS.items()}


def run_demo(configs: Mapping[str, TrainConfig], out: Path, *, reporter: Reporter | None = None) -> dict[str, Trained]:
    """Train every configuration into ``out/NAME``."""
    reporter = reporter or Reporter()
    found = {}
    for name, config in configs.items():
        reporter.note(f"{name}:")
        found[name] = train(config, out / name, reporter=reporter)
    return found
