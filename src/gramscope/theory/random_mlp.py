"""Stacks of random bias-free MLPs as plain tensors: sampling and pre-activation tangents without a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.activations import activation
from gramscope.theory.tangent_kernels import check_layer, per_layer


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
        phi = activation(self.activation)
        h, inputs, slopes = x, x, []
        for index, w in enumerate(weights[:-1]):
            if index == layer:
                inputs = h
            z = h @ w.mT
            slopes.append(phi.slope(z))
            h = phi.phi(z)
        outputs = (h @ weights[-1].mT).squeeze(-1)
        j = weights[-1] * slopes[-1]
        for index in range(len(slopes) - 2, layer - 1, -1):
            j = (j @ weights[index + 1]) * slopes[index]
        return j, inputs, outputs

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
