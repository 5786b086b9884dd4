"""nfa-fig1 and nfa-fig9: feature matrices of a trained net, and what is lost when K's eigenvectors are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gramscope.instruments.agop import tangent_kernel
from gramscope.instruments.egop import egop
from gramscope.measures.alignment import corrupted, cosine, nfa
from gramscope_lab.data.dataset import generator
from gramscope_lab.data.synthetic import chain_monomial
from gramscope_lab.experiments.experiment import (
    Claim,
    Experiment,
    Options,
    Recorder,
    Results,
    Training,
    training_config,
)
from gramscope_lab.experiments.nfa_curves import chain_config
from gramscope_lab.experiments.plots import Figure, matrix, mean, panels, picture
from gramscope_lab.spread import spread_text
from gramscope_lab.training.job import load_data
from gramscope_lab.training.train import Trained


def _corrupted(kernel: Tensor, seed: int, draws: int) -> list[Tensor]:
    """Matrices with K's spectrum and random eigenvectors."""
    return [corrupted(kernel, generator(seed, "corrupted", draw)) for draw in range(draws)]


# -- nfa-fig1: matrices -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    """[NFA] Appendix H; learning rate and steps, which it does not give for this figure, are those of its other ones."""

    seeds: tuple[int, ...] = tuple(range(10))
    n: int = 384
    d: int = 32
    rank: int = 5
    width: int = 128
    init_scale: float = 0.01
    lr: float = 0.05
    steps: int = 800
    corruptions: int = 20


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training for each seed, measured at its end."""
    scales = {"init_scale": [settings.init_scale, 1.0, 1.0]}
    return [
        Training(f"seed-{seed}", chain_config(settings, options, seed, model=scales), after=partial(_compare, settings))
        for seed in settings.seeds
    ]


def _compare(settings: Settings, trained: Trained, recorder: Recorder) -> None:
    (member,) = trained.members.values()
    seed, x = member.config.seed, load_data(member.config.data).x_train
    kernel, w = _first_layer(member.model, x)
    truth = egop(lambda x: chain_monomial(x, settings.rank), x.double())
    random = _corrupted(kernel, seed, settings.corruptions)
    matrices = {"NFM": w.mT @ w, "AGOP": w.mT @ kernel @ w, "corrupted": w.mT @ random[0] @ w}
    eigenvalues = torch.linalg.eigvalsh(kernel)
    recorder.record(
        "alignment",
        seed=seed,
        nfa=float(nfa(w, kernel)),
        corrupted=mean(float(nfa(w, q)) for q in random),
        eigenvalue_spread=float(eigenvalues.std(correction=0) / eigenvalues.mean()),
        **{f"egop_{name}": float(cosine(truth, m)) for name, m in matrices.items()},
    )
    recorder.save("matrices", EGOP=truth, **matrices)


def _first_layer(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """K of the first layer, and its weight."""
    w = model.get_parameter("hidden1.weight").detach()
    return tangent_kernel(model, x.to(w.device), "hidden1")["hidden1"].cpu().double(), w.cpu().double()


def _near(results: Results[Settings], key: str, claim: str, published: float, tolerance: float) -> Claim:
    values = [record[key] for record in results.records("alignment")]
    holds = abs(mean(values) - published) <= tolerance
    return Claim(f"{claim} (within {tolerance:g})", f"{published:g}", spread_text(values), holds)


def aligned(results: Results[Settings]) -> Claim:
    """[NFA] Fig. 1: ρ(F, Ḡ) = 0.93."""
    return _near(results, "nfa", "ρ(F, Ḡ) of the trained first layer", 0.93, 0.05)


def corruption(results: Results[Settings]) -> Claim:
    """[NFA] Fig. 1: 0.53 with random eigenvectors."""
    return _near(results, "corrupted", "ρ(F, WᵀQW), Q with K's spectrum and random eigenvectors", 0.53, 0.1)


def far_from_identity(results: Results[Settings]) -> Claim:
    """[NFA] §2.2: the deviation of K's eigenvalues is 5.9 times their mean."""
    return _near(results, "eigenvalue_spread", "standard deviation of K's eigenvalues / their mean", 5.9, 0.6)


def like_the_target(results: Results[Settings]) -> Claim:
    """[NFA] Fig. 1: NFM and AGOP resemble the EGOP of the target, the corrupted AGOP does not."""
    nfm, agop, random = (
        mean(r[f"egop_{name}"] for r in results.records("alignment")) for name in ("NFM", "AGOP", "corrupted")
    )
    return Claim(
        "NFM and AGOP are closer to the target's EGOP than the corrupted AGOP",
        "seen in the figure",
        f"ρ(EGOP, ·): NFM {nfm:.2f}, AGOP {agop:.2f}, corrupted {random:.2f}",
        min(nfm, agop) > random + 0.1,
    )


def figure(results: Results[Settings]) -> Figure:
    """EGOP, NFM, AGOP, corrupted AGOP of the first seed."""
    stored = results.artefact(f"seed-{results.settings.seeds[0]}.after", "matrices")
    record = results.records("alignment", seed=results.settings.seeds[0])[0]
    titles = {
        "EGOP": "EGOP of the target",
        "NFM": r"NFM  $F = W^\top W$",
        "AGOP": rf"AGOP  $W^\top K W$  ($\rho$ {record['nfa']:.2f})",
        "corrupted": rf"$W^\top Q W$  ($\rho$ {float(cosine(stored['NFM'], stored['corrupted'])):.2f})",
    }
    page, axes = panels(1, 4, height=2.4)
    for place, (name, title) in zip(axes[0], titles.items(), strict=True):
        image = matrix(place, stored[name] / stored[name].abs().max(), title, symmetric=True)
    page.colorbar(image, ax=list(axes[0]), shrink=0.75, label="entry / largest entry")
    return page


_CLAIMS = (aligned, corruption, far_from_identity, like_the_target)
FIG1 = Experiment(Settings(seeds=(0, 1, 2)), Settings(), parts, _CLAIMS, figure)


# -- nfa-fig9: diagonals as images of faces -----------------------------------------------------------------------
IMAGES = {
    "NFM": r"diagonal of $W^\top W$",
    "AGOP": r"of $W^\top K W$",
    "corrupted": r"of $W^\top Q W$, one draw of $Q$",
}


@dataclass(frozen=True)
class Faces:
    """[NFA] Appendix H: CelebA glasses, balanced 7,500, 2 hidden × 128, Adam 1e-4, 500 epochs. Batch size not given."""

    seeds: tuple[int, ...] = (0, 1, 2)
    data: tuple[str, ...] = ("celeba",)
    samples: int = 7500
    image_size: int = 64
    width: int = 128
    init_scale: float = 0.02
    lr: float = 1e-4
    batch_size: int = 64
    epochs: float = 500.0
    corruptions: int = 20


def faces_parts(settings: Faces, options: Options) -> list[Training]:
    """One training per data set, measured at its end."""
    sizes = {"n_train": settings.samples, "n_test": min(2000, settings.samples), "image_size": settings.image_size}
    hidden = [settings.width, settings.width]
    model = {"name": "mlp", "hidden": hidden, "activation": "relu", "bias": False, "init": "normal"}
    found = []
    for name in settings.data:
        config = training_config(
            settings,
            options,
            data={"name": name, **sizes},
            model={**model, "init_scale": [settings.init_scale, 1.0, 1.0]},
            method={"name": "adam", "lr": settings.lr},
            evaluate_every=settings.epochs / 10,
            checkpoint_every=settings.epochs / 10,
        )
        found.append(Training(name, config, after=partial(_measure, settings)))
    return found


def _measure(settings: Faces, trained: Trained, recorder: Recorder) -> None:
    for index, member in enumerate(trained.members.values()):
        config = member.config
        data = load_data(config.data)
        kernel, w = _first_layer(member.model, data.x_train)
        nfm, agop = w.square().sum(0), _diagonal(w, kernel)
        others = [_diagonal(w, q) for q in _corrupted(kernel, config.seed, settings.corruptions)]
        recorder.record(
            "diagonals",
            data=config.data.name,
            seed=config.seed,
            test_accuracy=member.last("test_accuracy"),
            pearson=float(cosine(nfm, agop, center=True)),
            corrupted=mean(float(cosine(nfm, other, center=True)) for other in others),
        )
        if index == 0:
            images = {"NFM": nfm, "AGOP": agop, "corrupted": others[0]}
            recorder.save("diagonals", **{key: value.reshape(data.input_shape) for key, value in images.items()})


def _diagonal(w: Tensor, kernel: Tensor) -> Tensor:
    """Diagonal of ``WᵀKW`` without forming it."""
    return (w * (kernel @ w)).sum(0)


def _values(results: Results[Faces], key: str, data: str) -> list[float]:
    return [record[key] for record in results.records("diagonals", data=data)]


def similar(results: Results[Faces]) -> Iterator[Claim]:
    """[NFA] Fig. 9: Pearson correlation 0.91."""
    for data in results.settings.data:
        values = _values(results, "pearson", data)
        accuracy = mean(_values(results, "test_accuracy", data))
        text = f"Pearson ρ of the diagonals of NFM and AGOP at least 0.85 ({data}, test accuracy {accuracy:.1%})"
        yield Claim(text, "0.91", spread_text(values), *_verdict(data, mean(values) >= 0.85))


def destroyed(results: Results[Faces]) -> Iterator[Claim]:
    """[NFA] Fig. 9: 0.04 with random eigenvectors."""
    for data in results.settings.data:
        whole, values = _values(results, "pearson", data), _values(results, "corrupted", data)
        drop = mean(whole) - mean(values)
        lowered, left = _verdict(data, drop > 0.3), _verdict(data, abs(mean(values)) < 0.25)
        yield Claim(f"random eigenvectors lower it by more than 0.3 ({data})", "by 0.87", f"by {drop:.2f}", *lowered)
        yield Claim(f"and leave less than 0.25 ({data})", "0.04", spread_text(values), *left)


def _verdict(data: str, holds: bool) -> tuple[bool | None, str]:
    """What is claimed of CelebA stays open on other data."""
    if data == "celeba":
        return holds, ""
    return None, f"{data} is not CelebA: only glasses tell the classes apart, so one direction of W rules, whatever Q"


def faces_figure(results: Results[Faces]) -> Figure:
    """The three diagonals of the first seed, a row per data set; beside ρ of the one draw of Q is the mean over all."""
    page, axes = panels(len(results.settings.data), 3, height=2.4)
    for row, data in zip(axes, results.settings.data, strict=True):
        stored = results.artefact(f"{data}.after", "diagonals")
        every = mean(_values(results, "corrupted", data))
        for place, (name, title) in zip(row, IMAGES.items(), strict=True):
            rho = float(cosine(stored["NFM"].flatten(), stored[name].flatten(), center=True))
            note = "" if name == "NFM" else f"$\\rho$ {rho:.2f}"
            note += f"; mean over draws {every:.2f}" if name == "corrupted" else ""
            matrix(place, picture(stored[name]), f"{title}\n{note}")
        row[0].set_ylabel(data)
    return page


FIG9 = Experiment(
    Faces((0, 1), ("faces",), samples=1000, epochs=40.0),
    Faces(),
    faces_parts,
    (similar, destroyed),
    faces_figure,
    classes=True,
)
