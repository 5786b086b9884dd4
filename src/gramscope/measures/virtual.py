"""Virtual updates and virtual covariance (Cha & Lee: "Feature Learning as a Virtual Covariance Learning").

The shift needs only the summed gradient D and ``Σ = Σ_i δ_i δ_iᵀ``: no features are kept and γ can be chosen afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_float_tensor, check_range, check_same_device, result_dtype, to_double
from gramscope.linalg.factored import FactoredGram
from gramscope.linalg.psd import eigh
from gramscope.linalg.virtual_shift import shift_factor
from gramscope.measures.gram import matrices


def virtual_update(h: Array, g: Array, gamma: float) -> Tensor:
    """``h⁺ = h − γ g`` with ``g_i = ∂L_i/∂h_i`` ([VCL] Definition 1): where descent would move the features themselves.

    >>> virtual_update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0]), gamma=0.5)
    tensor([0.5000, 2.5000])
    """
    features, gradients = as_float_tensor(h, "h"), as_float_tensor(g, "g")
    check_same_device(h=features, g=gradients)
    if features.shape != gradients.shape:
        raise InputError(f"h of shape {tuple(features.shape)} and g of shape {tuple(gradients.shape)} must agree")
    moved = to_double(features) - gamma * to_double(gradients)
    return check_range(moved.to(result_dtype(features, gradients)), "h − γ g")


def virtual_covariance_shift(W: Array, D: Array, Sigma: Array, gamma: float) -> Tensor:
    """``v = Σ_i [h_i⁺h_i⁺ᵀ − h_ih_iᵀ] = WᵀM + MᵀW``, ``M = −γD + ½γ²ΣW`` ([VCL] Theorem 2, [Gram] Theorem 1).

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``Σ_i δ_i h_iᵀ [..., k, d]``.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``.
        gamma: virtual step size γ.

    Returns:
        ``[..., d, d]``, symmetric, of rank at most ``2k``.

    >>> one = torch.ones(1, 1)
    >>> virtual_covariance_shift(one, 2 * one, 4 * one, gamma=0.5)   # h = 1, δ = 2: (1 − ½·2)² − 1
    tensor([[-1.]])
    """
    (weight, gradient, sigma), dtype = matrices(W=W, D=D, Sigma=Sigma)
    shift = _factors(weight, gradient, sigma, gamma).dense().to(dtype)
    return check_range(shift, "the virtual covariance shift")


def virtual_covariance_factors(W: Array, D: Array, Sigma: Array, gamma: float) -> FactoredGram:
    """:func:`virtual_covariance_shift` as its factors W and M in float64, for layers whose d² is too large to form.

    >>> one = torch.ones(1, 1)
    >>> virtual_covariance_factors(one, 2 * one, 4 * one, gamma=0.5).trace().item()
    -1.0
    """
    (weight, gradient, sigma), _ = matrices(W=W, D=D, Sigma=Sigma)
    return _factors(weight, gradient, sigma, gamma)


def virtual_trajectory(x: Array, gradients: Iterable[Array], gamma: float, every: int = 1) -> Tensor:
    """``x̃_t = x − γ Σ_{τ≤t} ∇_x L_τ`` ([Gram] §1), the gradients taken along the real training run.

    Args:
        x: points ``[n, d]`` (any shape).
        gradients: one tensor of that shape per training step.
        gamma: virtual step size.
        every: keep one frame in every so many steps.

    Returns:
        Frames ``[1 + steps // every, n, d]``; frame 0 is x.

    >>> virtual_trajectory(torch.zeros(1, 1), [torch.ones(1, 1)] * 4, gamma=0.5, every=2).flatten()
    tensor([ 0., -1., -2.])
    """
    if every < 1:
        raise InputError(f"every must be at least 1, got {every}")
    start = as_float_tensor(x, "x")
    moved = to_double(start).clone()
    frames = [start]
    for step, gradient in enumerate(gradients, start=1):
        g = as_float_tensor(gradient, f"gradients[{step - 1}]")
        if g.shape != start.shape:
            raise InputError(f"gradients[{step - 1}] has shape {tuple(g.shape)}, x has {tuple(start.shape)}")
        moved -= gamma * to_double(g)
        if step % every == 0:
            frames.append(moved.to(start.device, start.dtype))
    return torch.stack(frames)


class AccumulatedShift:
    """The sum of virtual covariance shifts over training, ``V_t = Σ_{τ≤t} v_τ`` ([VCL] Algorithm 1 and Figure 1).

    Args:
        form: ``"dense"`` keeps ``[..., d, d]``; ``"diagonal"`` only the diagonal, which is what the papers show as an
            image; ``"low-rank"`` an eigenbasis of at most ``rank`` directions, those of largest ``|λ|`` (V is indefinite).
        rank: directions kept by ``"low-rank"``.

    Attributes:
        steps: shifts added so far.
        discarded: sum of the Frobenius norms cut off by ``"low-rank"``, a bound on its error.

    >>> one = torch.ones(1, 1)
    >>> total = AccumulatedShift()
    >>> for _ in range(3):
    ...     total.add(one, 2 * one, 4 * one, gamma=0.5)
    >>> total.dense().item(), total.diagonal().item(), total.steps
    (-3.0, -3.0, 3)
    """

    def __init__(self, form: Literal["dense", "diagonal", "low-rank"] = "dense", rank: int | None = None) -> None:
        if form not in ("dense", "diagonal", "low-rank"):
            raise InputError(f"form must be 'dense', 'diagonal' or 'low-rank', got {form!r}")
        if (form == "low-rank") != (rank is not None) or (rank is not None and rank < 1):
            raise InputError(f"rank= (at least 1) goes with form='low-rank' and only there; got {form!r}, rank={rank}")
        self.form = form
        self.rank = rank
        self.steps = 0
        self.discarded = 0.0
        self._sum: Tensor | None = None
        self._basis: Tensor | None = None

    def add(self, W: Array, D: Array, Sigma: Array, gamma: float) -> None:
        """Add the shift of one step; arguments as in :func:`virtual_covariance_shift`."""
        shift = virtual_covariance_factors(W, D, Sigma, gamma)
        if self.form == "low-rank":
            self._add_low_rank(shift)
        else:
            new = check_range(
                shift.dense() if self.form == "dense" else shift.diagonal(), "the virtual covariance shift"
            )
            self._sum = new if self._sum is None else self._sum + new
        self.steps += 1

    def dense(self) -> Tensor:
        """``V [..., d, d]`` in float64."""
        if self.form == "diagonal":
            raise InputError("only the diagonal was kept; accumulate with form='dense' or 'low-rank'")
        total = self._kept()
        if self._basis is None:
            return total
        return (self._basis * total.unsqueeze(-2)) @ self._basis.mT

    def diagonal(self) -> Tensor:
        """The diagonal of V, ``[..., d]``."""
        total = self._kept()
        if self.form == "diagonal":
            return total
        if self._basis is None:
            return total.diagonal(dim1=-2, dim2=-1)
        return (self._basis.square() * total.unsqueeze(-2)).sum(-1)

    def factored(self) -> FactoredGram:
        """V as thin factors, of the ``"low-rank"`` form."""
        total = self._kept()
        if self._basis is None:
            raise InputError(f"form={self.form!r} has no factors; accumulate with form='low-rank'")
        rows = self._basis.mT
        return FactoredGram(rows, rows * (total / 2).unsqueeze(-1))

    def _kept(self) -> Tensor:
        if self._sum is None:
            raise InputError("no shift has been added yet")
        return self._sum

    def _add_low_rank(self, shift: FactoredGram) -> None:
        k = shift.left.shape[-2]
        columns = [shift.left.mT, shift.right.mT]
        swap = torch.eye(2 * k, dtype=shift.left.dtype, device=shift.left.device).roll(k, 0)
        core = swap.expand(*shift.left.shape[:-2], 2 * k, 2 * k)
        if self._basis is not None and self._sum is not None:
            m = self._sum.shape[-1]
            padded = core.new_zeros(*core.shape[:-2], m + 2 * k, m + 2 * k)
            padded[..., :m, :m] = torch.diag_embed(self._sum)
            padded[..., m:, m:] = core
            core = padded
            columns = [self._basis, *columns]
        Q, R = torch.linalg.qr(torch.cat(columns, -1))
        values, vectors = eigh(R @ core @ R.mT)
        order = values.abs().argsort(-1, descending=True)
        kept, cut = order[..., : self.rank], order[..., self.rank :]
        self.discarded += float(values.gather(-1, cut).square().sum().sqrt())
        self._sum = values.gather(-1, kept)
        chosen = vectors.gather(-1, kept.unsqueeze(-2).expand(*vectors.shape[:-1], -1))
        self._basis = Q @ chosen


def _factors(weight: Tensor, gradient: Tensor, sigma: Tensor, gamma: float) -> FactoredGram:
    return FactoredGram(weight, check_range(shift_factor(weight, gradient, sigma, gamma), "−γD + ½γ²ΣW"))
