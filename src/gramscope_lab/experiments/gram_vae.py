"""gram-fig10 and gram-fig5: target linearity of a VAE's codes for its inputs by β, and interpolation of codes against pixels.

Target linearity is measured of the latent means μ and of codes z drawn from the posterior, for inputs centred over
samples. The published values centre over pixels, so their level is not comparable; orders and trends are. A fit without
ridge does not depend on the scale of μ: where the posterior has collapsed, a tiny μ can still be a linear image of the input.
gram-fig5 compares decoded interpolations with the bound of [Gram] Proposition 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.instruments.interpolation import interpolation_error
from gramscope.layers.model_call import evaluating
from gramscope.measures.linearity import target_linearity
from gramscope_lab.data.dataset import DataSet, generator
from gramscope_lab.experiments.experiment import (
    Claim,
    Experiment,
    Options,
    Recorder,
    Results,
    Training,
    part_name,
    training_config,
)
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, listed, matrix, panels
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, load_data
from gramscope_lab.training.train import Trained


@dataclass(frozen=True)
class Settings:
    """[Gram] B.6. ``epochs`` are one value per data set, in the order of ``data``."""

    seeds: tuple[int, ...] = (0,)
    data: tuple[str, ...] = ("mnist", "cifar10")
    epochs: tuple[float, ...] = (10.0, 30.0)
    betas: tuple[float, ...] = (0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
    hidden: tuple[int, ...] = (512, 512)
    latent: int = 32
    lr: float = 0.0001
    batch_size: int = 128
    every: float = 1.0
    samples: int = 10_000
    labels: tuple[int, ...] = (2, 8)
    pairs: int = 5000


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training per data set, with all β and seeds."""
    if len(settings.epochs) not in (1, len(settings.data)):
        raise InputError(f"epochs = {settings.epochs}: give one value, or one for each of {settings.data}")
    lengths = settings.epochs * len(settings.data) if len(settings.epochs) == 1 else settings.epochs
    measure = partial(_linearity, settings.samples)
    return [
        Training(part_name("vae", data), _config(settings, options, data, epochs), measure=measure)
        for data, epochs in zip(settings.data, lengths, strict=True)
    ]


def _config(settings: Settings, options: Options, data: str, epochs: float) -> TrainConfig:
    return training_config(
        settings,
        options,
        epochs=epochs,
        evaluate_every=epochs,
        data={"name": data},
        model={"name": "vae", "hidden": settings.hidden, "latent": settings.latent},
        method={"name": "adam", "lr": settings.lr},
        measure={"every": settings.every},
        sweep={"model.beta": settings.betas},
    )


def _linearity(samples: int, model: nn.Module, job: Job, step: int) -> Iterator[dict[str, Any]]:
    """TL from latent means to centred inputs on training samples; reconstruction error on the test set."""
    vae: Any = model
    with torch.no_grad(), evaluating(model):
        x = job.data.x_train[:samples]
        mean, log_variance = (torch.cat(found) for found in zip(*map(vae.encode, _blocks(x)), strict=True))
        noise = torch.randn(mean.shape, generator=generator(job.config.seed, "codes", step)).to(mean)
        centred = x.flatten(1) - x.flatten(1).mean(0)
        of_mean = target_linearity(mean, centred, intercept=True)
        of_codes = target_linearity(mean + torch.exp(0.5 * log_variance) * noise, centred, intercept=True)
        error = sum(float((vae(part).logits.sigmoid() - part).square().sum()) for part in _blocks(job.data.x_test))
    yield {
        "beta": vae.beta,
        "of_mean": float(of_mean),
        "of_codes": float(of_codes),
        "reconstruction": error / job.data.x_test.numel(),
    }


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Samples in blocks that fit into memory with their activations."""
    return torch.split(x, 5000)


# -- gram-fig10 ---------------------------------------------------------------------------------------------------
def _over_training(results: Results[Settings], data: str, key: str) -> list[list[float]]:
    """For every β the values over training, means over seeds."""
    part = part_name("vae", data)
    found = (results.records("measurement", part=part, beta=beta) for beta in results.settings.betas)
    return [curve(records, "epoch", key)[1] for records in found]


#: recorded linearity -> what it is of
CODES = {"of_mean": "latent means μ", "of_codes": "codes z drawn from the posterior"}


def trade_off(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.6: low β has low error and high TL, high β the reverse."""
    betas = results.settings.betas
    for data in results.settings.data:
        errors = [values[-1] for values in _over_training(results, data, "reconstruction")]
        yield Claim(
            f"{data}: the reconstruction error grows with β",
            "low β: low error",
            listed("β {:g}: {:.3f}", betas, errors),
            all(a <= b * 1.02 for a, b in pairwise(errors)) and errors[-1] > errors[0],
        )
        for key, what in CODES.items():
            values = [values[-1] for values in _over_training(results, data, key)]
            holds = all(a >= b - 0.01 for a, b in pairwise(values)) and values[0] > values[-1]
            measured = listed("β {:g}: {:.3f}", betas, values)
            yield Claim(f"{data}: TL of {what} falls with β", "low β: high TL", measured, holds)


def rises(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.6: at low β TL rises steadily through training, at high β it stays or rises a little."""
    betas = results.settings.betas
    for data in results.settings.data:
        for key, what in CODES.items():
            changes = [values[-1] - values[0] for values in _over_training(results, data, key)]
            yield Claim(
                f"{data}: TL of {what} rises over training at β {betas[0]:g}, more than at β {betas[-1]:g}",
                "rises at low β, stays at high β",
                listed("β {:g}: {:+.3f}", betas, changes),
                changes[0] > 0 and changes[0] > changes[-1],
            )


def linearity_figure(results: Results[Settings]) -> Figure:
    """A row per data set: target linearity and reconstruction error over training, a curve per β."""
    settings = results.settings
    page, axes = panels(len(settings.data), 3, width=2.5, height=2.1, sharex="row")
    columns = (("of_mean", r"TL of $\mu$"), ("of_codes", r"TL of $z$"), ("reconstruction", "reconstruction error"))
    for row, data in zip(axes, settings.data, strict=True):
        for place, (key, title) in zip(row, columns, strict=True):
            for index, beta in enumerate(settings.betas):
                records = results.records("measurement", part=part_name("vae", data), beta=beta)
                band(place, records, "epoch", key, index=index, label=rf"$\beta$ = {beta:g}")
            place.set_title(f"{data}: {title}")
            place.set_xlabel("epoch")
    legend_below(page, axes[0, 0])
    return page


# -- gram-fig5 ----------------------------------------------------------------------------------------------------
def interpolated_parts(settings: Settings, options: Options) -> list[Training]:
    """The trainings of gram-fig10, and what is measured after them."""
    if len(settings.labels) != 2:
        raise InputError(f"labels = {list(settings.labels)}: name two classes, such as 2,8")
    return [replace(part, after=partial(_interpolate, settings)) for part in parts(settings, options)]


def _interpolate(settings: Settings, trained: Trained, recorder: Recorder) -> None:
    """Strips from one class to another, and the bound of [Gram] Proposition 3, for every β."""
    for member in trained.members.values():
        data = load_data(member.config.data)
        with torch.no_grad(), evaluating(member.model):
            _measure(settings, member.model, data, recorder, member.config.seed)


def _measure(settings: Settings, vae: Any, data: DataSet, recorder: Recorder, seed: int) -> None:
    device = next(vae.parameters()).device
    x = data.x_train[: settings.samples].to(device)
    codes = torch.cat([vae.encode(part)[0] for part in _blocks(x)])

    def decode(z: Tensor) -> Tensor:
        return vae.decode(z).sigmoid()  # type: ignore[no-any-return]

    random = generator(seed, "pairs")
    found = interpolation_error(decode, codes, x, pairs=settings.pairs, generator=random, intercept=True)
    recorder.record(
        "interpolation",
        data=data.name,
        seed=seed,
        beta=vae.beta,
        error=found.error,
        decoder_gap=found.decoder_gap,
        pair_residual=found.pair_residual,
        ols_residual=found.ols_residual,
        bound=found.bound,
        target_linearity=found.target_linearity,
        reconstruction=float((decode(codes) - x).flatten(1).norm(dim=1).mean()),
    )
    if seed == settings.seeds[0]:
        ends = torch.stack([_sample(data, label) for label in settings.labels]).to(device)
        weights = torch.linspace(0, 1, 9, device=device)[:, None]
        z = (1 - weights) * vae.encode(ends[:1])[0] + weights * vae.encode(ends[1:])[0]
        weights = weights.reshape(-1, *[1] * len(data.input_shape))
        pixels = (1 - weights) * ends[0] + weights * ends[1]
        recorder.save(f"strip-{vae.beta:g}", decoded=decode(z), pixels=pixels)


def _sample(data: DataSet, label: int) -> Tensor:
    """The first test image of a class."""
    index = (data.y_test == label).nonzero()
    if not len(index):
        raise InputError(f"{data.name} has no test image of class {label}; choose others with --set labels=2,8")
    return data.x_test[int(index[0])]


def _interpolations(results: Results[Settings], data: str) -> list[dict[str, Any]]:
    found = results.records("interpolation", data=data, seed=results.settings.seeds[0])
    return sorted(found, key=lambda r: r["beta"])


def bound_holds(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Proposition 3 and its form for a given decoder."""
    for data in results.settings.data:
        found = _interpolations(results, data)
        yield Claim(
            f"{data}: residual of the linear map over pairs ≤ over samples ≤ √((1 − TL) mean‖x − x̄‖²)",
            "Proposition 3",
            _texts("β {beta:g}: {pair_residual:.2f} ≤ {ols_residual:.2f} ≤ {bound:.2f}", found),
            all(r["pair_residual"] <= r["ols_residual"] * 1.01 and r["ols_residual"] <= r["bound"] for r in found),
        )
        yield Claim(
            f"{data}: error of the decoder ≤ residual of the linear map + distance of the decoder from it",
            "the form for a given decoder",
            _texts("β {beta:g}: {error:.2f} ≤ {pair_residual:.2f} + {decoder_gap:.2f}", found),
            all(r["error"] <= (r["pair_residual"] + r["decoder_gap"]) * (1 + 1e-6) for r in found),
        )


def _texts(form: str, records: list[dict[str, Any]]) -> str:
    return ", ".join(form.format(**record) for record in records)


def follows(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 5: the decoder follows linear interpolation where TL is high."""
    for data in results.settings.data:
        found = sorted(_interpolations(results, data), key=lambda r: -r["target_linearity"])
        high, low = found[0], found[-1]
        yield Claim(
            f"{data}: the interpolation error is lower where TL is highest (β {high['beta']:g}) than where lowest",
            "decoder follows linear interpolation where TL is high",
            _texts("TL {target_linearity:.2f}: {error:.2f}", found),
            high["error"] < low["error"],
        )


def strip_figure(results: Results[Settings]) -> Figure:
    """Pixel interpolation above the decoded ones, a row per β; errors and bound below."""
    data = results.settings.data[0]
    found = _interpolations(results, data)
    strips = [results.artefact(f"{part_name('vae', data)}.after", f"strip-{r['beta']:g}") for r in found]
    page, axes = panels(1 + len(found), len(strips[0]["decoded"]), width=0.85, height=0.95)
    rows = [("pixels", strips[0]["pixels"])]
    for r, strip in zip(found, strips, strict=True):
        name = rf"$\beta$ = {r['beta']:g}, TL {r['target_linearity']:.2f}" + f"\ndecoder {r['error']:.2f}\n"
        rows.append((name + rf"linear {r['pair_residual']:.2f} $\leq$ {r['bound']:.2f}", strip["decoded"]))
    for row, (name, images) in zip(axes, rows, strict=True):
        for place, image in zip(row, images, strict=True):
            picture = image.float().movedim(0, -1).squeeze(-1)
            matrix(place, picture, "", cmap="gray_r" if picture.dim() == 2 else None, vmin=0, vmax=1)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    note = r"left: mean error over pairs at $\lambda$ = ½ of the decoder, and of the linear map $\leq$ its bound"
    page.supxlabel(note, fontsize=7)
    return page


# -- experiments --------------------------------------------------------------------------------------------------
_QUICK = Settings(
    data=("digits",), epochs=(90.0,), betas=(0.05, 0.5, 2.0, 10.0), hidden=(128, 128), latent=16, lr=0.0005,
    batch_size=64, every=5.0,
)  # fmt: skip
FIG10 = Experiment(_QUICK, Settings(), parts, (trade_off, rises), linearity_figure)
FIG5 = Experiment(
    replace(_QUICK, betas=(0.05, 0.5, 10.0)),
    Settings(data=("mnist",), epochs=(10.0,), betas=(0.05, 1.0, 10.0)),
    interpolated_parts,
    (bound_holds, follows),
    strip_figure,
    classes=True,
)
