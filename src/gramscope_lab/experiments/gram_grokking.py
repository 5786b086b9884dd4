"""gram-fig13 and gram-fig14: target linearity by layer while a net memorises, and later generalises, modular addition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, Training
from gramscope_lab.experiments.gram_linearity import LayerRun, layers_config
from gramscope_lab.experiments.plots import PALETTE, Figure, epoch_text, legend_below, panels

DEPTH = 3
#: training accuracy that counts as memorised, and test accuracy that counts as grokked
MEMORISED, GROKKED = 0.99, 0.8


@dataclass(frozen=True)
class Settings:
    """[Gram] B.8. "Adam" there is AdamW with betas (0.9, 0.98) in the authors' code."""

    seeds: tuple[int, ...] = (0,)
    weight_decays: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    p: int = 61
    train_fraction: float = 0.7
    width: int = 256
    lr: float = 0.001
    beta2: float = 0.98
    batch_size: int = 32
    epochs: float = 500.0
    every: float = 5.0
    dtype: str = "float64"


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training with all decays and seeds."""
    config = layers_config(
        settings,
        options,
        settings.p**2,
        dtype=settings.dtype,
        data={"name": "modular-arithmetic", "p": settings.p, "train_fraction": settings.train_fraction},
        model={"name": "mlp", "hidden": (settings.width,) * DEPTH, "activation": "relu"},
        method={"name": "adamw", "lr": settings.lr, "beta2": settings.beta2},
        sweep={"weight_decay": settings.weight_decays},
    )
    return [Training("adamw", config)]


# -- reading the records ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Run(LayerRun):
    """Means over seeds of one weight decay."""

    decay: float = 0.0

    @property
    def memorised(self) -> float:
        return self.accuracy("train").reaches(MEMORISED)

    @property
    def grokked(self) -> float:
        return self.accuracy("test").reaches(GROKKED)

    @property
    def delayed(self) -> bool:
        """Whether it generalises, later than it memorises."""
        return self.memorised < self.grokked < math.inf

    def gap(self) -> tuple[list[float], list[float]]:
        """TL of the last hidden layer minus that of the one before, over training."""
        last, before = self.line(DEPTH), self.line(DEPTH - 1)
        return last.x, [a - b for a, b in zip(last.means, before.means, strict=True)]


def _runs(results: Results[Settings]) -> list[_Run]:
    found = []
    for decay in results.settings.weight_decays:
        evaluated, measured = (results.records(kind, weight_decay=decay) for kind in ("evaluation", "measurement"))
        found.append(_Run(f"weight decay {decay:g}", DEPTH, evaluated, measured, decay))
    return found


# -- claims -------------------------------------------------------------------------------------------------------
def groks(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 13: with weight decay the net generalises long after it has memorised."""
    for run in _runs(results):
        test = run.accuracy("test").final
        text = f"memorised (train {MEMORISED:.0%}): {epoch_text(run.memorised)}, grokked (test {GROKKED:.0%}): "
        measured = f"{text}{epoch_text(run.grokked)}, test at the end {test:.0%}"
        if run.decay == 0:
            claim, published, holds = "memorises and does not generalise", "overfits", math.isinf(run.grokked)
        else:
            claim, published = "generalises later than it memorises", "groks"
            holds = run.delayed
        yield Claim(f"decay {run.decay:g}: {claim}", published, measured, holds, _why(run))


def _why(run: _Run) -> str:
    """Why a run with weight decay shows no grokking."""
    if run.decay == 0 or run.delayed:
        return ""
    if math.isinf(run.memorised):
        return "the training set is not memorised in these epochs"
    if math.isinf(run.grokked):
        return "not generalised in these epochs"
    train = run.accuracy("train").at(run.grokked)
    return f"test accuracy reaches {GROKKED:.0%} before all is memorised (training {train:.0%} then)"


def rises_after_memorisation(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.8: with decay TL goes on rising after memorisation until grokking; layer 2 jumps with it.

    The run without decay is the control: if its TL rises too, a rise is no sign of grokking to come.
    """
    for run in _runs(results):
        if run.decay == 0:
            line = run.line(DEPTH)
            claim = "decay 0, the control that never groks: TL of the last layer does not rise after memorisation"
            if run.memorised < math.inf and math.isinf(run.grokked):
                before, after = line.at(run.memorised), line.final
                measured = f"{before:.2f} → {after:.2f}, to the end"
                yield Claim(claim, "the rise is told of decay > 0", measured, after <= before)
            continue
        for layer in (DEPTH, DEPTH - 1):
            name = "the last layer" if layer == DEPTH else f"layer {layer}"
            claim = f"decay {run.decay:g}: TL of {name} rises between memorisation and grokking"
            published = "continues to increase" if layer == DEPTH else "increases sharply"
            if not run.delayed:
                absent = "no grokking" if math.isinf(run.grokked) else "no delay"
                yield Claim(claim, published, absent, None, _why(run))
                continue
            a, b = (run.line(layer).at(epoch) for epoch in (run.memorised, run.grokked))
            yield Claim(claim, published, f"{a:.2f} → {b:.2f}", b > a)


def _smoothed(values: list[float]) -> list[float]:
    """Medians of five values around each: single measurements jump."""
    return [median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]


def gap_narrows(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 14: the gap between the last two layers narrows at grokking and widens again for large decay.

    Running medians over five measurements are compared.
    """
    for run in _runs(results):
        if run.decay == 0:
            continue
        claim = f"decay {run.decay:g}: TL gap of the last two layers is narrower at grokking than its largest before"
        if not run.grokked < math.inf:
            yield Claim(claim, "narrows", "no grokking", None, _why(run))
            continue
        epochs, gaps = run.gap()
        gaps = _smoothed(gaps)
        at = epochs.index(run.grokked)
        before = max(gaps[: at + 1])
        yield Claim(claim, "narrows", f"{before:.3f} → {gaps[at]:.3f}", gaps[at] < 0.9 * before)
        if run.decay == max(results.settings.weight_decays):
            least = min(gaps[at:])
            yield Claim(
                f"decay {run.decay:g}: after grokking the gap widens again",
                "re-widens for large decay",
                f"{least:.3f} → {gaps[-1]:.3f}",
                gaps[-1] > 1.1 * least,
            )


# -- figures ------------------------------------------------------------------------------------------------------
def _columns(runs: list[_Run], labels: tuple[str, str]) -> tuple[Figure, Any]:
    """A column per weight decay, with grey lines where the net has memorised and where it has grokked."""
    page, axes = panels(2, len(runs), width=2.1, height=1.8, sharex=True, sharey="row")
    for column, run in zip(axes.T, runs, strict=True):
        for place in column:
            for epoch, style in ((run.memorised, ":"), (run.grokked, "-")):
                if epoch < math.inf:
                    place.axvline(epoch, color="grey", linestyle=style, linewidth=0.8)
        column[0].set_title(run.name)
        column[1].set_xlabel("epoch")
    for place, label in zip(axes[:, 0], labels, strict=True):
        place.set_ylabel(label)
    return page, axes


def curves_figure(results: Results[Settings]) -> Figure:
    """A column per weight decay: accuracies above, target linearity of the hidden layers below."""
    runs = _runs(results)
    page, axes = _columns(runs, ("accuracy", "target linearity"))
    for column, run in zip(axes.T, runs, strict=True):
        run.draw_accuracies(column[0])
        run.draw_layers(column[1])
    axes[0, 0].legend(loc="center right")
    legend_below(page, axes[1, 0], "dotted: memorised, solid grey: grokked")
    return page


def gap_figure(results: Results[Settings]) -> Figure:
    """A column per weight decay: generalisation error above, gap of the last two layers' TL below."""
    runs = _runs(results)
    page, axes = _columns(runs, ("train − test accuracy", f"TL: layer {DEPTH} − layer {DEPTH - 1}"))
    for column, run in zip(axes.T, runs, strict=True):
        train, test = run.accuracy("train"), run.accuracy("test")
        column[0].plot(train.x, [a - b for a, b in zip(train.means, test.means, strict=True)], color=PALETTE[1])
        column[1].plot(*run.gap(), color=PALETTE[0])
    page.supxlabel("dotted: memorised, solid grey: grokked", fontsize=7)
    return page


_QUICK = Settings(
    weight_decays=(0.0, 0.75, 1.0), p=47, train_fraction=0.8, width=128, lr=0.002, batch_size=128, epochs=240.0,
    every=6.0, dtype="float32",
)  # fmt: skip
FIG13 = Experiment(_QUICK, Settings(), parts, (groks, rises_after_memorisation), curves_figure)
FIG14 = Experiment(_QUICK, Settings(), parts, (groks, gap_narrows), gap_figure)
