"""Monte Carlo over initialisations: random bias-free MLPs, and means of tangent kernels of any nets with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.early_time import speeds_from_kernel
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


@dataclass(frozen=True)
class KernelMoments:
    """``E[𝒦]`` and ``E[𝒦²]`` as means of groups of nets, ``[groups, N, N]`` each; the groups give the error bars."""

    kernels: Tensor
    squares: Tensor
    nets: int

    @property
    def kernel(self) -> Estimate:
        """E[𝒦], entry by entry."""
        return estimate(self.kernels)

    @property
    def square(self) -> Estimate:
        """E[𝒦²], entry by entry."""
        return estimate(self.squares)

    def correlation(self, p: Tensor, *, use_square: bool = False) -> Estimate:
        """First-order prediction ``ρ(Pᵀ E[𝒦] P, Pᵀ E[𝒦]² P)``, its error by deleting one group at a time (jackknife).

        With ``use_square`` E[𝒦²] takes the place of E[𝒦]².
        """
        groups = self.kernels.shape[0]

        def predict(kernel: Tensor, square: Tensor) -> Tensor:
            return speeds_from_kernel(p, kernel, square if use_square else None).correlation

        kernels, squares = self.kernels.sum(0), self.squares.sum(0)
        whole = predict(kernels / groups, squares / groups)
        rest = torch.stack(
            [
                predict((kernels - self.kernels[i]) / (groups - 1), (squares - self.squares[i]) / (groups - 1))
                for i in range(groups)
            ]
        )
        error = ((groups - 1) * (rest - rest.mean(0)).square().mean(0)).sqrt()
        return Estimate(whole, error, self.nets)


def kernel_moments(tangents: Iterable[Tensor], groups: int = 20) -> KernelMoments:
    """Average 𝒦 = JJᵀ and 𝒦² over nets.

    Args:
        tangents: J of one net, ``[N, k]``, or of a stack, ``[nets, N, k]``, one after the other: from :meth:`RandomMLP.draws`.
        groups: nets are dealt in turn to this many groups.
    """
    kernels: Tensor | None = None
    squares: Tensor | None = None
    counts = [0] * groups
    nets = 0
    for stack in tangents:
        for j in stack.reshape(-1, *stack.shape[-2:]):
            kernel = (j @ j.mT).to(torch.float64)
            if kernels is None or squares is None:
                kernels = kernel.new_zeros(groups, *kernel.shape)
                squares = torch.zeros_like(kernels)
            kernels[nets % groups] += kernel
            squares[nets % groups] += kernel @ kernel
            counts[nets % groups] += 1
            nets += 1
    if kernels is None or squares is None or nets < 2:
        raise InputError(f"an error bar needs at least 2 nets, not {nets}")
    used = min(groups, nets)
    divisor = torch.tensor(counts[:used], dtype=torch.float64, device=kernels.device).reshape(-1, 1, 1)
    return KernelMoments(kernels[:used] / divisor, squares[:used] / divisor, nets)
