"""The matrix that takes the gradient's place in the shift: its running mean, orthogonalised or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.optim.orthogonalise import orthogonalised
from gramscope.optim.vcl.rules import Batch


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
