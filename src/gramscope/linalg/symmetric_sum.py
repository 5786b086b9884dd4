"""Sums of Gram matrices, of which the part on and above the diagonal is kept: a half of the numbers, and of the products."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import to_double, without_autocast


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

    def with_strips(self, strips: list[Tensor]) -> SymmetricSum:
        """A sum of the same side with other numbers."""
        other = copy.copy(self)
        other.strips = strips
        other.stack, other.dtype = tuple(strips[0].shape[:-2]), strips[0].dtype
        return other

    def split(self, parts: int) -> SymmetricSum:
        """The same sum in equal ``parts`` along a first axis that had one."""
        if self.stack[0] == parts:
            return self
        return self.with_strips([(strip / parts).expand(parts, *strip.shape[1:]).clone() for strip in self.strips])

    def merge(self, other: SymmetricSum) -> SymmetricSum:
        """The sum of both, along a first axis of parts; one part counts as equal shares of several."""
        if self.d != other.d or self.stack[1:] != other.stack[1:]:
            raise InputError(f"cannot merge sums of {self.stack} matrices of {self.d} and {other.stack} of {other.d}")
        parts = max(self.stack[0], other.stack[0])
        a, b = self.split(parts), other.split(parts)
        return a.with_strips([x + y.to(x.device) for x, y in zip(a.strips, b.strips, strict=True)])

    def to(self, device: torch.device) -> SymmetricSum:
        """The same sum on another device."""
        return self.with_strips([strip.to(device) for strip in self.strips])

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
