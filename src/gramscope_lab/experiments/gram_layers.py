"""Target linearity and surrogate by hidden layer of fully connected nets: what gram-fig4, 9, 12, 13 and 14 share.

A layer is measured at its input, so the features of hidden layer ℓ are those that layer ℓ + 1, or the readout, receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gramscope_lab.experiments.experiment import Options, training_config
from gramscope_lab.experiments.plots import band, curve, mean
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import TrainConfig

#: glob of the layers that see hidden features: all but ``hidden1``
ABOVE_INPUT = "*[!1]"


def layers_config(settings: Any, options: Options, samples: int, **tables: Any) -> TrainConfig:
    """A training that evaluates both sets and measures the hidden layers every ``settings.every`` epochs."""
    names = ("target_linearity", "surrogate")
    measure = {"every": settings.every, "samples": samples, "names": names, "layers": ABOVE_INPUT}
    always = {"evaluate_train": True, "evaluate_every": settings.every, "measure": measure}
    return training_config(settings, options, **always, **tables)


def features_of(records: Sequence[Record], layer: int, depth: int) -> list[Record]:
    """Measurements of the features of hidden layer ``layer`` (from 1) of ``depth``."""
    name = "readout" if layer == depth else f"hidden{layer + 1}"
    return [r for r in records if r.get("layer") == name]


def over_training(records: Sequence[Record], key: str, layer: int, depth: int) -> tuple[list[float], list[float]]:
    """Epochs and means over seeds of a measure of one hidden layer."""
    epochs, means, _ = curve(features_of(records, layer, depth), "epoch", key)
    return epochs, means


def by_depth(records: Sequence[Record], key: str, depth: int, epoch: float) -> list[float]:
    """Means over seeds at one epoch, hidden layer by hidden layer."""
    at = [r for r in records if r["epoch"] == epoch]
    return [mean(r[key] for r in features_of(at, layer, depth)) for layer in range(1, depth + 1)]


def draw_layers(axes: Any, records: Sequence[Record], key: str, depth: int) -> None:
    """One curve per hidden layer."""
    for layer in range(1, depth + 1):
        band(axes, features_of(records, layer, depth), "epoch", key, index=layer - 1, label=f"layer {layer}")


def determination(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of the straight line through the points."""
    mx, my = mean(x), mean(y)
    xx, yy = (sum((v - m) ** 2 for v in values) for values, m in ((x, mx), (y, my)))
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy**2 / (xx * yy) if xx and yy else 0.0
