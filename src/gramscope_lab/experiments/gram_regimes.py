"""gram-fig8: rich and lazy regimes. The error is split at y_ols, the best linear readout of the current features.

``features`` is its distance from the target, ``chase`` the distance of the net's output from it.

"Depth 3" is read as three weight matrices with W_ij ~ N(0, 1/fan-in), the output divided by √width: with that the final
errors have the published order and size; the NTK parametrisation of all layers, or a third hidden layer, gives others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn

from gramscope.layers.model_call import evaluating
from gramscope.measures.surrogate_theory import moving_target
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, Training, training_config
from gramscope_lab.experiments.plots import Figure, band, legend_below, listed, mean, panels
from gramscope_lab.spread import spread, spread_text
from gramscope_lab.training.job import Job

#: recorded norm -> how it is written
NORMS = {
    "error": r"$\|y - \hat y\|$",
    "features": r"$\|y - y_{\mathrm{ols}}\|$",
    "chase": r"$\|\hat y - y_{\mathrm{ols}}\|$",
}
#: width -> final training error of the paper
PUBLISHED = {32: 1.74, 128: 1.83, 512: 1.89, 1024: 1.94}


@dataclass(frozen=True)
class Settings:
    """[Gram] B.4. The target is heavy-tailed, so errors depend on the draw: every seed draws its own data and weights."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    widths: tuple[int, ...] = (32, 128, 512, 1024)
    n: int = 1000
    d: int = 10
    lr: float = 0.01
    epochs: int = 2000
    every: int = 20
    ridge: float = 0.01


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training for each width and seed."""
    model = {"name": "mlp", "activation": "relu", "bias": False, "init": "normal"}
    found = []
    for width, seed in product(settings.widths, settings.seeds):
        config = training_config(
            settings,
            options,
            seeds=[seed],
            batch_size=0,
            evaluate_every=settings.epochs,
            data={"name": "merged-staircase", "seed": seed, "n_train": settings.n, "d": settings.d},
            model={**model, "hidden": (width, width), "output_scale": width**-0.5},
            method={"name": "sgd", "lr": settings.lr},
            measure={"every": settings.every},
        )
        found.append(Training(f"width-{width}-seed-{seed}", config, measure=partial(_split, width, settings.ridge)))
    return found


def _split(width: int, ridge: float, model: nn.Module, job: Job, step: int) -> Iterator[dict[str, Any]]:
    """The three norms of [Gram] B.4 on the training set."""
    x, y = job.data.x_train, job.data.y_train
    names = [name for name, _ in model.named_children()]
    with torch.no_grad(), evaluating(model):
        features = nn.Sequential(*list(model.children())[: names.index("readout")])(x)
        split = moving_target(features, y, model(x), ridge=ridge)
    norms = {name: getattr(split, name) for name in NORMS}
    yield {"width": width, **norms, "target": float(y.norm()), "mse": split.error**2 / len(x)}


# -- claims -------------------------------------------------------------------------------------------------------
def _values(results: Results[Settings], width: int, key: str, epoch: float | None = None) -> list[float]:
    """One value per seed, at the end unless an epoch is given."""
    epoch = float(results.settings.epochs) if epoch is None else epoch
    return [r[key] for r in results.records("measurement", width=width, epoch=epoch)]


def _drop(results: Results[Settings], width: int, key: str) -> float:
    """Decrease of a norm over training, relative to the target's norm."""
    first, target = (mean(_values(results, width, k, 0.0)) for k in (key, "target"))
    return (first - mean(_values(results, width, key))) / target


def narrow_falls(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.4: in the rich regime both terms decrease."""
    width = results.settings.widths[0]
    wide = results.settings.widths[-1]
    for key, text in (("features", "‖y − y_ols‖"), ("chase", "‖ŷ − y_ols‖")):
        gone = _drop(results, width, key)
        yield Claim(
            f"width {width}: {text} falls by more than 0.1 ‖y‖",
            "decreases substantially",
            f"by {gone:.2f} ‖y‖ (width {wide}: {_drop(results, wide, key):.2f} ‖y‖)",
            gone > 0.1,
        )


def wide_stays(results: Results[Settings]) -> Claim:
    """[Gram] B.4: the wider the net, the less y_ols moves."""
    widths = results.settings.widths
    moved = [_drop(results, width, "features") for width in widths]
    return Claim(
        f"‖y − y_ols‖ changes less the wider the net, at width {widths[-1]} less than half as much as at {widths[0]}",
        "flattens; stays at width 1024",
        listed("{}: {:.2f} ‖y‖", widths, moved),
        all(a > b for a, b in pairwise(moved)) and moved[-1] < 0.5 * moved[0],
    )


def errors(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 8: the final training errors, in order and size."""
    settings = results.settings
    found = {width: _values(results, width, "mse") for width in settings.widths}
    means = [mean(values) for values in found.values()]
    squares = [value**2 / settings.n for value in _values(results, settings.widths[0], "target", 0.0)]
    yield Claim(
        "the mean final training error grows with the width",
        "1.74, 1.83, 1.89, 1.94",
        listed("{:.2f}", means),
        all(a < b for a, b in pairwise(means)),
    )
    published = settings.n == 1000 and settings.epochs == 2000
    for width, values in found.items():
        if width not in PUBLISHED:
            continue
        drawn = spread(values)
        near = drawn is not None and abs(drawn.mean - PUBLISHED[width]) <= 2 * drawn.deviation
        reason = f"mean squares of the targets, by draw: {listed('{:.1f}', squares)}"
        yield Claim(
            f"final training error at width {width}: the published one is within two deviations of our draws",
            f"{PUBLISHED[width]}",
            spread_text(values),
            near if published else None,
            reason if published else "fewer samples or epochs than published",
        )


def figure(results: Results[Settings]) -> Figure:
    """One panel per width, the three norms over training."""
    page, axes = panels(1, len(results.settings.widths), width=2.2, height=2.0, sharey=True)
    for place, width in zip(axes[0], results.settings.widths, strict=True):
        for index, (key, label) in enumerate(NORMS.items()):
            band(place, results.records("measurement", width=width), "epoch", key, index=index, label=label)
        place.set_title(f"width {width}")
        place.set_xlabel("epoch")
        place.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("norm on the training set")
    legend_below(page, axes[0, 0])
    return page


FIG8 = Experiment(
    Settings(seeds=(0, 1), widths=(32, 64, 128, 256), n=400, lr=0.02, epochs=1000),
    Settings(),
    parts,
    (narrow_falls, wide_stays, errors),
    figure,
)
