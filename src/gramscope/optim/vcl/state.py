"""The state of virtual covariance learning in a small moving basis."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gramscope.optim.lowrank import extend_basis
from gramscope.optim.vcl.rules import Rules


@dataclass(frozen=True)
class Recursion:
    """``W = weights @ basis[:p]``, ``V = basisᵀ @ shift @ basis``, and the last full step, around which light steps expand.

    Attributes:
        basis: U ``[…, m, d]``, orthonormal rows, those of W's row space first.
        shift: C ``[…, m, m]``.
        weights: T ``[…, k, p]``.
        rotation: P of ``T = P diag(s)`` at the last full step ``[…, k, p]``.
        eigenvalues, singular_values: the leading p of G at the last full step, and s ``[…, p]``.
        response: derivative of T with respect to G ``[…, p, p]``, see :meth:`SpectralMap.response`.
        steps: steps taken.
        since: light steps since the last full one.
    """

    basis: Tensor
    shift: Tensor
    weights: Tensor
    rotation: Tensor
    eigenvalues: Tensor
    singular_values: Tensor
    response: Tensor
    steps: int = 0
    since: int = 0

    @property
    def matrix(self) -> Tensor:
        """W, ``[…, k, d]``."""
        return self.weights.to(self.basis.dtype) @ self.basis[..., : self.weights.shape[-1], :]

    def small_as(self, dtype: torch.dtype) -> Recursion:
        """A copy with all matrices but the basis in another dtype."""
        small = {name: getattr(self, name).to(dtype) for name in MATRICES if name != "basis"}
        return replace(self, **small)


#: names of the tensors in a recursion
MATRICES = tuple(f.name for f in fields(Recursion) if f.name not in ("steps", "since"))


def start(W: Tensor, rules: Rules) -> Recursion:
    """The state before the first step for weights ``[…, k, d]``."""
    basis, T = _row_space(W)
    gram = T.mT @ T
    shift = gram if rules.anchor == "initial" else torch.zeros_like(gram)
    nothing = torch.zeros_like(T[..., 0, :])
    return Recursion(basis, shift, T, T, nothing, nothing, torch.zeros_like(gram))


def rebased(state: Recursion, W: Tensor) -> Recursion:
    """The state with the same V for weights that were changed from outside. The next step must be a full one.

    W's rows come first in the new basis, followed by the old basis.
    """
    k, d = W.shape[-2:]
    if k >= d:
        return replace(state, weights=W @ state.basis.mT)
    basis, T = _row_space(W)
    parts = extend_basis(basis, state.basis)
    old = torch.cat([parts.coordinates, parts.factor], -1).to(state.shift.dtype)
    joined = torch.cat([basis, parts.directions], -2)
    return replace(state, basis=joined, shift=old.mT @ state.shift @ old, weights=T, rotation=T)


def _row_space(W: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of W's rows ``[…, p, d]`` and W's coordinates in it ``[…, k, p]``."""
    k, d = W.shape[-2:]
    if k >= d:
        return torch.eye(d, dtype=W.dtype, device=W.device).expand(*W.shape[:-2], d, d).contiguous(), W.clone()
    Q, R = torch.linalg.qr(W.mT)
    return Q.mT.contiguous(), R.mT.contiguous()
