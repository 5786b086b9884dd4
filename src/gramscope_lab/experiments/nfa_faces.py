"""nfa-fig9: diagonals of NFM, AGOP and corrupted AGOP as images, for telling faces with glasses from those without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gramscope.instruments.agop import tangent_kernel
from gramscope.measures.alignment import corrupted, cosine
from gramscope_lab.data.seeds import generator
from gramscope_lab.experiments.experiment import Claim, Experiment, Options, Results, training_config
from gramscope_lab.experiments.parts import Recorder, Training
from gramscope_lab.experiments.plots import Figure, matrix, mean, panels, picture, spread
from gramscope_lab.training.job import load_data, resolve_device
from gramscope_lab.training.trained import Trained

IMAGES = {
    "NFM": r"diagonal of $W^\top W$",
    "AGOP": r"of $W^\top K W$",
    "corrupted": r"of $W^\top Q W$, one draw of $Q$",
}


@dataclass(frozen=True)
class Settings:
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


def parts(settings: Settings, options: Options) -> list[Training]:
    """One training per data set, measured at its end."""
    sizes = {"n_train": settings.samples, "n_test": min(2000, settings.samples), "image_size": settings.image_size}
    hidden = [settings.width, settings.width]
    model = {"name": "mlp", "hidden": hidden, "activation": "relu", "bias": False, "init": "normal"}
    found = []
    for name in settings.data:
        config = training_config(
            settings,
            options,
            data={"name": name, "dir": options.data_dir, **sizes},
            model={**model, "init_scale": [settings.init_scale, 1.0, 1.0]},
            method={"name": "adam", "lr": settings.lr},
            evaluate_every=settings.epochs / 10,
            checkpoint_every=settings.epochs / 10,
        )
        found.append(Training(name, config, after=partial(_measure, settings)))
    return found


def _measure(settings: Settings, trained: Trained, recorder: Recorder) -> None:
    for index, member in enumerate(trained.members.values()):
        config = member.config
        data = load_data(config.data).to(resolve_device(config.device))
        kernel = tangent_kernel(member.model, data.x_train, "hidden1")["hidden1"]
        w = member.model.get_parameter("hidden1.weight").detach().double()
        random = [corrupted(kernel, generator(config.seed, "corrupted", i)) for i in range(settings.corruptions)]
        nfm, agop = w.square().sum(0), _diagonal(w, kernel)
        others = [_diagonal(w, q) for q in random]
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


def _values(results: Results[Settings], key: str, data: str) -> list[float]:
    return [record[key] for record in results.records("diagonals", data=data)]


def similar(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Fig. 9: Pearson correlation 0.91."""
    for data in results.settings.data:
        values = _values(results, "pearson", data)
        accuracy = mean(_values(results, "test_accuracy", data))
        text = f"Pearson ρ of the diagonals of NFM and AGOP at least 0.85 ({data}, test accuracy {accuracy:.1%})"
        yield Claim(text, "0.91", spread(values), mean(values) >= 0.85)


def destroyed(results: Results[Settings]) -> Iterator[Claim]:
    """[NFA] Fig. 9: 0.04 with random eigenvectors."""
    for data in results.settings.data:
        whole, values = _values(results, "pearson", data), _values(results, "corrupted", data)
        holds: bool | None = abs(mean(values)) < 0.25
        reason = ""
        if data != "celeba" and not holds:
            holds = None
            reason = (
                f"{data} is not CelebA: only glasses tell the classes apart, so one direction of W rules, whatever Q"
            )
        drop = mean(whole) - mean(values)
        yield Claim(f"random eigenvectors lower it by more than 0.3 ({data})", "by 0.87", f"by {drop:.2f}", drop > 0.3)
        yield Claim(f"and leave less than 0.25 ({data})", "0.04", spread(values), holds, reason)


def figure(results: Results[Settings]) -> Figure:
    """The three diagonals of the first seed, a row per data set; beside ρ of the one draw of Q is the mean over all."""
    page, axes = panels(len(results.settings.data), 3, height=2.4)
    for row, data in zip(axes, results.settings.data, strict=True):
        stored = results.artefact(f"{data}.after", "diagonals")
        every = mean(_values(results, "corrupted", data))
        for place, (name, title) in zip(row, IMAGES.items(), strict=True):
            rho = float(cosine(stored["NFM"].flatten(), stored[name].flatten(), center=True))
            notes = {
                "NFM": "",
                "AGOP": f"$\\rho$ {rho:.2f}",
                "corrupted": f"$\\rho$ {rho:.2f}; mean over draws {every:.2f}",
            }
            matrix(place, picture(stored[name]), f"{title}\n{notes[name]}")
        row[0].set_ylabel(data)
    return page


FIG9 = Experiment(
    Settings((0, 1), ("faces",), samples=1000, epochs=40.0),
    Settings(),
    parts,
    (similar, destroyed),
    figure,
    classes=True,
)
