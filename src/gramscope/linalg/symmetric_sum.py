"""Sums of Gram matrices, of which the part on and above the diagonal is kept: a half of the numbers, and of the products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.autocast import without_autocast


class SymmetricSum:
    """A sum of ``xᵀx [..., d, d]``, kept as strips of rows that begin at the diagonal.

    Args:
        d: its side.
        stack: leading axes.
        dtype: of the sum.
        device: where it is kept.

    >>> total = SymmetricSum(2)
    >>> total.add_gram(torch.tensor([[1.0, 2.0]]))
    >>> total.dense()
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """

    def __init__(
        self,
        d: int,
        stack: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.d, self.stack, self.dtype = d, stack, dtype
        self.strips = [
            torch.zeros(*stack, i.stop - i.start, d - i.start, dtype=dtype, device=device) for i in _strips(d)
        ]

    def add_gram(self, rows: Tensor, part: int | None = None) -> None:
        """Add ``rowsᵀrows`` of ``rows [..., m, d]``, to number ``part`` of the first leading axis where that is given.

        The product is formed in the precision of the rows, at least float32; in float64 where float32 would overflow or
        underflow.

        >>> total = SymmetricSum(1)
        >>> total.add_gram(torch.tensor([[1e-30]]))
        >>> total.dense()
        tensor([[1.0000e-60]], dtype=torch.float64)
        """
        rows = for_products(rows)
        with without_autocast(rows.device):
            for i, strip in zip(_strips(self.d), self.strips, strict=True):
                strip = strip if part is None else strip[part]
                left, right = rows[..., i].mT, rows[..., i.start :]
                if strip.dim() == 2 and (strip.dtype, strip.device) == (rows.dtype, rows.device):
                    strip.addmm_(left, right)
                else:
                    strip += (left @ right).to(strip.device)

    def split(self, parts: int) -> SymmetricSum:
        """The same sum in equal ``parts`` along a first axis that had one."""
        whole = SymmetricSum(self.d, (parts, *self.stack[1:]), self.dtype, self.strips[0].device)
        whole.strips = [strip.expand(parts, *strip.shape[1:]) / parts for strip in self.strips]
        return whole

    def is_finite(self) -> bool:
        """Whether no entry is NaN or infinite."""
        return all(bool(torch.isfinite(strip.sum())) for strip in self.strips)

    def dense(self) -> Tensor:
        """The whole matrix ``[..., d, d]``."""
        whole = self.strips[0].new_empty(*self.stack, self.d, self.d)
        for i, strip in zip(_strips(self.d), self.strips, strict=True):
            block = strip[..., : strip.shape[-2]]
            whole[..., i, i] = block.triu() + block.triu(1).mT
            whole[..., i, i.stop :] = strip[..., strip.shape[-2] :]
            whole[..., i.stop :, i] = strip[..., strip.shape[-2] :].mT
        return whole


def kept_entries(d: int) -> int:
    """How many of the d² entries a sum keeps.

    >>> kept_entries(192) / 192**2
    0.75
    """
    return sum((i.stop - i.start) * (d - i.start) for i in _strips(d))


def for_products(rows: Tensor) -> Tensor:
    """``rows [..., m, d]`` in at least float32; in float64 where squares in float32 would overflow or underflow."""
    rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    if rows.dtype != torch.float32 or rows.numel() == 0:
        return rows
    limits = torch.finfo(rows.dtype)
    largest = float(rows.square().sum(-2).amax())
    return rows if limits.tiny**0.5 < largest < limits.max**0.5 else to_double(rows)


def _strips(d: int) -> Iterator[slice]:
    size = max(96, d // 16)
    for start in range(0, d, size):
        yield slice(start, min(d, start + size))
