"""gram-fig10: target linearity of a VAE's codes for its inputs, and its reconstruction error, by β.

Target linearity is measured of the latent means μ and of codes z drawn from the posterior, for inputs centred over
samples. The published values centre over pixels, so their level is not comparable; orders and trends are. A fit without
ridge does not depend on the scale of μ: where the posterior has collapsed, a tiny μ can still be a linear image of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.layers.model_call import evaluating
from gramscope.measures.linearity import target_linearity
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.seeds import generator
from gramscope_lab.experiments.accuracy_curves import part_name
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, training_config
from gramscope_lab.experiments.parts import Training
from gramscope_lab.experiments.plots import Figure, band, curve, legend_below, panels
from gramscope_lab.nets.vae import VAE, VAEOutput, vae_loss
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, load_data


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


# -- training -----------------------------------------------------------------------------------------------------
class SamplingVAE(nn.Module):
    """The VAE of this experiment; the wrapper keeps the parameter names ``vae.…`` of stored checkpoints."""

    def __init__(self, vae: VAE) -> None:
        super().__init__()
        self.vae = vae

    @override
    def forward(self, x: Tensor) -> VAEOutput:
        return self.vae(x)  # type: ignore[no-any-return]


def elbo(output: VAEOutput, target: Tensor) -> Tensor:
    """The VAE's loss of each sample, with the input as target."""
    return vae_loss(output, target.reshape(output.logits.shape))


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training per data set, with all β and seeds."""
    if len(settings.epochs) not in (1, len(settings.data)):
        raise InputError(f"epochs = {settings.epochs}: give one value, or one for each of {settings.data}")
    lengths = settings.epochs * len(settings.data) if len(settings.epochs) == 1 else settings.epochs
    return [
        Training(
            part_name("vae", data),
            config := _config(settings, options, data, epochs),
            data=_reconstruction(config),
            model=lambda member, found: _build(member, found, settings),
            loss=elbo,
            measure=_Linearity(settings.samples),
        )
        for data, epochs in zip(settings.data, lengths, strict=True)
    ]


def _config(settings: Settings, options: Options, data: str, epochs: float) -> TrainConfig:
    return training_config(
        settings,
        options,
        epochs=epochs,
        evaluate_every=epochs,
        data={"name": data, "dir": options.data_dir},
        model={"name": "vae", "hidden": settings.hidden, "latent": settings.latent},
        method={"name": "adam", "lr": settings.lr},
        measure={"every": settings.every},
        sweep={"model.beta": settings.betas},
    )


def _reconstruction(config: TrainConfig) -> Callable[[], DataSet]:
    """The configured images with themselves as targets."""

    def given() -> DataSet:
        data = load_data(config.data)
        low, high = float(data.x_train.min()), float(data.x_train.max())
        if low < 0 or high > 1:
            raise InputError(
                f"{data.name} has inputs from {low:g} to {high:g}; a VAE's cross-entropy needs them in [0, 1]"
            )
        return replace(data, y_train=data.x_train.flatten(1), y_test=data.x_test.flatten(1), classes=None)

    return given


def _build(config: TrainConfig, data: DataSet, settings: Settings) -> SamplingVAE:
    random, beta = generator(config.seed, "weights"), config.model.options["beta"]
    sizes = {"hidden": settings.hidden, "latent": settings.latent}
    return SamplingVAE(VAE(data.input_shape, **sizes, beta=beta, sampling=True, generator=random))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Linearity:
    """TL from latent means to centred inputs on training samples; reconstruction error on the test set."""

    samples: int

    def __call__(self, model: nn.Module, job: Job, step: int) -> Iterator[dict[str, Any]]:
        if not isinstance(model, SamplingVAE):
            raise InputError(f"a VAE is measured here, not {type(model).__name__}")
        with torch.no_grad(), evaluating(model):
            x = job.data.x_train[: self.samples]
            mean, log_variance = (torch.cat(found) for found in zip(*map(model.vae.encode, blocks(x)), strict=True))
            noise = torch.randn(mean.shape, generator=generator(job.config.seed, "codes", step)).to(mean)
            centred = x.flatten(1) - x.flatten(1).mean(0)
            of_mean = target_linearity(mean, centred, intercept=True)
            of_codes = target_linearity(mean + torch.exp(0.5 * log_variance) * noise, centred, intercept=True)
            error = 0.0
            for part in blocks(job.data.x_test):
                error += float((model.vae(part).logits.sigmoid() - part).square().sum())
        yield {
            "beta": model.vae.beta,
            "of_mean": float(of_mean),
            "of_codes": float(of_codes),
            "reconstruction": error / job.data.x_test.numel(),
        }


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Samples in blocks that fit into memory with their activations."""
    return torch.split(x, 5000)


# -- claims -----------------------------------------------------------------------------------------
def _curve(results: Results[Settings], data: str, beta: float, key: str) -> tuple[list[float], list[float]]:
    records = results.records("measurement", part=part_name("vae", data), beta=beta)
    epochs, means, _ = curve(records, "epoch", key)
    return epochs, means


def _finals(results: Results[Settings], data: str, key: str) -> list[float]:
    return [_curve(results, data, beta, key)[1][-1] for beta in results.settings.betas]


def _by_beta(betas: Sequence[float], values: Sequence[float]) -> str:
    return ", ".join(f"β {beta:g}: {value:.3f}" for beta, value in zip(betas, values, strict=True))


#: recorded linearity -> what it is of
CODES = {"of_mean": "latent means μ", "of_codes": "codes z drawn from the posterior"}


def trade_off(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.6: low β has low error and high TL, high β the reverse."""
    betas = results.settings.betas
    for data in results.settings.data:
        errors = _finals(results, data, "reconstruction")
        yield Claim(
            f"{data}: the reconstruction error grows with β",
            "low β: low error",
            _by_beta(betas, errors),
            all(a <= b * 1.02 for a, b in pairwise(errors)) and errors[-1] > errors[0],
        )
        for key, what in CODES.items():
            values = _finals(results, data, key)
            holds = all(a >= b - 0.01 for a, b in pairwise(values)) and values[0] > values[-1]
            reason = "" if holds or key == "of_codes" else "a collapsed μ is tiny, but TL does not see its scale"
            yield Claim(f"{data}: TL of {what} falls with β", "low β: high TL", _by_beta(betas, values), holds, reason)


def rises(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] B.6: at low β TL rises steadily through training, at high β it stays or rises a little."""
    betas = results.settings.betas
    for data in results.settings.data:
        for key, what in CODES.items():
            changes = []
            for beta in betas:
                values = _curve(results, data, beta, key)[1]
                changes.append(values[-1] - values[0])
            yield Claim(
                f"{data}: TL of {what} rises over training at β {betas[0]:g}, more than at β {betas[-1]:g}",
                "rises at low β, stays at high β",
                ", ".join(f"β {beta:g}: {change:+.3f}" for beta, change in zip(betas, changes, strict=True)),
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


QUICK = Settings(
    data=("digits",), epochs=(90.0,), betas=(0.05, 0.5, 2.0, 10.0), hidden=(128, 128), latent=16, lr=0.0005,
    batch_size=64, every=5.0,
)  # fmt: skip
FIG10 = Experiment(QUICK, Settings(), parts, (trade_off, rises), linearity_figure)
