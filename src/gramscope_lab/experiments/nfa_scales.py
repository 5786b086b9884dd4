"""Descent for several initialisation scales with some forms of the neural feature ansatz on the way (nfa-fig2, 4, 5, 7, 8).

The caption of [NFA] Fig. 2 varies the scale of the first layer alone. Its remark that the second layer's UC-NFA is extremely
sensitive to the scale shows only when both hidden layers are scaled, so both can be run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gramscope.errors import InputError
from gramscope.measures.alignment import double_centered_ratio, nfa
from gramscope_lab.experiments.experiment import Options
from gramscope_lab.experiments.nfa_descent import (
    chain_monomials,
    covariance,
    descend,
    initial_weights,
    outputs_of,
    run_nets,
)
from gramscope_lab.experiments.parts import Computation, Recorder
from gramscope_lab.training.job import resolve_device

#: name of a spectrum of the inputs -> α in λ_k = 1/(1+k^α), and how it is written
SPECTRA: dict[str, tuple[float | None, str]] = {
    "isotropic": (None, "isotropic"),
    "decay-1": (1.0, r"$\lambda_k \sim 1/(1+k)$"),
    "decay-2": (2.0, r"$\lambda_k \sim 1/(1+k^2)$"),
}
#: which layers' scale varies -> their number, and how it is written
VARIED = {"first": (1, "scale of layer 1 varied"), "hidden": (2, "scale of layers 1 and 2 varied")}
LAYERS = (1, 2)


@dataclass(frozen=True)
class Settings:
    """[NFA] Appendix H: 2 hidden ReLU layers of 256, d 32, n 256, step size 0.05, 800 steps. It gives no scales."""

    seeds: tuple[int, ...] = (0, 1, 2)
    spectra: tuple[str, ...] = ("isotropic",)
    varied: tuple[str, ...] = ("first",)
    scales: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    n: int = 256
    d: int = 32
    rank: int = 5
    width: int = 256
    lr: float = 0.05
    steps: int = 800
    every: int = 5


#: values of one layer of one net, from weights now and at the start, K, and K̄ where it is needed
Measures = dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]
CENTRED: Measures = {
    "uncentered": lambda w, w0, k, _: nfa(w, k),
    "centered": lambda w, w0, k, _: nfa(w, k, w0, kind="centered"),
}
RATIO: Measures = {"ratio": lambda w, w0, k, centred: double_centered_ratio(w, k, w0, centred)}
PTK: Measures = {"ptk": lambda w, w0, k, centred: nfa(w, k, w0, centred, kind="ptk")}


def parts_measuring(measures: Measures, settings: Settings, options: Options) -> list[Computation]:
    """One computation for each spectrum and choice of varied layers."""
    for key, known in (("spectra", SPECTRA), ("varied", VARIED)):
        given = list(getattr(settings, key))
        if not set(given) <= set(known):
            raise InputError(f"{key} = {given}: choose of {', '.join(known)}")
    if min(settings.scales) <= 0:
        raise InputError(f"scales = {list(settings.scales)}: must be above zero")
    return [
        Computation(f"{spectrum}-{varied}", _Descent(settings, options, spectrum, varied, measures).run)
        for spectrum in settings.spectra
        for varied in settings.varied
    ]


@dataclass(frozen=True)
class _Descent:
    """Train all scales and seeds of one spectrum together, measuring on the way."""

    settings: Settings
    options: Options
    spectrum: str
    varied: str
    measures: Measures

    def run(self, recorder: Recorder) -> None:
        s = self.settings
        device = resolve_device(self.options.device)
        alpha = SPECTRA[self.spectrum][0]
        task = chain_monomials(s.seeds, n=s.n, n_test=1000, d=s.d, rank=s.rank, alpha=alpha, device=device)
        weights = initial_weights(s.d, s.width, len(LAYERS), s.scales, s.seeds, device, scaled=VARIED[self.varied][0])
        start = [w.clone() for w in weights]
        first = run_nets(start, task.x)
        for step in recorder.track(range(s.steps + 1), s.steps + 1):
            passed = run_nets(weights, task.x)
            if step % s.every == 0 or step == s.steps:
                losses = {
                    "train_loss": (passed.outputs - task.y).square().mean(-1),
                    "test_loss": (outputs_of(weights, task.x_test) - task.y_test).square().mean(-1),
                }
                for layer, w, w0, now, before in zip(
                    LAYERS, weights, start, passed.tangents, first.tangents, strict=False
                ):
                    kernel = covariance(now)
                    centred = kernel if self.measures is CENTRED else covariance(now, before)
                    self._record(recorder, {"step": step, "layer": layer}, losses, (w, w0, kernel, centred))
            weights = descend(weights, passed, task.y, s.lr)

    def _record(
        self,
        recorder: Recorder,
        place: dict[str, int],
        losses: dict[str, Tensor],
        matrices: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """One record for each net of the stacks ``[scales, seeds, …]``."""
        head = {"spectrum": self.spectrum, "varied": self.varied}
        for i, scale in enumerate(self.settings.scales):
            for j, seed in enumerate(self.settings.seeds):
                found = {name: float(values[i, j]) for name, values in losses.items()}
                for name, measure in self.measures.items():
                    found[name] = float(measure(*(matrix[i, j] for matrix in matrices)))
                recorder.record("nfa", **head, scale=scale, seed=seed, **place, **found)
