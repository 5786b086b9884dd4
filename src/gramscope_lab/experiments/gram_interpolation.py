"""gram-fig5: decoded interpolations of a VAE's codes against interpolated pixels, with the bound of [Gram] Proposition 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.instruments.interpolation import interpolation_error
from gramscope.layers.model_call import evaluating
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.seeds import generator
from gramscope_lab.experiments.accuracy_curves import part_name
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results
from gramscope_lab.experiments.gram_vae import QUICK, SamplingVAE, Settings, blocks, parts
from gramscope_lab.experiments.parts import Recorder, Training
from gramscope_lab.experiments.plots import Figure, matrix, panels
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import load_data
from gramscope_lab.training.trained import Trained


def _parts(settings: Settings, options: Options) -> list[Training]:
    """The trainings of gram-fig10, and what is measured after them."""
    if len(settings.labels) != 2:
        raise InputError(f"labels = {list(settings.labels)}: name two classes, such as 2,8")
    return [replace(part, after=_Interpolate(settings, part.config)) for part in parts(settings, options)]


# -- after training --------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Interpolate:
    """Strips from one class to another, and the bound of [Gram] Proposition 3, for every β."""

    settings: Settings
    config: TrainConfig

    def __call__(self, trained: Trained, recorder: Recorder) -> None:
        data = load_data(self.config.data)
        for name, member in trained.members.items():
            model = member.model
            if not isinstance(model, SamplingVAE):
                raise InputError(f"{name} is no VAE")
            device = next(model.parameters()).device
            with torch.no_grad(), evaluating(model):
                self._measure(model, data, device, recorder, member.config.seed)

    def _measure(self, model: SamplingVAE, data: DataSet, device: torch.device, recorder: Recorder, seed: int) -> None:
        x = data.x_train[: self.settings.samples].to(device)
        codes = torch.cat([model.vae.encode(part)[0] for part in blocks(x)])

        def decode(z: Tensor) -> Tensor:
            return model.vae.decode(z).sigmoid()

        random = generator(seed, "pairs")
        found = interpolation_error(decode, codes, x, pairs=self.settings.pairs, generator=random, intercept=True)
        reconstruction = (decode(codes) - x).flatten(1).norm(dim=1).mean()
        recorder.record(
            "interpolation",
            data=data.name,
            seed=seed,
            beta=model.vae.beta,
            error=found.error,
            decoder_gap=found.decoder_gap,
            pair_residual=found.pair_residual,
            ols_residual=found.ols_residual,
            bound=found.bound,
            target_linearity=found.target_linearity,
            reconstruction=float(reconstruction),
        )
        if seed == self.settings.seeds[0]:
            ends = torch.stack([_sample(data, label) for label in self.settings.labels]).to(device)
            weights = torch.linspace(0, 1, 9, device=device)[:, None]
            z = (1 - weights) * model.vae.encode(ends[:1])[0] + weights * model.vae.encode(ends[1:])[0]
            weights = weights.reshape(-1, *[1] * len(data.input_shape))
            recorder.save(
                f"strip-{model.vae.beta:g}", decoded=decode(z), pixels=(1 - weights) * ends[0] + weights * ends[1]
            )


def _sample(data: DataSet, label: int) -> Tensor:
    """The first test image of a class."""
    index = (data.y_test == label).nonzero()
    if not len(index):
        raise InputError(f"{data.name} has no test image of class {label}; choose others with --set labels=2,8")
    return data.x_test[int(index[0])]


# -- claims ------------------------------------------------------------------------------------------
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
            ", ".join(
                f"β {r['beta']:g}: {r['pair_residual']:.2f} ≤ {r['ols_residual']:.2f} ≤ {r['bound']:.2f}" for r in found
            ),
            all(r["pair_residual"] <= r["ols_residual"] * 1.01 and r["ols_residual"] <= r["bound"] for r in found),
        )
        yield Claim(
            f"{data}: error of the decoder ≤ residual of the linear map + distance of the decoder from it",
            "the form for a given decoder",
            ", ".join(
                f"β {r['beta']:g}: {r['error']:.2f} ≤ {r['pair_residual']:.2f} + {r['decoder_gap']:.2f}" for r in found
            ),
            all(r["error"] <= (r["pair_residual"] + r["decoder_gap"]) * (1 + 1e-6) for r in found),
        )


def follows(results: Results[Settings]) -> Iterator[Claim]:
    """[Gram] Fig. 5: the decoder follows linear interpolation where TL is high."""
    for data in results.settings.data:
        found = sorted(_interpolations(results, data), key=lambda r: r["target_linearity"])
        low, high = found[0], found[-1]
        yield Claim(
            f"{data}: the interpolation error is lower where TL is highest (β {high['beta']:g}) than where lowest",
            "decoder follows linear interpolation where TL is high",
            ", ".join(f"TL {r['target_linearity']:.2f}: {r['error']:.2f}" for r in reversed(found)),
            high["error"] < low["error"],
        )


def strip_figure(results: Results[Settings]) -> Figure:
    """Pixel interpolation above the decoded ones, a row per β; errors and bound below."""
    settings = results.settings
    data = settings.data[0]
    found = _interpolations(results, data)
    strips = [results.artefact(f"{part_name('vae', data)}.after", f"strip-{r['beta']:g}") for r in found]
    columns = len(strips[0]["decoded"])
    page, axes = panels(1 + len(found), columns, width=0.85, height=0.95)
    rows = [strips[0]["pixels"], *(strip["decoded"] for strip in strips)]
    names = [
        "pixels",
        *(
            rf"$\beta$ = {r['beta']:g}, TL {r['target_linearity']:.2f}" + "\n" + rf"decoder {r['error']:.2f}" + "\n"
            rf"linear {r['pair_residual']:.2f} $\leq$ {r['bound']:.2f}"
            for r in found
        ),
    ]
    for row, images, name in zip(axes, rows, names, strict=True):
        for place, image in zip(row, images, strict=True):
            picture = image.float().movedim(0, -1).squeeze(-1)
            matrix(place, picture, "", cmap="gray_r" if picture.dim() == 2 else None, vmin=0, vmax=1)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    page.supxlabel(
        r"left: mean error over pairs at $\lambda$ = ½ of the decoder, and of the linear map $\leq$ its bound",
        fontsize=7,
    )
    return page


FIG5 = Experiment(
    replace(QUICK, betas=(0.05, 0.5, 10.0)),
    Settings(data=("mnist",), epochs=(10.0,), betas=(0.05, 1.0, 10.0)),
    _parts,
    (bound_holds, follows),
    strip_figure,
    classes=True,
)
