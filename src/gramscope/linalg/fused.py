"""Passes over matrices that torch makes several of, and Triton one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from gramscope.errors import RescueWarning
from gramscope.linalg import processor
from gramscope.linalg.newton_schulz import one_pass
from gramscope.linalg.polar import polar

#: steps towards the inverse root of a matrix whose eigenvalues are between 1 and 2
ROOT_STEPS = 5
#: matrices up to this size are worked on by Triton's kernels
_BYTES = 2**30
#: of its norm is added to a matrix before its polar factor is taken: directions that are lost are not turned
SHIFT = 2e-11


@dataclass(frozen=True)
class Balance:
    """The operator ``N → (N − Nᵀ)ᵢⱼ/(sᵢ + sⱼ)``, zero where i and j are both among the first few.

    Attributes:
        s: ``[k]``, positive.
        few: how many are left out.
    """

    s: Tensor
    few: int

    @cached_property
    def weights(self) -> Tensor:
        """``1/(sᵢ + sⱼ)`` or zero, ``[k, k]``."""
        weights = (self.s.unsqueeze(-1) + self.s).reciprocal_()
        weights[: self.few, : self.few] = 0
        return weights


def split(A: Tensor, inner: int) -> Tensor:
    """``A ≈ high + low`` in bfloat16, as four blocks ``high, high, low, high`` side by side along the dimension ``inner``.

    The first three of them times the last three of another matrix are the product but for ``low·low``.

    Args:
        A: ``[m, n]`` in float32.
        inner: 0 stacks the blocks to ``[4m, n]``, 1 to ``[m, 4n]``.
    """
    if (kernels := _kernels(A)) is not None:
        return kernels.split(A, inner)  # type: ignore[no-any-return]
    high = A.bfloat16()
    return torch.cat([high, high, (A - high).bfloat16(), high], dim=inner)


def split_step(source: Tensor, target: Tensor) -> Tensor:
    """:func:`split` along the rows of ``source`` and of ``target − source`` ``[m, n]``: a stack ``[2, 4m, n]``."""
    if (kernels := _kernels(source)) is not None:
        return kernels.split_step(source, target)  # type: ignore[no-any-return]
    return torch.stack([split(source, 0), split(target - source, 0)])


def first_rows(V: Tensor, A: Tensor, few: int) -> Tensor:
    """The first rows of ``Vᵀ A`` ``[few, d]``, summed in float64."""
    if (kernels := _kernels(A)) is not None and few <= kernels.LARGEST:
        return kernels.first_rows(V, A, few)  # type: ignore[no-any-return]
    return (V[:, :few].double().mT @ A.double()).float()


def symmetrised(N: Tensor, odd: Tensor, few: int) -> tuple[Tensor, Balance, Tensor, Tensor, Tensor]:
    """``M = (N + Nᵀ)/2 + odd`` ``[k, k]`` in float32, and :func:`apart` of it."""
    if (kernels := _kernels(N)) is not None:
        M, s, rest, K, low = kernels.symmetrised(N, odd, few)
        return M, Balance(s, few), rest, K, low
    M = torch.add(N, N.mT).mul_(0.5).add_(odd)
    return M, *apart(M, odd, few)


def apart(M: Tensor, odd: Tensor, few: int) -> tuple[Balance, Tensor, Tensor, Tensor]:
    """The balance for ``|diag M|``; coarsely ``|diag M| − M``; and ``odd`` in that :func:`balanced`, and coarsely."""
    s, rest = M.diagonal().abs(), processor.low(-M)
    rest.diagonal().copy_(s - M.diagonal())
    balance = Balance(s, few)
    return balance, rest, *balanced(odd, balance)


def less_columns(N: Tensor, K: Tensor, s: Tensor) -> Tensor:
    """``N − K diag(s)`` of coarse matrices ``[k, k]``."""
    if (kernels := _kernels(N)) is not None:
        return kernels.less_columns(N, K, s)  # type: ignore[no-any-return]
    return torch.addcmul(N, K, s.to(K.dtype), value=-1)


def balanced(N: Tensor, balance: Balance, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``base + (N − Nᵀ)ᵢⱼ/(sᵢ + sⱼ)`` in float32, and coarsely.

    Args:
        N: ``[k, k]``, also in bfloat16.
        balance: the denominators.
        base: ``[k, k]``, float32.
    """
    if (kernels := _kernels(N)) is not None:
        return kernels.balanced(N, balance.s, balance.few, base)  # type: ignore[no-any-return]
    K = torch.sub(N, N.mT).float().mul_(balance.weights)
    if base is not None:
        K.add_(base)
    return K, processor.low(K)


def nearly_diagonal(M: Tensor, gained: Tensor, K: Tensor, s: Tensor, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """``H_ij/√(H_ii H_jj)`` of ``H = M + gained − K diag(s)``, without its first rows and columns, which become zero.

    Args:
        M, gained, K: ``[k, k]``, gained also in bfloat16; the diagonal of K is zero.
        s: ``[k]``.
        few: how many rows and columns.

    Returns:
        It, :func:`split` along the columns unless on the CPU; the identity minus it, coarsely; and ``1/√H_ii`` ``[k]``, zero
        for the first as well.
    """
    if (kernels := _kernels(M)) is not None:
        return kernels.nearly_diagonal(M, gained, K, s, few)  # type: ignore[no-any-return]
    scale = (M.diagonal() + gained.diagonal()).float().rsqrt_()
    scale[:few] = 0
    E = torch.add(M, gained).addcmul_(K, s, value=-1).mul_(scale.unsqueeze(-1)).mul_(scale)
    rest = processor.low(-E)
    rest.diagonal().zero_()
    return E if processor.on_host(E) else split(E, 1), rest, scale


def row_norms(A: Tensor, B: Tensor | None = None) -> Tensor:
    """``‖Aᵢ − Bᵢ‖`` of all rows ``[k]``, in float32."""
    if (kernels := _kernels(A)) is not None:
        return kernels.row_norms(A, B)  # type: ignore[no-any-return]
    norms: Tensor = torch.linalg.vector_norm(A if B is None else A - B, dim=-1, dtype=torch.float32)
    return norms


def small_turn(
    z: Tensor, image: Tensor, columns: Tensor, corner: Tensor, scale: Tensor, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``T = R (P − I) R`` with ``R = (I + yᵀy)^(-½)``, ``y = D z``, and P the polar factor of ``R b R``.

    ``b = corner + columnsᵀ z + zᵀ image``, but for the antisymmetric part of the products, which is rounding where
    ``image = columns + S z`` with a symmetric S. Directions in which ``R b R`` is zero are not turned.

    Args:
        z, image, columns: ``[k, f]``.
        corner: ``[f, f]``.
        scale: D ``[k]``.
        least: the least singular value of ``R b R`` that is found, relative to the largest.

    Returns:
        T and b ``[f, f]``; how far P and ``R (I + yᵀy) R`` were from what they should be before the last steps, and the norm of
        T ``[2]``.
    """
    f = z.shape[1]
    kernels = _kernels(z)
    if kernels is not None and f <= kernels.LARGEST:
        return kernels.small_turn(z, image, columns, corner, scale, least)  # type: ignore[no-any-return]
    y, z, image, columns = (x.double() for x in (z * scale.unsqueeze(-1), z, image, columns))
    one = torch.eye(f, dtype=z.dtype, device=z.device)
    square = one + y.mT @ y
    sums = columns.mT @ z + z.mT @ image
    b = corner + 0.5 * (sums + sums.mT)
    R = one
    for _ in range(ROOT_STEPS):
        rest = R @ square @ R
        R = 1.5 * R - 0.5 * rest @ R
    A = R @ b @ R
    P, residual = _polar((A + SHIFT * torch.linalg.matrix_norm(A) * one).unsqueeze(0), least)
    T, residual = R @ (P[0] - one) @ R, residual + torch.linalg.matrix_norm(rest - one)
    return T.float(), b.float(), torch.cat([residual, torch.linalg.matrix_norm(T).view(1)]).float()


def defects(z: Tensor, image: Tensor, T: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The norms of the rows of ``image Tᵀ − D² z T bᵀ`` and of ``image``: ``[2, k]``.

    Args:
        z, image: ``[k, f]``.
        T, b: ``[f, f]``.
        scale: D ``[k]``.
    """
    kernels = _kernels(z)
    if kernels is not None and len(T) <= kernels.LARGEST:
        return kernels.defects(z, image, T, b, scale)  # type: ignore[no-any-return]
    uneven = torch.addmm(image @ T.mT, z * scale.square().unsqueeze(-1), T @ b.mT, alpha=-1)
    return torch.stack([row_norms(uneven), row_norms(image)])


def moved_by(source: Tensor, moved: Tensor, left: Tensor, T: Tensor, right: Tensor) -> Tensor:
    """``source + (moved + left T right)``, rounded to float32 whatever the precision that products are set to.

    Args:
        source, moved: ``[m, n]``; the second may be changed.
        left: ``[m, f]``.
        T: ``[f, f]``.
        right: ``[f, n]``.
    """
    kernels = _kernels(source)
    if kernels is not None and len(T) <= kernels.LARGEST:
        return kernels.moved_by(source, moved, left, T, right)  # type: ignore[no-any-return]
    if processor.on_host(source):
        return moved.addmm_(left, T @ right).add_(source)
    return (source + (moved + left.double() @ (T.double() @ right.double()))).float()


def narrow(A: Tensor, B: Tensor, factor: float = 1.0, plus: Sequence[tuple[float, Tensor]] = ()) -> Tensor:
    """``factor A B + Σ c C`` ``[m, f]`` in float32, for a few columns.

    Args:
        A: ``[m, n]``, coarse or, on the CPU, in float32; elsewhere also what :func:`split` makes of it along the columns.
        B: ``[n, f]`` in float32, rounded as A is.
        factor: of the product.
        plus: pairs of c and C ``[m, f]``, two at most.
    """
    kernels = _kernels(A)
    if kernels is not None and B.shape[1] <= kernels.LARGEST:
        return kernels.narrow(A, B, factor, plus)  # type: ignore[no-any-return]
    if A.shape[1] == len(B):
        result = (A @ B.to(A.dtype)).float()
    else:
        result = processor.accumulated(A[:, : 3 * len(B)], split(B, 0)[len(B) :])
    if factor != 1:
        result.mul_(factor)
    for c, C in plus:
        result.add_(C, alpha=c)
    return result


def _polar(A: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The polar factors of float64 matrices, and how far from orthogonal they were before the last steps ``[batch]``."""
    if processor.on_host(A):
        return polar(torch.nan_to_num(A, 0, 0, 0), "svd"), A.new_zeros(len(A))
    return one_pass(A, least)


def _kernels(A: Tensor) -> ModuleType | None:
    """Triton's kernels, where these work, and where their offsets into what is made of A are below 2³¹."""
    return _working_kernels(A.device) if A.is_cuda and A.numel() * A.element_size() < _BYTES else None


@cache
def _working_kernels(device: torch.device) -> ModuleType | None:
    """Compiled and tried once: Triton needs a compiler on the machine, and a device that it knows."""
    try:
        from gramscope.linalg import kernels
    except ImportError:
        return None
    try:
        wrong = _disagreements(kernels, device)
        reason = f"wrong: {', '.join(wrong)}"
    except Exception as error:  # whatever a compiler may raise
        wrong, reason = ["all"], (str(error).splitlines() or [type(error).__name__])[0]
    if wrong:
        warnings.warn(f"Triton's kernels are not used ({reason}): whitening is slower", RescueWarning, stacklevel=2)
        return None
    return kernels


def _disagreements(kernels: ModuleType, device: torch.device) -> Sequence[str]:
    """Which kernels are not what they should be on small matrices."""
    one, s = torch.eye(2, device=device), torch.ones(2, device=device)
    checks = {
        "split": torch.equal(kernels.split(one, 0)[:2].float(), one),
        "first_rows": torch.equal(kernels.first_rows(one, one, 1), one[:1]),
        "split_step": torch.equal(kernels.split_step(one, 3 * one)[1, :2].float(), 2 * one),
        "symmetrised": torch.equal(kernels.symmetrised(one, one, 0)[0], 2 * one),
        "less_columns": torch.equal(kernels.less_columns(one.bfloat16(), one.bfloat16(), s).float(), 0 * one),
        "balanced": torch.equal(kernels.balanced(one, s, 0, one)[0], one),
        "nearly_diagonal": torch.allclose(kernels.nearly_diagonal(one, one, 0 * one, s, 0)[2], s * 0.5**0.5),
        "row_norms": torch.allclose(kernels.row_norms(one, -one), 2 * s),
        "small_turn": bool(kernels.small_turn(0 * one, one, one, -one, s, 0.1)[0].allclose(-2 * one)),
        "moved_by": torch.equal(kernels.moved_by(one, one, one, one, one), 3 * one),
        "narrow": torch.equal(kernels.narrow(one.bfloat16(), one, 2, [(1, one)]), 3 * one)
        and torch.equal(kernels.narrow(kernels.split((1 + 2**-9) * one, 1), one, 1, []), (1 + 2**-9) * one),
        "defects": torch.allclose(kernels.defects(0 * one, one, one, one, s)[0], s),
    }
    return [name for name, right in checks.items() if not right]
