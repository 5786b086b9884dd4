"""Symmetric positive semidefinite matrices: decompositions that name what failed, powers, random eigenvectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gramscope.errors import NumericalError, RescueWarning
from gramscope.linalg.arrays import binary_exponent

EPS = torch.finfo(torch.float64).eps


def frobenius(A: Tensor) -> Tensor:
    """``‖A‖_F`` over all entries, as a number; right also where the squares would overflow or underflow."""
    exponent = binary_exponent(A)
    return torch.ldexp(torch.ldexp(A, -exponent).square_().sum().sqrt(), exponent)


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
    """Singular values (descending) of ``A [..., m, n]``, several times faster than with singular vectors."""
    with _explained(A, "singular values"):
        values: Tensor = torch.linalg.svdvals(A)
    return values


@contextmanager
def _explained(A: Tensor, wanted: str) -> Iterator[None]:
    """Raise a :class:`~gramscope.errors.NumericalError` where the decomposition of ``A`` inside fails."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise NumericalError(f"the {wanted} of a {tuple(A.shape)} matrix did not converge: {error}") from error


def add_gram_(total: Tensor, rows: Tensor) -> None:
    """Add ``rowsᵀrows`` to the blocks of ``total [..., d, d]`` on and above the diagonal; :func:`mirror_` fills the others.

    >>> total = torch.zeros(2, 2)
    >>> add_gram_(total, torch.tensor([[1.0, 2.0]]))
    >>> total
    tensor([[1., 2.],
            [2., 4.]])
    """
    for i in _strips(total.shape[-1]):
        part = total[..., i, i.start :]
        if total.dim() == 2:
            part.addmm_(rows[:, i].mT, rows[:, i.start :])
        else:
            part += rows[..., i].mT @ rows[..., i.start :]


def mirror_(total: Tensor) -> Tensor:
    """Copy what is above the diagonal of ``total [..., d, d]`` below it."""
    for i in _strips(total.shape[-1]):
        total[..., i.stop :, i] = total[..., i, i.stop :].mT
    return total


def _strips(d: int) -> Iterator[slice]:
    """Rows of the strips in which symmetric products are formed: the fewer, the more of them is formed twice."""
    size = max(64, min(256, d // 4))
    for start in range(0, d, size):
        yield slice(start, min(d, start + size))


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


def inverse_root(A: Tensor) -> Tensor:
    """``A^{−½}`` of positive semidefinite ``A [..., d, d]``, zero where eigenvalues are rounding."""
    values, vectors = eigh(A)
    floor = values.amax(-1, keepdim=True) * A.shape[-1] * EPS
    root = torch.where(values > floor, values.clamp(min=torch.finfo(A.dtype).tiny).rsqrt(), 0.0)
    return (vectors * root.unsqueeze(-2)) @ vectors.mT


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
