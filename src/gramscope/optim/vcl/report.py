"""Diagnostics of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """Diagnostics of one step. It keeps small tensors; :meth:`numbers` computes from them and waits for the device.

    Attributes:
        eigenvalues: of G ``[…, n]``, those of W's own directions first; after a light step those of the last full one.
        singular_values: of W⁺ at the last full step ``[…, p]``.
        before, after: W and W⁺ in W⁺'s own directions, ``[…, k, p]``.
        size: ``‖W‖²``, ``[…]``.
        discarded: the part of ``‖G‖²`` that truncation dropped ``[…]``.
        unsettled: of a light step ``[…]``, the larger of the error of its equation (see
            :func:`gramscope.optim.lowrank.positive_slope`) and the largest relative change of a row of W since the last
            full step.
        own, rest: of a light step, which computes no eigenvalues, G on W's own directions ``[…, p, p]`` and on the others
            ``[…, q, q]``.
    """

    eigenvalues: Tensor
    singular_values: Tensor
    before: Tensor
    after: Tensor
    size: Tensor
    discarded: Tensor | None = None
    unsettled: Tensor | None = None
    own: Tensor | None = None
    rest: Tensor | None = None

    def cut(self) -> Tensor:
        """The number of positive eigenvalues that were taken as zero, ``[…]``."""
        own = self.eigenvalues[..., : self.singular_values.shape[-1]]
        return ((self.singular_values == 0) & (own > 0)).sum(-1)

    def numbers(self) -> dict[str, float | list[float]]:
        """The diagnostics by name, lists for a stack of matrices; :meth:`gramscope.VCL.diagnostics` explains them."""
        eigenvalues, used = self.eigenvalues, self.singular_values > 0
        if self.own is not None:
            eigenvalues = torch.linalg.eigvalsh(self.own).flip(-1)
        if self.rest is not None:
            eigenvalues = torch.cat([eigenvalues, torch.linalg.eigvalsh(self.rest)], -1)
        squares = eigenvalues.square()
        total = squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
        followed = torch.where(used, squares[..., : used.shape[-1]], 0.0).sum(-1)
        inside = (self.after - self.before).square().sum((-2, -1))
        outside = (self.size - self.before.square().sum((-2, -1))).clamp_min(0)
        nothing = torch.zeros_like(total)
        values = {
            "rank": used.sum(-1),
            "largest": eigenvalues.amax(-1),
            "most_negative": eigenvalues.amin(-1),
            "constraint": ((total - followed) / total).clamp_min(0).sqrt(),
            "discarded": nothing if self.discarded is None else self.discarded / total,
            "moved": (inside + outside).sqrt(),
            "unsettled": nothing if self.unsettled is None else self.unsettled,
        }
        return {name: value.tolist() for name, value in values.items()}
