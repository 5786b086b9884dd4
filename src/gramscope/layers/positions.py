"""Which positions of a batch of sequences hold tokens, and which are padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """The sequences of one batch of ``n`` samples.

    Args:
        lengths: of the sequences in the batch, with padding; the encoder and the decoder of a sequence-to-sequence model
            have different ones (:mod:`gramscope.layers.labels` sees to that).
        masks: boolean ``[n, length]`` by length, true at tokens; lengths without padding have none.
    """

    lengths: tuple[int, ...] = ()
    masks: dict[int, Tensor] = field(default_factory=dict)

    def of(self, sites: int, times: int = 1) -> Tensor | None:
        """``[n, sites]``, true at tokens, for a layer that was applied ``times`` times; ``None`` without padding.

        >>> Positions((2,), {2: torch.tensor([[True, False]])}).of(4, times=2)
        tensor([[ True, False,  True, False]])
        """
        mask = self.masks.get(sites // times) if sites % times == 0 else None
        return None if mask is None else mask.repeat(1, times)

    def without_padding(self, rows: Tensor) -> Tensor:
        """Gradients ``[…, n, sites, k]`` at a layer's outputs, also ``[…, n·length, 1, k]``, with zeros at padding.

        A model may let tokens see their padding (Mamba's convolution reads the zeros before the first token), so that
        gradients at padding are not always zero.

        >>> Positions((2,), {2: torch.tensor([[True, False]])}).without_padding(torch.ones(1, 2, 1)).flatten()
        tensor([1., 0.])
        """
        batch, sites = rows.shape[-3:-1]
        for mask in self.masks.values():
            if batch * sites == mask.numel() and sites in (1, mask.shape[1]):
                return rows.masked_fill(~mask.reshape(batch, sites, 1).to(rows.device), 0)
        return rows

    def tokens_first(self, value: Tensor) -> Tensor:
        """A batch of sequences ``[n, length, …]`` with tokens moved to the front, zeros after them, padding cut off.

        Padding on the left or right does not change the result. Anything else is returned as it is.

        >>> Positions((3,), {3: torch.tensor([[False, True, True]])}).tokens_first(torch.arange(3.0).reshape(1, 3, 1))
        tensor([[[1.],
                 [2.]]])
        """
        mask = self.masks.get(value.shape[1]) if value.dim() > 2 else None
        if mask is None or mask.shape[0] != value.shape[0]:
            return value
        length = max(int(mask.sum(1).max()), 1)
        order = torch.argsort(~mask, dim=1, stable=True)[:, :length]
        shape = (*order.shape, *(1,) * (value.dim() - 2))
        tokens = value.gather(1, order.reshape(shape).expand(*order.shape, *value.shape[2:]))
        return tokens * mask.gather(1, order).reshape(shape).to(value.dtype)


def positions_in(inputs: Any, decoder: Tensor | None = None) -> Positions:
    """The sequences of a batch, from the ``attention_mask`` (and ``decoder_attention_mask``) among its keyword inputs.

    Args:
        inputs: of the model; anything but a mapping has no known padding.
        decoder: boolean ``[n, length]``, the tokens of the decoder where no ``decoder_attention_mask`` tells them.
    """
    if not isinstance(inputs, Mapping):
        return Positions()
    known = [inputs.get("attention_mask"), inputs.get("decoder_attention_mask", decoder)]
    masks = {m.shape[1]: m.bool() for m in known if isinstance(m, Tensor) and m.dim() == 2}
    ids = [inputs.get(name) for name in ("input_ids", "decoder_input_ids", "labels")]
    lengths = [t.shape[1] for t in ids if isinstance(t, Tensor) and t.dim() == 2]
    padded = {length: mask for length, mask in masks.items() if not mask.all()}
    return Positions(tuple(dict.fromkeys([*masks, *lengths])), padded)


def flattened(h: Tensor, n: int, lengths: tuple[int, ...]) -> Tensor:
    """Rows ``[…, n·length, 1, d]`` of a layer that saw all tokens in one axis as ``[…, n, length, d]``; others as they are.

    >>> flattened(torch.zeros(6, 1, 4), 2, (3,)).shape
    torch.Size([2, 3, 4])
    """
    rows, sites = h.shape[-3:-1]
    if rows != n and sites == 1 and n and rows % n == 0 and rows // n in lengths:
        return h.reshape(*h.shape[:-3], n, rows // n, h.shape[-1])
    return h
