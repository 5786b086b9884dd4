"""How alike two feature matrices are: cosines, the neural feature ansatz in its forms, and its controls ([NFA])."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope.linalg import gram
from gramscope.linalg.arrays import (
    Array,
    as_float_tensor,
    as_matrices,
    check_same_device,
    result_dtype,
    to_double,
)
from gramscope.linalg.gram import Dense, Factor, Factored, Gram, correlation
from gramscope.linalg.measured import Measured
from gramscope.linalg.psd import EPS, eigh, psd_eigen, random_orthogonal
from gramscope.measures.virtual import matrices

Kind = Literal["uncentered", "centered", "double", "ptk"]
#: powers among which the best one is sought
SMALLEST, LARGEST = 1 / 64, 4.0


def cosine(A: Array | Gram, B: Array | Gram, center: bool = False) -> Measured:
    """``ρ(A, B) = tr(AᵀB) / (‖A‖_F ‖B‖_F)``, uncentred as in [NFA]; with ``center`` the Pearson correlation of the entries.

    Args:
        A: a matrix, a stack (counted as the diagonal blocks of one matrix), a diagonal, or a Gram matrix of gramscope.
        B: the same shape.
        center: subtract each one's mean over all its entries.

    Returns:
        A float, NaN when one of them is zero (constant, with ``center``).

    >>> round(cosine(torch.eye(2), torch.ones(2, 2)), 6)
    0.707107
    """
    if isinstance(A, Gram) or isinstance(B, Gram):
        grams = [x if isinstance(x, Gram) else Dense(as_matrices(x, "the dense matrix")[None]) for x in (A, B)]
        return gram.cosine(grams[0], grams[1], center)
    first, second = as_float_tensor(A, "A"), as_float_tensor(B, "B")
    check_same_device(A=first, B=second)
    if first.shape != second.shape:
        raise InputError(f"A and B must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    a, b = (to_double(x).flatten() for x in (first, second))
    if center:
        a, b = (torch.zeros_like(x) if bool((x == x[0]).all()) else x - x.mean() for x in (a, b))
    return Measured((a @ b) / (a.square().sum().sqrt() * b.square().sum().sqrt()))


def nfa(
    W: Array,
    K: Array,
    W0: Array | None = None,
    K_centered: Array | None = None,
    kind: Kind = "uncentered",
    center: bool = False,
    power: float = 1.0,
) -> Measured:
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
        A float; NaN where a side is zero, such as the centred ansatz at initialisation.

    >>> round(nfa(torch.eye(2), torch.eye(2)), 12)
    1.0
    """
    V, kernel = _sides(W, K, W0, K_centered, kind)
    if power != 1.0:
        return Measured(agop_spectrum(V, kernel).alignment(power, center))
    factor = Factor(V)
    return gram.cosine(Factored.of(factor).small(), Factored.of(factor, factor, kernel[None]).small(), center)


def double_centered_ratio(W: Array, K: Array, W0: Array, K_centered: Array) -> Measured:
    """``tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)`` ([NFA] Figure 4): the share of the alignment that needs both to have moved.

    >>> eye = torch.eye(2)
    >>> float(double_centered_ratio(2 * eye, 4 * eye, eye, eye))
    0.25
    """
    V, kernel = _sides(W, K, W0, None, "centered")
    _, centred = _sides(W, K, W0, K_centered, "double")
    factor = Factor(V)
    weight, moved, whole = (Factored.of(factor, factor, core).small() for core in (None, centred[None], kernel[None]))
    return weight.inner(moved) / weight.inner(whole)


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


@dataclass(frozen=True)
class AgopSpectrum:
    """What the ansatz needs with any power of the gradient outer product ``G = WᵀKW = Σ λ_i v_i v_iᵀ``.

    Args:
        values: λ over their largest.
        along: ``v_iᵀ WᵀW v_i``.
        sums: ``1ᵀ v_i``.
        square: ``‖WᵀW‖_F²``.
        total: sum of the entries of ``WᵀW``.
        entries: how many these are.
    """

    values: Tensor
    along: Tensor
    sums: Tensor
    square: Tensor
    total: Tensor
    entries: int

    def alignment(self, power: float, center: bool = False) -> float:
        """``ρ(WᵀW, G^power)``, zero on the null space of G; NaN where a side is zero.

        In deep linear networks with balanced weights the ansatz holds with ``power = 1/L``, where L counts the layers from
        this one to the output (Tansley, Massart and Cartis 2025, "On the neural feature ansatz for deep neural networks").
        """
        raised = torch.where(self.values > 0, self.values**power, 0.0)
        inner, square = (self.along * raised).sum(), raised.square().sum()
        totals = torch.stack([self.total, (raised * self.sums.square()).sum()]) * center
        return float(correlation(self.entries, inner, self.square, square, *totals))

    def best_power(self) -> float:
        """The power in ``[1/64, 4]`` that aligns best: a scan of 65 powers, 9 % apart, then bisection of the slope."""
        powers = [SMALLEST * math.exp(i / 64 * math.log(LARGEST / SMALLEST)) for i in range(65)]
        scanned = [self.alignment(power) for power in powers]
        if any(math.isnan(rho) for rho in scanned):
            return math.nan
        best = max(range(65), key=scanned.__getitem__)
        low, high = powers[max(best - 1, 0)], powers[min(best + 1, 64)]
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._slope(middle) > 0 else (low, middle)
        return (low + high) / 2

    def _slope(self, power: float) -> float:
        """The derivative of ``log ρ`` by the power."""
        kept = self.values > 0
        values, along, logs = self.values[kept], self.along[kept], self.values[kept].log()
        first, second = along * values**power, values ** (2 * power)
        return float((first * logs).sum() / first.sum() - (second * logs).sum() / second.sum())


def agop_spectrum(W: Array, K: Array) -> AgopSpectrum:
    """The eigenvalues and eigenvectors of ``WᵀKW`` beside ``WᵀW``.

    The eigenvalues that are not zero are those of ``K^½WWᵀK^½``, so the smaller side is decomposed. Those up to the rounding
    of W's type (1.2e-7 of the largest for float32) belong to the null space: a small power would make them large.

    Args:
        W: weight ``[..., k, d]``.
        K: tangent kernel ``[..., k, k]``.

    >>> W = torch.diag(torch.tensor([2.0, 1.0]))
    >>> spectrum = agop_spectrum(W, W.mT @ W)  # the AGOP is (WᵀW)²
    >>> round(spectrum.alignment(0.5), 12), round(spectrum.best_power(), 4)
    (1.0, 0.5)
    """
    (weight, kernel), _ = matrices(W=W, K=K)
    k, d = weight.shape[-2:]
    rtol = max(max(k, d) * EPS, torch.finfo(as_matrices(W, "W").dtype).eps)
    if k >= d:
        values, vectors = psd_eigen(weight.mT @ kernel @ weight, rtol)
        rows = vectors.mT
        small = weight.mT @ weight
    else:
        eigenvalues, basis = psd_eigen(kernel, rtol)
        B = eigenvalues.sqrt().unsqueeze(-1) * (basis.mT @ weight)  # BᵀB = WᵀKW
        values, vectors = psd_eigen(B @ B.mT, rtol)
        rows = torch.where(values > 0, values, 1.0).rsqrt().unsqueeze(-1) * (vectors.mT @ B)  # the eigenvectors v_i
        small = weight @ weight.mT
    along = torch.where(values > 0, (rows @ weight.mT).square().sum(-1), 0.0).flatten()
    entries, total = weight.shape[:-2].numel() * d**2, weight.sum(-1).square().sum()
    return AgopSpectrum(
        values.flatten() / values.amax(), along, rows.sum(-1).flatten(), small.square().sum(), total, entries
    )


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
