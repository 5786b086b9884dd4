"""Tall matrices read block by block in float64.

A measure of 1,000,000 × 256 float32 features must not make a float64 copy of them. It reads :class:`Rows` instead:
every block is converted, checked for NaN and infinity, used and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.linalg.arrays import (
    Array,
    as_nonempty_floats,
    binary_exponent,
    check_finite,
    check_same_device,
    to_double,
)

#: entries of one block (8 MB in float64)
BLOCK_ENTRIES = 1_000_000


def spans(length: int, width: int, least: int = 1, entries: int | None = None) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive blocks of ``length`` rows, each of about ``entries`` entries (1,000,000).

    Work that costs width² a block, such as merging Gram matrices, asks for ``least`` rows in each.

    >>> list(spans(5, BLOCK_ENTRIES // 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, least, (BLOCK_ENTRIES if entries is None else entries) // max(1, width))
    for start in range(0, length, step):
        yield start, min(length, start + step)


class Rows:
    """The rows of a real matrix ``[n, width]``, read as finite float64 blocks.

    >>> Rows(torch.ones(3, 2), "H").block(1, 3)
    tensor([[1., 1.],
            [1., 1.]], dtype=torch.float64)
    """

    def __init__(self, x: Array, name: str) -> None:
        self.name = name
        self.data = as_nonempty_floats(x, name)
        if self.data.dim() != 2:
            hint = f"; for one feature pass {name}[:, None]" if self.data.dim() == 1 else f"; pass {name}.flatten(1)"
            raise InputError(f"{name} must be a matrix [samples, features], got shape {tuple(self.data.shape)}{hint}")

    @property
    def n(self) -> int:
        """Number of rows."""
        return int(self.data.shape[0])

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.data.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the data lie."""
        return self.data.device

    @property
    def eps(self) -> float:
        """Rounding of the entries as they came, relative to their size: 1.2e-7 for float32."""
        return float(torch.finfo(self.data.dtype).eps)

    def block(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` in float64."""
        block = to_double(self.data[start:stop])
        check_finite(block, self.name)
        return block

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns ``start`` to ``stop`` of all rows, in float64."""
        block = to_double(self.data[:, start:stop])
        check_finite(block, self.name)
        return block

    def mean(self) -> Tensor:
        """Mean row, ``[width]``."""
        return torch.stack([block.sum(0) for block in self.blocks()]).sum(0) / self.n

    def blocks(self, width: int = 0) -> Iterator[Tensor]:
        """All rows in order, in blocks sized for ``max(width, self.width)`` columns."""
        for start, stop in spans(self.n, max(width, self.width)):
            yield self.block(start, stop)


class MappedRows(Rows):
    """The rows ``(h / 2^exponent − shift) Wᵀ`` of other rows h, formed block by block; any part may be left out.

    Args:
        rows: ``[n, d]``.
        W: float64 ``[k, d]``.
        shift: float64 ``[d]``.
        exponent: of the power of two that the rows are divided by.
    """

    def __init__(self, rows: Rows, W: Tensor | None = None, shift: Tensor | None = None, exponent: int = 0) -> None:
        if W is not None and W.shape[-1] != rows.width:
            raise InputError(f"W of shape {tuple(W.shape)} does not act on {rows.name} with {rows.width} features")
        self.name = rows.name
        self.data = rows.data
        self.rows = rows
        self.W = W
        self.shift = shift
        self.exponent = exponent

    @property
    @override
    def width(self) -> int:
        return self.rows.width if self.W is None else int(self.W.shape[0])

    @override
    def block(self, start: int, stop: int) -> Tensor:
        block = scaled(self.rows.block(start, stop), -self.exponent)
        if self.shift is not None:
            block = block - self.shift
        return block if self.W is None else block @ self.W.mT

    @override
    def columns(self, start: int, stop: int) -> Tensor:
        if self.W is not None:
            return MappedRows(self.rows, self.W[start:stop], self.shift, self.exponent).block(0, self.n)
        block = scaled(self.rows.columns(start, stop), -self.exponent)
        return block if self.shift is None else block - self.shift[start:stop]


class OneHotRows(Rows):
    """One-hot rows of integer labels minus a constant row (their mean, when centred), never formed as a whole.

    Args:
        labels: ``[n]`` of any integer dtype.
        classes: the ``[c]`` sorted label values, one column each.
        shift: the ``[c]`` row that is subtracted.
    """

    def __init__(self, labels: Tensor, classes: Tensor, shift: Tensor, name: str = "Y") -> None:
        self.name = name
        self.data = labels
        self.classes = classes
        self.shift = shift

    @property
    @override
    def width(self) -> int:
        return int(self.classes.numel())

    def index(self, start: int, stop: int) -> Tensor:
        """Column of each label."""
        labels = self.data[start:stop].to(torch.int64).contiguous()
        column = torch.searchsorted(self.classes, labels).clamp_(max=self.width - 1)
        known = self.classes[column] == labels
        if not bool(known.all()):
            unknown = sorted(set(labels[~known].tolist()))[:5]
            raise InputError(f"{self.name} has labels {unknown} that are not among the classes {self.classes.tolist()}")
        return column

    @override
    def block(self, start: int, stop: int) -> Tensor:
        one_hot = self.shift.neg().expand(stop - start, -1).clone()
        column = self.index(start, stop).to(one_hot.device)[:, None]
        return one_hot.scatter_add_(1, column, one_hot.new_ones(1, 1).expand_as(column))

    @override
    def columns(self, start: int, stop: int) -> Tensor:
        return self.block(0, self.n)[:, start:stop]


def scale_of(rows: Rows) -> int:
    """The e for which ``rows / 2^e`` can be squared: 0 unless the largest entry is above 1e50 or below 1e-50.

    >>> scale_of(Rows(torch.tensor([[1e-200]], dtype=torch.float64), "H"))
    -664
    """
    if isinstance(rows, OneHotRows) or rows.data.is_meta:
        return 0
    least, most = torch.aminmax(rows.data)
    largest = max(abs(float(least)), abs(float(most)))
    return 0 if 1e-50 < largest < 1e50 or not 0 < largest < math.inf else max(math.frexp(largest)[1], -1022)


def unit_rows(rows: Rows) -> Rows:
    """The rows for measures that do not depend on their scale, divided by a power of two where squares need it."""
    exponent = scale_of(rows)
    return MappedRows(rows, exponent=exponent) if exponent else rows


def scaled(x: Tensor, exponent: int) -> Tensor:
    """``x · 2^exponent``, exactly."""
    return torch.ldexp(x, torch.tensor(exponent, dtype=torch.int64, device=x.device)) if exponent else x


def check_pair(first: Rows, second: Rows) -> None:
    """Raise :class:`InputError` unless both have the same number of rows and the same device."""
    if first.n != second.n:
        raise InputError(
            f"{first.name} has {first.n} rows and {second.name} has {second.n}; they must describe the same samples"
        )
    check_same_device(**{first.name: first.data, second.name: second.data})


def row_norm(A: Tensor, B: Tensor | None = None) -> Tensor:
    """``‖A‖_F``, or ``‖A − B‖_F``, in float64, read in blocks; right also where the squares would overflow or underflow.

    >>> row_norm(torch.tensor([[3e-200], [4e-200]], dtype=torch.float64)).item()
    5e-200
    """
    flat, other = A.reshape(-1, A.shape[-1]), None if B is None else B.reshape(-1, A.shape[-1])
    if B is None and A.dtype != torch.float64:  # squares of other types are within the range of float64
        rows, width = flat.shape
        norms = [torch.linalg.vector_norm(to_double(flat[i:j])) for i, j in spans(rows, width, entries=2**16)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else to_double(A).sum()
    exponent = binary_exponent(A) if B is None else torch.maximum(binary_exponent(A), binary_exponent(B))
    parts = []
    for start, stop in spans(*flat.shape[-2:]):
        block = to_double(flat[start:stop])
        block = block if other is None else block - to_double(other[start:stop])
        parts.append(torch.ldexp(block, -exponent).square().sum())
    total = torch.stack(parts).sum() if parts else to_double(A).sum()
    return torch.ldexp(total.sqrt(), exponent.to(total.device))


def row_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` in float64 for ``A [..., k, d]`` of any floating dtype, converted in blocks of rows.

    >>> row_product(torch.ones(2, 3), torch.ones(3, 1, dtype=torch.float64)).flatten()
    tensor([3., 3.], dtype=torch.float64)
    """
    width = A.shape[:-2].numel() * A.shape[-1]
    parts = [to_double(A[..., start:stop, :]) @ B for start, stop in spans(A.shape[-2], width)]
    return torch.cat(parts, -2)
