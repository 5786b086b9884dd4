"""Matrices for the report: spectra, diagonals of WᵀW and AGOP, and the virtual covariance shift summed over training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramscope.layers.capture import capture
from gramscope.layers.tape import Tape
from gramscope.linalg.gram import shift_factor
from gramscope.statistics.collect import collect
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.sample_losses import measured_output


class ShiftWatcher:
    """Sums the diagonal of the virtual covariance shift ``v = WᵀM + MᵀW`` of every layer over all training steps.

    ``M = −γD + ½γ²ΣW`` with the step's own γ on the summed loss, so that for plain gradient descent the sum follows
    ``diag(WᵀW − W₀ᵀW₀)`` ([VCL] Fig. 1). For VCL γ is its own; for other optimizers it is their learning rate.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._model = model
        self._reduction = config.reduction
        self._virtual = config.method.name == "vcl"
        options = config.method.options
        self._rate = float(options["gamma"] if self._virtual else options.get("lr", 1.0))
        self.diagonals: dict[str, Tensor] = {}

    @contextmanager
    def step(self, batch_size: int, factor: float) -> Iterator[None]:
        """Watch the forward and backward pass of one step, run inside."""
        with capture(self._model, reduction=self._reduction) as tape:
            yield
            per_sample = 1.0 if self._virtual or self._reduction == "sum" else 1.0 / batch_size
            self._add(tape, self._rate * factor * per_sample)

    @torch.no_grad()
    def _add(self, tape: Tape, gamma: float) -> None:
        for record in tape:
            D = record.D
            W = record.weight.to(D.dtype)
            shift = 2 * (W * shift_factor(W, D, record.Sigma, gamma)).sum(-2).double()
            self.diagonals[record.name] = self.diagonals.get(record.name, 0.0) + shift

    def load(self, diagonals: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from stored sums."""
        self.diagonals = {name: tensor.to(device) for name, tensor in diagonals.items()}


@dataclass(frozen=True)
class Matrices:
    """What the report draws: singular values by layer, and diagonals in the shape of the input image."""

    spectra: dict[str, Tensor]
    diagonals: dict[str, dict[str, Tensor]]


def layer_matrices(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    shifts: Mapping[str, Tensor],
    layers: str | None = None,
) -> Matrices:
    """Spectra of all layers; diagonals ``nfm`` (WᵀW), ``agop`` (WᵀKW) and ``vcs`` (``shifts``) of the one that sees images."""
    statistics = collect(model, batches, layers=layers, features=False, jacobians=True, output=measured_output(model))
    image = tuple(batches[0][0].shape[1:])
    shape = image[1:] if len(image) == 3 and image[0] == 1 else image
    spectra, diagonals = {}, {}
    first = next(iter(statistics)).name  # in order of execution: the one that sees the input
    for layer in statistics:
        W = layer.weight.double()
        spectra[layer.name] = torch.linalg.svdvals(W).flatten().sort(descending=True).values.float()
        if layer.name != first or W.dim() != 2 or len(image) not in (2, 3) or W.shape[-1] != math.prod(image):
            continue
        found = {"nfm": W.square().sum(-2), "agop": (W * (layer.K.double() @ W)).sum(-2)}
        if layer.name in shifts:
            found["vcs"] = shifts[layer.name]
        diagonals[layer.name] = {name: diagonal.float().reshape(shape) for name, diagonal in found.items()}
    return Matrices(spectra, diagonals)
