"""What the shift is formed from: the summed gradient itself, its running mean, or that mean orthogonalised."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.optim.vcl_rules import Batch

#: quintic ``aX + b(XXᵀ)X + c(XXᵀ)²X``, applied a few times: singular values in (0, 1] come to lie around 1. The
#: coefficients are those of Muon (Jordan et al. 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Direction:
    """``O = msign(EMA_β(D))`` in place of D, or parts of that.

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
        """The batch to use and the running mean to keep."""
        if not self.active:
            return batch, None
        D = batch.gradient()
        kept = None
        if self.momentum:
            kept = D * (1 - self.momentum) if mean is None else torch.lerp(mean.to(D.dtype), D, 1 - self.momentum)
            D = torch.lerp(D, kept, self.momentum)  # Nesterov's look ahead, as Muon does
        if self.orthogonalise:
            D = orthogonalised(D)
        return Batch(D, None, batch.sigma), kept


def orthogonalised(D: Tensor, steps: int = 5) -> Tensor:
    """The polar factor of ``D [..., k, d]`` to within about 30 % a singular value, by a few quintic iterations.

    In bfloat16 where the device computes fast in it, for singular values need not be exact here.
    """
    a, b, c = _QUINTIC
    wide = D.shape[-2] <= D.shape[-1]
    X = (D if wide else D.mT).to(torch.bfloat16 if D.dtype == torch.float32 else D.dtype)
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(math.sqrt(torch.finfo(X.dtype).tiny))
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    direction: Tensor = (X if wide else X.mT).to(D.dtype)
    return direction
