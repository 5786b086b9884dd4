"""Early time: the first non-zero derivatives of the centred weight Gram and the centred AGOP, and their correlation.

At initialisation under gradient flow on Σ_i L_i, with W̄ = W − W₀ ([NFA] Propositions 3 and 4),

    d²/dt² (W̄ᵀW̄) = 2 ẆᵀẆ,   d²/dt² (W̄ᵀKW̄) = 2 ẆᵀKẆ,   Ẇ = −D,   D = Σ_i δ_i h_iᵀ = Jᵀ P,

so the centred NFA starts at ρ(DᵀD, DᵀKD). Here J ``[N, k]`` stacks the pre-activation tangents ∂f_c(x_i)/∂z of all
samples, sites and outputs, P ``[N, d]`` the inputs times the loss derivatives ℓ_ic h_i, 𝒦 = J Jᵀ is the pre-activation
tangent kernel and K = JᵀJ/n the tangent covariance: DᵀD = Pᵀ 𝒦 P and DᵀKD = Pᵀ 𝒦² P / n. For one output and the square
loss at f = 0, P = −diag(y) X. All functions take leading axes for stacks of nets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError


@dataclass(frozen=True)
class Speeds:
    """``ẆᵀẆ`` and ``ẆᵀKẆ``, both ``[…, d, d]``: half the second derivatives of centred Gram and AGOP at t = 0."""

    gram: Tensor
    agop: Tensor

    @property
    def traces(self) -> Traces:
        """The three traces of eq. (4)."""
        return Traces(
            cross=(self.gram * self.agop).sum((-2, -1)),
            gram=self.gram.square().sum((-2, -1)),
            agop=self.agop.square().sum((-2, -1)),
        )

    @property
    def correlation(self) -> Tensor:
        """``ρ(ẆᵀẆ, ẆᵀKẆ)``: where the centred NFA starts."""
        norms = (self.gram, self.agop)
        gram, agop = (m / m.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(m.dtype).tiny) for m in norms)
        return Speeds(gram, agop).traces.correlation.clamp(-1, 1)  # rounding only: Cauchy and Schwarz


@dataclass(frozen=True)
class Traces:
    """``tr(FG)``, ``tr(F²)``, ``tr(G²)`` of F = ẆᵀẆ and G = ẆᵀKẆ, up to one common factor each of F and G."""

    cross: Tensor
    gram: Tensor
    agop: Tensor

    @property
    def correlation(self) -> Tensor:
        """``ρ = tr(FG) / √(tr(F²) tr(G²))`` ([NFA] eq. 4; the exponents −1/2 below the line in eq. 10 are a misprint)."""
        if not bool(torch.isfinite(self.cross).all()):
            raise InputError("the early-time traces are not finite: the data or weights hold NaN, infinity or overflow")
        if not bool(((self.gram > 0) & (self.agop > 0)).all()):
            raise InputError(
                "the early-time speeds vanish, so their correlation is 0/0: every loss derivative (label) or every "
                "tangent is zero"
            )
        return self.cross / (self.gram.sqrt() * self.agop.sqrt())


def speeds_from_gradient(d: Tensor, k: Tensor) -> Speeds:
    """From the summed gradient ``D [k, d]`` and the tangent covariance ``K [k, k]``, for any net and loss."""
    return Speeds(d.mT @ d, d.mT @ (k @ d))


def speeds_from_tangents(tangents: Tensor, p: Tensor, samples: int | None = None) -> Speeds:
    """From ``J [N, k]`` and ``P [N, d]``; neither K nor 𝒦 is formed. ``samples`` is n, N unless given."""
    d = tangents.mT @ p
    jd = tangents @ d
    return Speeds(d.mT @ d, jd.mT @ jd / (samples or p.shape[-2]))


def speeds_from_kernel(
    p: Tensor, kernel: Tensor, kernel_squared: Tensor | None = None, samples: int | None = None
) -> Speeds:
    """``Pᵀ 𝒦 P`` and ``Pᵀ 𝒦² P / n`` from the tangent kernel ``[N, N]``, or its mean: the first-order prediction.

    Give ``kernel_squared = E[𝒦²]`` to keep the spread of 𝒦 over initialisations; without it (E𝒦)² takes its place:
    [NFA]'s first-order prediction, exact at infinite width.
    """
    kp = kernel @ p
    agop = kp.mT @ kp if kernel_squared is None else p.mT @ (kernel_squared @ p)
    return Speeds(p.mT @ kp, agop / (samples or p.shape[-2]))


def labelled_inputs(x: Tensor, y: Tensor) -> Tensor:
    """``P = −diag(y) X`` for ½Σ(f − y)² at f = 0: ``x [n, d]`` with ``y [n]``, or with ``y [n, c]`` for c outputs."""
    check_data(x, y)
    y = y.reshape(y.shape[0], -1)
    return -(y.unsqueeze(-1) * x.unsqueeze(1)).flatten(0, 1)


def check_data(x: Tensor, y: Tensor) -> None:
    """Raise :class:`InputError` on shapes that do not fit, non-finite values or labels that are all zero."""
    if x.dim() != 2 or y.dim() not in (1, 2) or y.shape[0] != x.shape[0]:
        raise InputError(f"x must be [n, d] and y [n] or [n, c]; got {tuple(x.shape)} and {tuple(y.shape)}")
    for name, value in (("x", x), ("y", y)):
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise InputError(f"{name} holds {bad} NaN or infinite values of {value.numel()}; remove or replace them")
    if not bool(x.any()) or not bool(y.any()):
        which = "x" if bool(y.any()) else "y (the labels)"
        raise InputError(f"{which} is zero for every sample, so Ẇ = 0 and the correlation is 0/0; give other data")
