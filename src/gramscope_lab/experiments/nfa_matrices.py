"""nfa-fig1: the feature matrices of a trained net side by side, and what is lost when K's eigenvectors are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gramscope.instruments.egop import egop
from gramscope.measures.alignment import corrupted, cosine, nfa
from gramscope_lab.data.seeds import generator
from gramscope_lab.data.synthetic import chain_monomial
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results
from gramscope_lab.experiments.nfa_descent import (
    chain_monomials,
    covariance,
    descend,
    initial_weights,
    outputs_of,
    run_nets,
)
from gramscope_lab.experiments.parts import Computation, Recorder
from gramscope_lab.experiments.plots import Figure, matrix, mean, panels, spread
from gramscope_lab.training.job import resolve_device


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


def parts(settings: Settings, options: Options) -> list[Computation]:
    """One computation: all seeds are trained together."""
    return [Computation("net", partial(_train, settings, options))]


def _train(settings: Settings, options: Options, recorder: Recorder) -> None:
    device = resolve_device(options.device)
    task = chain_monomials(
        settings.seeds, n=settings.n, n_test=1000, d=settings.d, rank=settings.rank, alpha=None, device=device
    )
    weights = initial_weights(settings.d, settings.width, 2, [settings.init_scale], settings.seeds, device)
    for _ in recorder.track(range(settings.steps), settings.steps):
        weights = descend(weights, run_nets(weights, task.x), task.y, settings.lr)
    passed = run_nets(weights, task.x)
    kernels = covariance(passed.tangents[0])[0]
    losses = (passed.outputs - task.y).square().mean(-1)[0]
    test_losses = (outputs_of(weights, task.x_test) - task.y_test).square().mean(-1)[0]
    for index, seed in enumerate(settings.seeds):
        w, kernel = weights[0][0, index].double(), kernels[index]
        truth = egop(lambda x: chain_monomial(x, settings.rank), task.x[index])
        random = [corrupted(kernel, generator(seed, "corrupted", draw)) for draw in range(settings.corruptions)]
        matrices = {"EGOP": truth, "NFM": w.mT @ w, "AGOP": w.mT @ kernel @ w, "corrupted": w.mT @ random[0] @ w}
        eigenvalues = torch.linalg.eigvalsh(kernel)
        recorder.record(
            "alignment",
            seed=seed,
            nfa=float(nfa(w, kernel)),
            corrupted=mean(float(nfa(w, q)) for q in random),
            eigenvalue_spread=float(eigenvalues.std(correction=0) / eigenvalues.mean()),
            train_loss=float(losses[index]),
            test_loss=float(test_losses[index]),
            **{f"egop_{name}": float(cosine(truth, m)) for name, m in matrices.items() if name != "EGOP"},
        )
        if index == 0:
            recorder.save("matrices", **matrices)


def _near(results: Results[Settings], key: str, claim: str, published: float, tolerance: float) -> Claim:
    values = [record[key] for record in results.records("alignment")]
    holds = abs(mean(values) - published) <= tolerance
    return Claim(f"{claim} (within {tolerance:g})", f"{published:g}", spread(values), holds)


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
    stored = results.artefact("net", "matrices")
    record = results.records("alignment")[0]
    titles = {
        "EGOP": "EGOP of the target",
        "NFM": r"NFM  $F = W^\top W$",
        "AGOP": rf"AGOP  $W^\top K W$  ($\rho$ {record['nfa']:.2f})",
        "corrupted": rf"$W^\top Q W$  ($\rho$ {float(cosine(stored['NFM'], stored['corrupted'])):.2f})",
    }
    page, axes = panels(1, 4, height=2.4)
    for place, (name, title) in zip(axes[0], titles.items(), strict=True):
        image = matrix(place, _unit(stored[name]), title, symmetric=True)
    page.colorbar(image, ax=list(axes[0]), shrink=0.75, label="entry / largest entry")
    return page


def _unit(values: Tensor) -> Tensor:
    return values / values.abs().max()


_CLAIMS = (aligned, corruption, far_from_identity, like_the_target)
FIG1 = Experiment(Settings(seeds=(0, 1, 2)), Settings(), parts, _CLAIMS, figure)
