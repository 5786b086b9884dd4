"""gram-fig8: rich and lazy regimes. The error is split into what the features lack and what the readout has not fitted.

"Depth 3" is read as three weight matrices with W_ij ~ N(0, 1/fan-in), the output divided by √width: with that the final
errors have the published order and size; the NTK parametrisation of all layers, or a third hidden layer, gives others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.experiments.core import Claim, Experiment, Options, Results, Training
from gramscope.experiments.plots import band, legend_below, mean, panels, spread
from gramscope.layers.calling import evaluating
from gramscope.measures.surrogate_theory import moving_target
from gramscope.training.config import TrainConfig
from gramscope.training.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """003 B.4. The target is heavy-tailed, so errors depend on the draw of the data (``data_seed``)."""

    seeds: tuple[int, ...] = (0, 1, 2)
    widths: tuple[int, ...] = (32, 128, 512, 1024)
    n: int = 1000
    d: int = 10
    lr: float = 0.01
    epochs: int = 2000
    every: int = 20
    ridge: float = 0.01
    data_seed: int = 0


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training a width, all seeds in it."""
    return [
        Training(f"width-{width}", _config(settings, options, width), measure=_Split(settings.ridge))
        for width in settings.widths
    ]


def _config(settings: Settings, options: Options, width: int) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "seeds": settings.seeds,
            "epochs": settings.epochs,
            "batch_size": 0,
            "evaluate_every": settings.epochs,
            "device": options.device,
            "data": {"name": "merged-staircase", "seed": settings.data_seed, "n_train": settings.n, "d": settings.d},
            "model": {
                "name": "mlp",
                "hidden": (width, width),
                "activation": "relu",
                "bias": False,
                "init": "normal",
                "output_scale": width**-0.5,
            },
            "method": {"name": "sgd", "lr": settings.lr},
            "measure": {"every": settings.every},
        }
    )


@dataclass(frozen=True)
class _Split:
    """The three norms of 003 B.4 on the training set."""

    ridge: float

    def __call__(self, model: nn.Module, job: Job, step: int) -> Iterator[dict[str, Any]]:
        x, y = job.data.x_train, job.data.y_train
        with torch.no_grad(), evaluating(model):
            split = moving_target(inputs_of(model, "readout", x), y, model(x), ridge=self.ridge)
        norms = {name: getattr(split, name) for name in NORMS}
        yield {**norms, "target": float(y.norm()), "mse": split.error**2 / len(x)}


def inputs_of(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What a named child of a sequential net receives."""
    for name, module in model.named_children():
        if name == layer:
            return x
        x = module(x)
    raise ValueError(f"{type(model).__name__} has no child {layer!r}")


# -- claims -------------------------------------------------------------------------------------------------------
def _values(results: Results[Settings], width: int, key: str, epoch: float) -> list[float]:
    return [r[key] for r in results.records("measurement", part=f"width-{width}", epoch=epoch)]


def _final(results: Results[Settings], width: int, key: str) -> float:
    return mean(_values(results, width, key, float(results.settings.epochs)))


def _drop(results: Results[Settings], width: int, key: str) -> float:
    """How much of a norm is gone at the end, relative to the target's norm."""
    first, target = (mean(_values(results, width, k, 0.0)) for k in (key, "target"))
    return (first - _final(results, width, key)) / target


def narrow_falls(results: Results[Settings]) -> list[Claim]:
    """003 B.4: in the rich regime both terms decrease."""
    width = results.settings.widths[0]
    features, chase = (_drop(results, width, key) for key in ("features", "chase"))
    return [
        Claim(
            f"width {width}: the features come to express the target, ‖y − y_ols‖ falls by over 0.1 ‖y‖",
            "decreases substantially",
            f"by {features:.2f} ‖y‖",
            features > 0.1,
        ),
        Claim(
            f"width {width}: the net approaches its moving target, ‖ŷ − y_ols‖ falls",
            "decreases substantially",
            f"by {chase:.2f} ‖y‖",
            chase > 0,
            "" if chase > 0 else "y_ols moves away from the output faster than the output follows it",
        ),
    ]


def wide_stays(results: Results[Settings]) -> Claim:
    """003 B.4: the wider the net, the less y_ols moves."""
    widths = results.settings.widths
    moved = [_drop(results, width, "features") for width in widths]
    return Claim(
        "the wider the net, the less ‖y − y_ols‖ changes",
        "flattens; near constant at width 1024",
        ", ".join(f"{width}: {value:.2f} ‖y‖" for width, value in zip(widths, moved, strict=True)),
        all(a > b for a, b in zip(moved, moved[1:], strict=False)) and moved[-1] < 0.5 * moved[0],
    )


def errors(results: Results[Settings]) -> list[Claim]:
    """003 Fig. 8: the final training errors, in order and size."""
    widths = results.settings.widths
    found = {width: _final(results, width, "mse") for width in widths}
    square = mean(_values(results, widths[0], "target", 0.0)) ** 2 / results.settings.n
    values = list(found.values())
    rows = [
        Claim(
            "the final training error grows with the width",
            "1.74, 1.83, 1.89, 1.94",
            ", ".join(f"{value:.2f}" for value in values),
            all(a < b for a, b in zip(values, values[1:], strict=False)),
        )
    ]
    short = results.settings.epochs < 2000
    for width in widths:
        if width in PUBLISHED:
            each = _values(results, width, "mse", float(results.settings.epochs))
            close = abs(found[width] - PUBLISHED[width]) <= 0.25
            reason = "fewer epochs than published" if short else f"mean square of this draw's targets: {square:.2f}"
            rows.append(
                Claim(
                    f"final training error at width {width} (within 0.25)",
                    f"{PUBLISHED[width]}",
                    spread(each),
                    None if short else close,
                    reason,
                )
            )
    return rows


def figure(results: Results[Settings]) -> Figure:
    """One panel a width, the three norms over training."""
    page, axes = panels(1, len(results.settings.widths), width=2.2, height=2.0, sharey=True)
    for place, width in zip(axes[0], results.settings.widths, strict=True):
        for index, (key, label) in enumerate(NORMS.items()):
            band(place, results.records("measurement", part=f"width-{width}"), "epoch", key, index=index, label=label)
        place.set_title(f"width {width}")
        place.set_xlabel("epoch")
        place.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("norm on the training set")
    legend_below(page, axes[0, 0])
    return page


FIG8 = Experiment(
    Settings(seeds=(0, 1), widths=(32, 128, 512), epochs=600),
    Settings(),
    parts,
    (narrow_falls, wide_stays, errors),
    figure,
)
