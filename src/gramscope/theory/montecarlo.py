"""Monte Carlo over initialisations: random bias-free MLPs, and means over draws with error bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.tangent_kernels import activation, check_layer, per_layer


@dataclass(frozen=True)
class AppliedMLP:
    """A stack of bias-free MLPs with one output, applied to data: per layer its inputs and slopes, and f ``[…, n]``."""

    weights: list[Tensor]
    inputs: list[Tensor]
    slopes: list[Tensor]
    outputs: Tensor

    @cached_property
    def tangents(self) -> list[Tensor]:
        """``J = ∂f/∂z […, n, k]`` of every layer, from the first one to the readout, where it is 1."""
        tangents = [torch.ones_like(self.outputs).unsqueeze(-1)]
        for w, slope in zip(self.weights[:0:-1], self.slopes[::-1], strict=True):
            tangents.append((tangents[-1] @ w) * slope)
        return tangents[::-1]


def apply_mlp(weights: list[Tensor], x: Tensor, name: str = "relu") -> AppliedMLP:
    """Apply nets with weights ``[…, fan-out, fan-in]`` to ``x […, n, d]``."""
    phi = activation(name)
    inputs, slopes = [x], []
    for w in weights[:-1]:
        z = inputs[-1] @ w.mT
        slopes.append(phi.slope(z))
        inputs.append(phi.phi(z))
    return AppliedMLP(weights, inputs, slopes, (inputs[-1] @ weights[-1].mT).squeeze(-1))


@dataclass(frozen=True)
class RandomMLP:
    """The distribution of nets in [NFA] §2.1: ``W_ℓ ~ N(0, s_ℓ/fan-in)``, no biases, one output.

    Args:
        inputs: d.
        widths: of the hidden layers.
        activation: ``"relu"``, ``"erf"``, ``"quadratic"`` (½z²) or ``"linear"``.
        scales: s₀ … s_L, or one value for all.
    """

    inputs: int
    widths: tuple[int, ...]
    activation: str = "relu"
    scales: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        if not self.widths or min(self.inputs, *self.widths) < 1:
            raise InputError(f"inputs={self.inputs}, widths={self.widths}: at least one hidden layer, sizes from 1")
        activation(self.activation)
        per_layer(self.scales, len(self.widths) + 1, "scales")

    def sample(self, generator: torch.Generator, nets: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Weights of ``nets`` nets: one ``[nets, fan-out, fan-in]`` per layer, the readout last."""
        sizes = [self.inputs, *self.widths, 1]
        scales = per_layer(self.scales, len(self.widths) + 1, "scales")
        return [
            torch.randn(nets, sizes[i + 1], sizes[i], generator=generator, device=generator.device, dtype=dtype)
            * (scales[i] / sizes[i]) ** 0.5
            for i in range(len(sizes) - 1)
        ]

    def tangents(self, weights: list[Tensor], x: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """``J = ∂f/∂z`` at a hidden layer ``[nets, n, k]``, the layer's inputs ``[…, n, d]``, and f ``[nets, n]``."""
        check_layer(len(self.widths), layer)
        applied = apply_mlp(weights, x, self.activation)
        return applied.tangents[layer], applied.inputs[layer], applied.outputs

    def draws(
        self, x: Tensor, nets: int, generator: torch.Generator, layer: int = 0, chunk_bytes: int = 2**27
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """:meth:`tangents` of ``nets`` fresh nets, in stacks that keep the weights under ``chunk_bytes``."""
        sizes = [self.inputs, *self.widths, 1]
        weights = sum(a * b for a, b in pairwise(sizes))
        each = x.element_size() * (weights + 3 * x.shape[0] * sum(self.widths))
        chunk = max(1, min(nets, chunk_bytes // each))
        for start in range(0, nets, chunk):
            yield self.tangents(self.sample(generator, min(chunk, nets - start), x.dtype), x, layer)


@dataclass(frozen=True)
class Estimate:
    """A mean over independent draws and its standard error."""

    mean: Tensor
    error: Tensor
    count: int


def estimate(values: Tensor) -> Estimate:
    """Mean and standard error along the first axis (at least two draws)."""
    if values.shape[0] < 2:
        raise InputError(f"an error bar needs at least 2 draws, not {values.shape[0]}")
    return Estimate(values.mean(0), values.std(0) / values.shape[0] ** 0.5, values.shape[0])
