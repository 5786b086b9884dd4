"""The matrix that takes the gradient's place in the shift: its running mean, orthogonalised or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.products import has_bfloat16
from gramscope.linalg.quintic import quintic_polar, wide_quintic_polar
from gramscope.optim.vcl.rules import Batch

#: from this ratio of the sides on a matrix is orthogonalised through its small Gram
_WIDE = 3
#: up to this side float32 is as fast as bfloat16
_SMALL = 128


@dataclass(frozen=True)
class Direction:
    """``O = polar(EMA_β(D))`` in place of D, or only one of the two operations.

    Attributes:
        momentum: β of the running mean; 0 takes each batch alone.
        orthogonalise: replace the matrix by its polar factor, approximately.
    """

    momentum: float = 0.0
    orthogonalise: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise InputError(f"momentum={self.momentum!r}: the running mean of gradients needs a number in [0, 1)")

    @property
    def active(self) -> bool:
        """Whether anything but D itself is used."""
        return self.momentum > 0 or self.orthogonalise

    def of(self, batch: Batch, mean: Tensor | None) -> tuple[Batch, Tensor | None]:
        """The batch with D replaced, and the running mean for the next step.

        Args:
            batch: from backward.
            mean: the running mean ``[…, k, d]`` before this step, None at the first.
        """
        if not self.active:
            return batch, None
        D = batch.gradient()
        kept = None
        if self.momentum:
            kept = D * (1 - self.momentum) if mean is None else torch.lerp(mean.to(D.dtype), D, 1 - self.momentum)
            D = torch.lerp(D, kept, self.momentum)  # Nesterov's look-ahead, as in Muon
        if self.orthogonalise:
            D = orthogonalised(D)
        return Batch(D, None, batch.sigma), kept


def orthogonalised(D: Tensor) -> Tensor:
    """The polar factor of ``D [..., k, d]`` with singular values between about 0.7 and 1.2, in the cheapest sufficient way.

    Large matrices are computed in bfloat16 where the device multiplies it fast; its three digits are enough. Of the others,
    those much wider or taller than the other side go through their small Gram.
    """
    k, d = D.shape[-2:]
    if k > d:
        return orthogonalised(D.mT).mT
    fast = D.dtype == torch.float32 and k > _SMALL and has_bfloat16(D.device)
    if d >= _WIDE * k and D.dtype != torch.bfloat16 and not fast:
        return wide_quintic_polar(D)
    X = D.to(torch.bfloat16) if fast else D
    return quintic_polar(X, least_norm=math.sqrt(torch.finfo(X.dtype).tiny)).to(D.dtype)
