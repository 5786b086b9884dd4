"""Matrices kept for the report: spectra, diagonals of WᵀW and AGOP, and the virtual covariance summed over training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gramscope.layers.tape import Tape, capture
from gramscope.linalg.factored import FactoredGram
from gramscope.statistics.collect import collect
from gramscope.training.config import TrainConfig


class ShiftWatcher:
    """Sums the diagonal of the virtual covariance shift ``v = WᵀM + MᵀW`` of every layer over all training steps.

    ``M = −γD + ½γ²ΣW`` with the step's own γ on the summed loss, so that for plain gradient descent the sum follows
    ``diag(WᵀW − W₀ᵀW₀)`` (000 Fig. 1). For VCL γ is its own; for other optimizers it is their learning rate.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._model = model
        self._reduction = config.reduction
        self._virtual = config.method.name == "vcl"
        self._rate = float(config.method.options["gamma" if self._virtual else "lr"])
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
            W, D = record.weight, record.D
            M = -gamma * D + 0.5 * gamma**2 * record.Sigma @ W.to(D.dtype)
            shift = FactoredGram(W.to(D.dtype), M).diagonal().double()
            self.diagonals[record.name] = self.diagonals.get(record.name, 0.0) + shift

    def load(self, diagonals: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from stored sums."""
        self.diagonals = {name: tensor.to(device) for name, tensor in diagonals.items()}


def layer_matrices(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], shifts: Mapping[str, Tensor], layers: str | None = None
) -> dict[str, Tensor]:
    """What the report draws of each layer, as ``layer/what`` in float32.

    ``spectrum``: singular values of W; ``gram``: diag WᵀW; ``agop``: diag WᵀKW; ``vcs``: the summed shifts, if watched.
    """
    statistics = collect(model, batches, layers=layers, features=False, jacobians=True)
    found: dict[str, Tensor] = {}
    for layer in statistics:
        W = layer.weight.double()
        found[f"{layer.name}/spectrum"] = torch.linalg.svdvals(W)
        found[f"{layer.name}/gram"] = W.square().sum(-2)
        found[f"{layer.name}/agop"] = (W * (layer.K.double() @ W)).sum(-2)
        if layer.name in shifts:
            found[f"{layer.name}/vcs"] = shifts[layer.name]
    return {name: tensor.float() for name, tensor in found.items()}
