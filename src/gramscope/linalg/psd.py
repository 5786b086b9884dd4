"""Symmetric positive semidefinite matrices: decompositions that name what failed, powers, sums of Gram matrices."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError, RescueWarning
from gramscope.linalg.arrays import row_gram, to_double, without_autocast

EPS = torch.finfo(torch.float64).eps
#: eigenvalues above this share of the largest are precise enough for their roots
CLEAR = 1e-10


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors of symmetric ``A [..., d, d]``.

    On CUDA float32 is decomposed in float64, which is two to three times faster there: torch takes a Jacobi method for
    float32 up to 512 columns and divide and conquer for float64.
    """
    with _explained(A, "eigenvectors"):
        if A.device.type == "cuda" and A.dtype == torch.float32:
            values, vectors = (x.to(A.dtype) for x in torch.linalg.eigh(A.double()))
        else:
            values, vectors = torch.linalg.eigh(A)
    return values, vectors


def eigvalsh(A: Tensor) -> Tensor:
    """Eigenvalues (ascending) of symmetric ``A [..., d, d]``, several times faster than with eigenvectors."""
    with _explained(A, "eigenvalues"):
        values: Tensor = torch.linalg.eigvalsh(A)
    return values


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition ``U, s, Vᵀ`` of ``A [..., m, n]``."""
    with _explained(A, "singular vectors"):
        U, s, Vt = torch.linalg.svd(A, full_matrices=False)
    return U, s, Vt


def svdvals(A: Tensor) -> Tensor:
    """Singular values (descending) of ``A [..., m, n]``, in float64, to ``1e-9`` of the largest or better.

    They are the roots of the eigenvalues of ``AᵀA`` where all of these are clear of rounding, several times faster than by a
    decomposition of A.
    """
    tall = A if A.shape[-2] >= A.shape[-1] else A.mT
    squares = eigvalsh(row_gram(tall))
    if bool((squares > CLEAR * squares.amax(-1, keepdim=True)).all()):
        return squares.sqrt().flip(-1)
    with _explained(A, "singular values"):
        values: Tensor = torch.linalg.svdvals(to_double(A))
    return values


@contextmanager
def _explained(A: Tensor, wanted: str) -> Iterator[None]:
    """Raise a :class:`~gramscope.errors.NumericalError` where the decomposition of ``A`` inside fails."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise NumericalError(f"the {wanted} of a {tuple(A.shape)} matrix did not converge: {error}") from error


def psd_eigen(A: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of positive semidefinite ``A [..., d, d]``, small ones set to zero.

    Eigenvalues up to ``rtol`` times the largest (default ``d·2.2e-16``) are rounding and become zero. More negative
    ones mean that A is not positive semidefinite: they become zero too, with a :class:`RescueWarning` on their size.
    """
    values, vectors = eigh((A + A.mT) / 2)
    largest = values.abs().amax(-1, keepdim=True)
    tolerance = largest * (A.shape[-1] * EPS if rtol is None else rtol)
    negative = values < -tolerance
    if bool(negative.any()):
        size = float((values / largest).amin())
        warnings.warn(
            f"the matrix is not positive semidefinite: {int(negative.sum())} eigenvalues down to {size:.2e} of the "
            "largest are clamped to zero",
            RescueWarning,
            stacklevel=3,
        )
    return torch.where(values > tolerance, values, 0.0), vectors


def psd_power(A: Tensor, power: float, rtol: float | None = None) -> Tensor:
    """``A^power`` of positive semidefinite ``A [..., d, d]``, zero on its null space also for negative powers.

    >>> psd_power(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64), -0.5)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    values, vectors = psd_eigen(A, rtol)
    positive = values > 0
    raised = torch.where(positive, torch.where(positive, values, 1.0) ** power, 0.0)
    return (vectors * raised.unsqueeze(-2)) @ vectors.mT


def random_orthogonal(d: int, generator: torch.Generator, stack: tuple[int, ...] = ()) -> Tensor:
    """Uniformly (Haar) distributed orthogonal matrices ``[*stack, d, d]`` in float64 on the generator's device.

    >>> Q = random_orthogonal(3, torch.Generator().manual_seed(0))
    >>> torch.allclose(Q @ Q.mT, torch.eye(3, dtype=torch.float64))
    True
    """
    gaussian = torch.randn(*stack, d, d, generator=generator, device=generator.device, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    result: Tensor = Q * signs.unsqueeze(-2)
    return result


class SymmetricSum:
    """A sum of ``xᵀx [..., d, d]``, kept as strips of rows from the diagonal on: half of the numbers, and of the products.

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

    >>> kept_entries(128) / 128**2
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
    size = max(64, d // 8)
    for start in range(0, d, size):
        yield slice(start, min(d, start + size))
