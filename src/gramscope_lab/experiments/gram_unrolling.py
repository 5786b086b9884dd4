"""gram-fig1: the virtual update unrolls a Swiss roll, and the first layer's Gram follows its covariance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.measures.alignment import cosine
from gramscope.measures.linearity import target_linearity
from gramscope.measures.virtual import virtual_trajectory
from gramscope_lab.data import load
from gramscope_lab.data.dataset import generator
from gramscope_lab.experiments.experiment import Claim, Computation, Experiment, Options, Recorder, Results
from gramscope_lab.experiments.plots import PALETTE, Figure, mean, panels
from gramscope_lab.nets import build
from gramscope_lab.spread import spread_text
from gramscope_lab.training.job import resolve_device


@dataclass(frozen=True)
class Settings:
    """[Gram] Fig. 1: full-batch descent on the mean squared error; the target is scaled to [0, 1] like the points."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    n: int = 1000
    width: int = 32
    lr: float = 0.05
    epochs: int = 100
    every: int = 10
    frames: int = 6
    gamma: float = 700.0


def parts(settings: Settings, options: Options) -> list[Computation]:
    """One computation per seed."""
    if settings.epochs % settings.every:
        raise InputError(f"every = {settings.every}: must divide epochs = {settings.epochs}")
    most = settings.epochs // settings.every + 1
    if settings.frames > most:
        raise InputError(
            f"frames = {settings.frames}: at most {most} are there, one every {settings.every} of {settings.epochs} epochs"
        )
    return [Computation(f"seed-{seed}", partial(_unroll, settings, options, seed)) for seed in settings.seeds]


def _unroll(settings: Settings, options: Options, seed: int, recorder: Recorder) -> None:
    device = resolve_device(options.device)
    data = load("swiss-roll", seed=seed, n_train=settings.n).to(device)
    x, y = data.x_train.requires_grad_(), data.y_train
    net = build(
        "mlp",
        data.input_shape,
        1,
        hidden=(settings.width, settings.width),
        bias=(False, True, True),
        generator=generator(seed, "weights"),
    ).to(device)
    first = net.get_parameter("hidden1.weight")
    optimizer = torch.optim.SGD(net.parameters(), lr=settings.lr)
    gradients: list[Tensor] = []
    grams = [_gram(first)]
    shift = torch.zeros_like(grams[0])
    shifts, losses = [shift], []
    for _ in recorder.track(range(settings.epochs), settings.epochs):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        optimizer.step()
        gradients.append(slope)  # of the mean loss, so that a step of lr on it moves x by lr · slope
        shift = shift + _gram(x - settings.lr * slope) - _gram(x)
        losses.append(float(loss.detach()))
        grams.append(_gram(first))
        shifts.append(shift)
    frames = virtual_trajectory(x.detach(), gradients, settings.gamma, every=settings.every)
    for index, frame in enumerate(frames):
        epoch = index * settings.every
        moved = grams[epoch] - grams[0]
        recorder.record(
            "frame",
            seed=seed,
            epoch=epoch,
            target_linearity=float(target_linearity(frame, y, intercept=True)),
            gram_cosine=float(cosine(moved, shifts[epoch])) if epoch else None,
            loss=losses[min(epoch, settings.epochs - 1)],
        )
    recorder.save("frames", points=frames, grams=torch.stack(grams[:: settings.every]), target=y.flatten())


def _gram(rows: Tensor) -> Tensor:
    """``WᵀW`` in float64."""
    rows = rows.detach().double()
    return rows.mT @ rows


# -- claims -------------------------------------------------------------------------------------------------------
def _linearity(results: Results[Settings], epoch: int) -> list[float]:
    return [r["target_linearity"] for r in results.records("frame", epoch=epoch)]


def unrolls(results: Results[Settings]) -> Claim:
    """[Gram] Fig. 1: the roll unrolls into a linear form."""
    last = results.settings.every * (results.settings.frames - 1)
    before, after = _linearity(results, 0), _linearity(results, last)
    return Claim(
        f"TL of the virtual points (with intercept) after {last} epochs is more than 0.5 above the inputs'",
        "the roll unrolls, TL rises well above the input's",
        f"{spread_text(before)} → {spread_text(after)}",
        mean(after) > mean(before) + 0.5,
    )


def follows(results: Results[Settings]) -> Claim:
    """[Gram] Theorem 1: the Gram's shift over training is the accumulated virtual covariance shift."""
    values = [r["gram_cosine"] for r in results.records("frame", epoch=results.settings.epochs)]
    return Claim(
        "the Gram of layer 1 follows the virtual covariance: cosine of W_tᵀW_t − W₀ᵀW₀ and Σ v above 0.98",
        "contours adapt to the unrolling",
        spread_text(values, ".3f", ".3f"),
        mean(values) > 0.98,
    )


# -- figure -------------------------------------------------------------------------------------------------------
def figure(results: Results[Settings]) -> Figure:
    """The frames of the first seed: virtual points, each frame rescaled to [0, 1], and contours of N(x̄, WᵀW)."""
    settings = results.settings
    seed = settings.seeds[0]
    stored = results.artefact(f"seed-{seed}", "frames")
    page, axes = panels(1, settings.frames, width=1.9, height=2.1, sharex=True, sharey=True)
    for index, place in enumerate(axes[0]):
        points = stored["points"][index].double()
        low, high = points.amin(0), points.amax(0)
        points = (points - low) / (high - low)
        dots = place.scatter(*points.T.numpy(), c=stored["target"].numpy(), s=3, cmap="cividis", linewidths=0)
        _contours(place, points.mean(0), stored["grams"][index])
        (record,) = results.records("frame", seed=seed, epoch=index * settings.every)
        place.set_title(f"epoch {record['epoch']}\nTL {record['target_linearity']:.2f}")
        place.set_xlim(-0.05, 1.05)
        place.set_ylim(-0.05, 1.05)
        place.set_xticks([0, 1])
        place.set_yticks([0, 1])
        place.set_aspect("equal")
        place.grid(visible=False)
    page.colorbar(dots, ax=list(axes[0]), shrink=0.6, label="target")
    return page


def _contours(axes: Any, centre: Tensor, gram: Tensor) -> None:
    """Ellipses of equal density of N(x̄, WᵀW), scaled so that the largest fits the frame."""
    values, vectors = torch.linalg.eigh(gram.double())
    root = vectors @ torch.diag((values / values[-1]).clamp_min(0).sqrt())
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    for radius in (0.15, 0.3, 0.45):
        line = centre[:, None] + radius * (root @ circle)
        axes.plot(*line.numpy(), color=PALETTE[1], linestyle="--", linewidth=0.8)


FIG1 = Experiment(Settings(seeds=(0, 1)), Settings(), parts, (unrolls, follows), figure)
