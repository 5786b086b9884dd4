"""vcl-fig1 (and gram-fig7): diagonals of WᵀW, AGOP and the accumulated virtual covariance shift of a net trained by SGD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gramscope.errors import InputError
from gramscope.measures.alignment import cosine
from gramscope_lab.experiments.experiment import (
    Claim,
    Experiment,
    Options,
    Results,
    Training,
    part_name,
    training_config,
)
from gramscope_lab.experiments.plots import Figure, curve, matrix, mean, panels, percent, picture
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layer_snapshots import DIAGONALS, load_diagonals, snapshot_steps
from gramscope_lab.spread import spread_text

#: diagonal -> how it is written
QUANTITIES = {"nfm": r"$W^\top W$", "vcs": r"$\sum$ virtual covariance shift", "agop": "AGOP"}


@dataclass(frozen=True)
class Settings:
    """[VCL] §3.1: one hidden layer of 256 GELU units, SGD at 0.05. Batch size and epochs are not given."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    data: tuple[str, ...] = ("cifar10",)
    hidden: int = 256
    lr: float = 0.05
    batch_size: int = 64
    epochs: float = 20.0
    every: float = 5.0
    samples: int = 5000


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training per data set, all seeds in it; the diagonals are kept on the way."""
    measure = {"every": settings.every, "samples": settings.samples, "matrices": True}
    return [
        Training(
            part_name("sgd", data),
            training_config(
                settings,
                options,
                data={"name": data},
                model={"name": "mlp", "hidden": settings.hidden, "bias": (False, True)},
                method={"name": "sgd", "lr": settings.lr},
                measure={**measure, "layers": "hidden1"},
            ),
            measure=lambda _model, _job, _step: (),  # nothing beside the matrices
        )
        for data in settings.data
    ]


# -- reading the diagonals ----------------------------------------------------------------------------------------
def _runs(results: Results[Settings], data: str) -> list[RunDirectory]:
    """The run of every seed."""
    return list(results.directory.member(part_name("sgd", data)).runs())


def _diagonals(run: RunDirectory, snapshot: int = -1) -> dict[str, Tensor]:
    """The first layer's diagonals at a snapshot, by default the end of training."""
    steps = snapshot_steps(run, DIAGONALS)
    if not steps:
        raise InputError(
            f"{run.path} kept no diagonals: its inputs are no images; choose images with --data, such as mnist"
        )
    return load_diagonals(run, steps[snapshot])["hidden1"]


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two diagonals."""
    return float(cosine(a.double().flatten(), b.double().flatten(), center=True))


def _correlations(
    results: Results[Settings], data: str, quantity: str, snapshots: slice = slice(-1, None)
) -> list[float]:
    """With WᵀW's diagonal, for every run and snapshot; by default the last ones."""
    found = []
    for run in _runs(results, data):
        for number in range(len(snapshot_steps(run, DIAGONALS)))[snapshots]:
            diagonals = _diagonals(run, number)
            found.append(_pearson(diagonals["nfm"], diagonals[quantity]))
    return found


# -- claims -------------------------------------------------------------------------------------------------------
def _published(data: str) -> str:
    return "" if data == "cifar10" else "published of CIFAR-10"


def correlations(results: Results[Settings]) -> Iterator[Claim]:
    """[VCL] Fig. 1: ρ of the diagonals with that of WᵀW."""
    for data in results.settings.data:
        virtual, agop = (_correlations(results, data, quantity) for quantity in ("vcs", "agop"))
        published = _published(data)
        yield Claim(
            f"{data}: ρ of the virtual covariance shift's diagonal with WᵀW's (at least 0.95)",
            "0.98",
            spread_text(virtual, ".3f", ".3f"),
            mean(virtual) >= 0.95,
            published,
        )
        through = _correlations(results, data, "agop", slice(1, None))
        yield Claim(
            f"{data}: ρ of the AGOP's diagonal with WᵀW's (within 0.1)",
            "0.71",
            spread_text(agop, ".3f", ".3f"),
            None if published else abs(mean(agop) - 0.71) <= 0.1,
            published
            or f"{min(through):.2f} to {max(through):.2f} at all snapshots after the start; how the gradients of several "
            "outputs are combined is not given: their outer products are summed",
        )
        yield Claim(
            f"{data}: the virtual covariance shift is closer to WᵀW than the AGOP is, for every seed",
            "0.98 against 0.71",
            f"{mean(virtual):.3f} against {mean(agop):.3f}",
            all(a > b for a, b in zip(virtual, agop, strict=True)),
            published,
        )


def accuracy(results: Results[Settings]) -> Iterator[Claim]:
    """[VCL] §3.1: 46 % on the evaluation set."""
    for data in results.settings.data:
        means = curve(results.records("evaluation", part=part_name("sgd", data)), "epoch", "test_accuracy")[1]
        late = means[len(means) // 2 :]
        published = _published(data)
        yield Claim(
            f"{data}: test accuracy (within 4 points)",
            "46 %",
            f"{percent(means[-1])} at the end; {percent(min(late))} to {percent(max(late))} in the second half",
            None if published else abs(means[-1] - 0.46) <= 0.04,
            published or "epochs are not given; single epochs jump by points",
        )


def figure(results: Results[Settings]) -> Figure:
    """The three diagonals of the first seed as images; for colour images the three channels as colours."""
    page, axes = panels(len(results.settings.data), 3, width=2.2, height=2.3)
    for row, data in zip(axes, results.settings.data, strict=True):
        found = _diagonals(_runs(results, data)[0])
        for place, (quantity, title) in zip(row, QUANTITIES.items(), strict=True):
            values = found[quantity].double()
            note = "" if quantity == "nfm" else f"\n" rf"$\rho$ = {_pearson(found['nfm'], values):.3f}"
            matrix(place, picture(values), title + note)
        row[0].set_ylabel(data)
    return page


FIG1 = Experiment(
    Settings(seeds=(0, 1, 2), data=("digits",), epochs=60.0, every=60.0, samples=1500),
    Settings(),
    parts,
    (correlations, accuracy),
    figure,
    classes=True,
)
