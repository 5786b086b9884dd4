"""How alike two feature matrices are: cosines, the neural feature ansatz in its four forms, and its controls ([NFA])."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope.linalg.arrays import (
    Array,
    as_float_tensor,
    as_matrices,
    binary_exponent,
    check_range,
    check_same_device,
    result_dtype,
    to_double,
    unit_scale,
)
from gramscope.linalg.factored import FactoredGram
from gramscope.linalg.psd import eigh, nonzero_power, psd_eigen, psd_power, random_orthogonal
from gramscope.linalg.row_blocks import spans
from gramscope.measures.gram import matrices

Kind = Literal["uncentered", "centered", "double", "ptk"]


def cosine(A: Array | FactoredGram, B: Array | FactoredGram, center: bool = False) -> Tensor:
    """``ρ(A, B) = tr(AᵀB) / (‖A‖_F ‖B‖_F)``, uncentred as in [NFA]; with ``center`` the Pearson correlation of the entries.

    Args:
        A: a matrix, a stack (counted as the diagonal blocks of one matrix), a diagonal, or thin factors.
        B: the same shape.
        center: subtract each one's mean over all its entries.

    Returns:
        A float64 number, NaN when one of them is zero (constant, with ``center``).

    >>> round(cosine(torch.eye(2), torch.ones(2, 2)).item(), 6)
    0.707107
    """
    if isinstance(A, FactoredGram):
        return _factored_cosine(A, B, center)
    if isinstance(B, FactoredGram):
        return _factored_cosine(B, A, center)
    return _dense_cosine(as_float_tensor(A, "A"), as_float_tensor(B, "B"), center)


def nfa(
    W: Array,
    K: Array,
    W0: Array | None = None,
    K_centered: Array | None = None,
    kind: Kind = "uncentered",
    center: bool = False,
    power: float = 1.0,
) -> Tensor:
    """The neural feature ansatz: ρ between a weight Gram and the average gradient outer product it should follow ([NFA]).

    With ``W̄ = W − W₀``:

        uncentered   ρ(WᵀW, WᵀKW)          needs W, K
        centered     ρ(W̄ᵀW̄, W̄ᵀKW̄)         needs W₀ too
        double       ρ(W̄ᵀW̄, W̄ᵀK̄W̄)         needs W₀ and K̄
        ptk          ρ(W₀ᵀW₀, W₀ᵀK̄W₀)      needs W₀ and K̄

    Args:
        W: weight ``[..., k, d]``.
        K: tangent kernel at the pre-activations, ``(1/n) Σ_i J_iᵀJ_i [..., k, k]``.
        W0: weight at initialisation.
        K_centered: ``K̄ = (1/n) Σ_i (J_i − J_i⁰)ᵀ(J_i − J_i⁰)``, which K and K₀ do not determine.
        kind: which of the four.
        center: Pearson correlation over entries in place of the cosine.
        power: compare with this power of the gradient outer product (½ in other papers on the ansatz).

    Returns:
        A float64 number; NaN where a side is zero, such as the centred ansatz at initialisation.

    >>> round(nfa(torch.eye(2), torch.eye(2)).item(), 12)
    1.0
    """
    V, kernel = map(unit_scale, _sides(W, K, W0, K_centered, kind))  # a correlation does not depend on scales
    if power != 1.0:
        return _power_alignment(V, kernel, power, center)
    if V.shape[-2] > V.shape[-1]:
        return _dense_cosine(V.mT @ V, V.mT @ (kernel @ V), center)
    # Everything about d×d matrices that is needed lives in S = VVᵀ (k×k).
    S = V @ V.mT
    SK = S @ kernel
    sums = V.sum(-1, keepdim=True)
    return _correlation(
        (SK @ S).diagonal(dim1=-2, dim2=-1).sum(),
        S.square().sum(),
        ((SK @ S) * kernel).sum(),
        sums.square().sum(),
        (sums * (kernel @ sums)).sum(),
        V.shape[:-2].numel() * V.shape[-1] ** 2,
        center,
    )


def double_centered_ratio(W: Array, K: Array, W0: Array, K_centered: Array) -> Tensor:
    """``tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)`` ([NFA] Figure 4): the share of the alignment that needs both to have moved.

    >>> eye = torch.eye(2)
    >>> double_centered_ratio(2 * eye, 4 * eye, eye, eye).item()
    0.25
    """
    V, kernel = _sides(W, K, W0, None, "centered")
    _, centred = _sides(W, K, W0, K_centered, "double")
    V = unit_scale(V)
    S = V @ V.mT
    SS = S @ S
    exponent = -binary_exponent(kernel)
    moved, whole = ((SS * torch.ldexp(x, exponent)).sum() for x in (centred, kernel))
    return check_range(moved / whole, "the ratio") if bool(whole) else moved / whole


def corrupted(K: Array, generator: torch.Generator) -> Tensor:
    """``Q`` with the spectrum of K and uniformly random eigenvectors: ``WᵀQW`` is the corrupted AGOP of [NFA] Figure 1.

    Args:
        K: symmetric ``[..., k, k]``.
        generator: source of the eigenvectors.

    >>> Q = corrupted(torch.diag(torch.tensor([1.0, 3.0])), torch.Generator().manual_seed(0))
    >>> [round(x, 5) for x in torch.linalg.eigvalsh(Q).tolist()]
    [1.0, 3.0]
    """
    kernel = as_matrices(K, "K")
    if kernel.shape[-1] != kernel.shape[-2]:
        raise InputError(f"K must be square, got shape {tuple(kernel.shape)}")
    double = to_double(kernel)
    values, _ = eigh((double + double.mT) / 2)
    Q = random_orthogonal(kernel.shape[-1], generator, tuple(kernel.shape[:-2])).to(double.device)
    return ((Q * values.unsqueeze(-2)) @ Q.mT).to(result_dtype(kernel))


def _sides(W: Array, K: Array, W0: Array | None, K_centered: Array | None, kind: Kind) -> tuple[Tensor, Tensor]:
    """The weight and the kernel that ``kind`` compares, in float64."""
    if kind not in ("uncentered", "centered", "double", "ptk"):
        raise InputError(f"kind must be 'uncentered', 'centered', 'double' or 'ptk', got {kind!r}")
    if kind == "uncentered":
        (weight, kernel), _ = matrices(W=W, K=K)
        return weight, kernel
    if W0 is None:
        raise InputError(f"kind={kind!r} needs W0, the weight at initialisation")
    if isinstance(W, Tensor) and isinstance(W0, Tensor) and W is not W0 and W.data_ptr() == W0.data_ptr():
        warnings.warn(
            "W0 shares its memory with W and has changed along with it; keep W.detach().clone() before training",
            ResultWarning,
            stacklevel=3,
        )
    if kind == "centered":
        (weight, kernel, initial), _ = matrices(W=W, K=K, W0=W0)
        return weight - initial, kernel
    if K_centered is None:
        raise InputError(f"kind={kind!r} needs K_centered; tangent_kernel(..., reference=initial_network) gives it")
    (weight, initial, kernel), _ = matrices(W=W, W0=W0, K_centered=K_centered)
    return (initial if kind == "ptk" else weight - initial), kernel


def _power_alignment(V: Tensor, K: Tensor, power: float, center: bool) -> Tensor:
    """ρ(VᵀV, (VᵀKV)^power); for k < d from the k×k matrices of ``B = K^½V``, since ``(BᵀB)^p = Bᵀ(BBᵀ)^{p−1}B``."""
    if V.shape[-2] >= V.shape[-1]:
        return _dense_cosine(V.mT @ V, psd_power(V.mT @ K @ V, power), center)
    B = psd_power(K, 0.5) @ V
    values, P = psd_eigen(B @ B.mT)
    rotated = P.mT @ B
    small = nonzero_power(values, power - 1.0)
    S = V @ V.mT
    return _correlation(
        (small * (rotated @ V.mT).square().sum(-1)).sum(),
        S.square().sum(),
        nonzero_power(values, 2 * power).sum(),
        V.sum(-1).square().sum(),
        (small * rotated.sum(-1).square()).sum(),
        V.shape[:-2].numel() * V.shape[-1] ** 2,
        center,
    )


def _dense_cosine(A: Tensor, B: Tensor, center: bool) -> Tensor:
    check_same_device(A=A, B=B)
    if A.shape != B.shape:
        raise InputError(f"A and B must have one shape, got {tuple(A.shape)} and {tuple(B.shape)}")
    a, b = A.reshape(-1), B.reshape(-1)
    blocks = list(spans(a.numel(), 1))
    exponent_a, exponent_b = (
        -torch.stack([binary_exponent(to_double(t[i:j])) for i, j in blocks]).amax() for t in (a, b)
    )
    sums = torch.zeros(3, dtype=torch.float64, device=to_double(a[:1]).device)
    mean_a = mean_b = 0.0
    if center:
        if bool((a == a[0]).all()) or bool((b == b[0]).all()):
            return sums[0] * float("nan")
        mean_a = sum(float(torch.ldexp(to_double(a[i:j]), exponent_a).sum()) for i, j in blocks) / a.numel()
        mean_b = sum(float(torch.ldexp(to_double(b[i:j]), exponent_b).sum()) for i, j in blocks) / a.numel()
    for i, j in blocks:
        x = torch.ldexp(to_double(a[i:j]), exponent_a) - mean_a
        y = torch.ldexp(to_double(b[i:j]), exponent_b) - mean_b
        sums += torch.stack([x @ y, x @ x, y @ y])
    return sums[0] / (sums[1].sqrt() * sums[2].sqrt())


def _factored_cosine(A: FactoredGram, B: Array | FactoredGram, center: bool) -> Tensor:
    A = FactoredGram(*(unit_scale(as_float_tensor(x, "A")) for x in (A.left, A.right)))
    if isinstance(B, FactoredGram):
        B = FactoredGram(*(unit_scale(as_float_tensor(x, "B")) for x in (B.left, B.right)))
    else:
        B = unit_scale(to_double(as_matrices(B, "the dense matrix")))
    if tuple(A.shape) != tuple(B.shape):
        raise InputError(f"A and B must have one shape, got {tuple(A.shape)} and {tuple(B.shape)}")
    square, total = (B.square().sum(), B.sum()) if isinstance(B, Tensor) else (B.inner(B), B.total())
    return _correlation(A.inner(B), A.inner(A), square, A.total(), total, A.shape.numel(), center)


def _correlation(
    inner: Tensor, square_a: Tensor, square_b: Tensor, sum_a: Tensor, sum_b: Tensor, entries: int, center: bool
) -> Tensor:
    """A cosine from inner products, or from the same and the sums of all entries a Pearson correlation."""
    if center:
        inner = inner - sum_a * sum_b / entries
        square_a, square_b = (_spread(q, s, entries) for q, s in ((square_a, sum_a), (square_b, sum_b)))
    return inner / (square_a.clamp(min=0.0).sqrt() * square_b.clamp(min=0.0).sqrt())


def _spread(square: Tensor, total: Tensor, entries: int) -> Tensor:
    """``Σ(x − x̄)²`` from ``Σx²`` and ``Σx``; NaN where that is no more than rounding leaves of a constant."""
    spread = square - total.square() / entries
    return torch.where(spread > 16 * torch.finfo(spread.dtype).eps * square, spread, torch.nan)
