"""Monte Carlo over initialisations with error bars, for any architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.early_time import speeds_from_kernel


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
        tangents: J of one net, ``[N, k]``, or of a stack, ``[nets, N, k]``, one after the other: from
            :meth:`RandomMLP.draws`, or from :func:`gramscope.theory.network.network_tangents` for any module.
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
