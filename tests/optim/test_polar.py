"""The polar factor against SciPy: every shape, conditioning, precision and method."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
import reference
from cases import normal, randoms, refused
from gramscope.errors import NumericalError
from gramscope.optim.polar import by_products, newton_schulz

METHODS = ("auto", "svd", "products")
sizes = st.integers(1, 24)


def polar(A: Tensor, method: str) -> Tensor:
    """By a method of ``gs.polar``, or by the products that accelerators take."""
    if method != "products":
        return gs.polar(A, method)
    return by_products(A) if A.shape[-2] >= A.shape[-1] else by_products(A.mT).mT


def with_condition(m: int, n: int, decades: float, seed: int) -> Tensor:
    """A random matrix with singular values from 1 down to 10^−decades."""
    generator = torch.Generator().manual_seed(seed)
    r = min(m, n)
    U, V = (torch.linalg.qr(torch.randn(x, r, generator=generator, dtype=torch.float64))[0] for x in (m, n))
    return (U * torch.logspace(0, -decades, r, dtype=torch.float64)) @ V.mT


def orthonormality_error(Q: Tensor) -> float:
    Q = Q.double()
    G = Q.mT @ Q if Q.shape[-2] >= Q.shape[-1] else Q @ Q.mT
    return float((G - torch.eye(G.shape[-1], dtype=G.dtype)).abs().max())


@pytest.mark.parametrize("method", METHODS)
@given(m=sizes, n=sizes, decades=st.floats(0, 9), seed=st.integers(0, 10**6), scale=st.sampled_from([1e-30, 1.0, 1e25]))
def test_matches_the_singular_value_decomposition(
    method: str, m: int, n: int, decades: float, seed: int, scale: float
) -> None:
    A = with_condition(m, n, decades, seed)
    Q = polar(A * scale, method)
    assert orthonormality_error(Q) < 1e-13
    torch.testing.assert_close(Q, reference.polar_factor(A), atol=1e-13 * 10**decades, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@given(m=sizes, n=sizes, decades=st.floats(0, 3), seed=st.integers(0, 10**6))
def test_float32(method: str, m: int, n: int, decades: float, seed: int) -> None:
    A = with_condition(m, n, decades, seed).float()
    Q = polar(A, method)
    assert Q.dtype == torch.float32
    assert orthonormality_error(Q) < 2e-6
    torch.testing.assert_close(Q.double(), reference.polar_factor(A), atol=3e-6 * 10**decades, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_large_square_and_ill_conditioned(method: str) -> None:
    W = normal(256, 256, seed=3)
    for A in (W @ W.mT, with_condition(256, 256, 10, 1)):
        assert orthonormality_error(polar(A, method)) < 1e-13
    Q = polar(W.float(), method).double()  # orthonormal to rounding in float32
    assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(256, dtype=torch.float64), 2) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@given(m=sizes, n=sizes, rank=st.integers(0, 10), seed=st.integers(0, 10**6))
def test_rank_deficient_is_completed_towards_the_identity(method: str, m: int, n: int, rank: int, seed: int) -> None:
    L, R = randoms((m, rank), (rank, n), seed=seed)
    A = L @ R
    Q = polar(A, method)
    assert orthonormality_error(Q) < 1e-12
    # A polar factor: QᵀA symmetric positive semi-definite.
    H = Q.mT @ A if m >= n else A @ Q.mT
    torch.testing.assert_close(H, H.mT, atol=1e-11, rtol=0)
    assert torch.linalg.eigvalsh(H).min() > -1e-11
    # Of all of them, the one nearest to the identity.
    identity = torch.eye(m, n, dtype=torch.float64)
    assert (Q - identity).norm() < (reference.polar_factor(A) - identity).norm() + 1e-10


def test_completion_towards_a_given_isometry() -> None:
    A = with_condition(7, 4, 1, 0)
    A[:, 2:] = 0
    T = torch.linalg.qr(with_condition(7, 4, 0, 5))[0]
    Q = gs.polar(A, toward=T)
    assert orthonormality_error(Q) < 1e-13
    for seed in range(20):
        Z = torch.linalg.qr(with_condition(2, 2, 0, seed))[0]
        other = Q.clone()
        other[:, 2:] = Q[:, 2:] @ Z
        assert (Q - T).norm() <= (other - T).norm() + 1e-12


def test_large_rank_deficient_matrices_are_recognised() -> None:
    L, R = randoms((100, 60), (60, 100))
    for dtype in (torch.float32, torch.float64):
        A = L.to(dtype) @ R.to(dtype)
        assert newton_schulz(A[None])[1] is not None
        torch.testing.assert_close(by_products(A), gs.polar(A, "svd"), atol=1e3 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_the_matrices_one_by_one(method: str) -> None:
    A = torch.stack([with_condition(9, 5, decades, decades) for decades in range(6)]).reshape(2, 3, 9, 5)
    Q = polar(A, method)
    assert Q.shape == A.shape
    torch.testing.assert_close(Q, torch.stack([gs.polar(a, "svd") for a in A.flatten(0, 1)]).reshape(A.shape))
    torch.testing.assert_close(polar(A.mT, method), Q.mT)


def test_newton_schulz_falls_back_only_where_it_must() -> None:
    A = torch.stack([with_condition(6, 6, 2, seed) for seed in range(3)])
    A[1, :, 0] = 0
    deficient = newton_schulz(A)[1]
    assert deficient is not None
    assert deficient.tolist() == [False, True, False]
    assert newton_schulz(A[::2])[1] is None
    torch.testing.assert_close(by_products(A), gs.polar(A, "svd"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    A = with_condition(12, 8, 2, 0).to(dtype)
    assert torch.equal(gs.polar(A), gs.polar(A.float()).to(dtype))


def test_input_is_not_changed_and_empty_is_allowed() -> None:
    A = with_condition(5, 4, 1, 0)
    before = A.clone()
    for method in METHODS:
        polar(A, method)
    assert torch.equal(A, before)
    assert gs.polar(torch.zeros(0, 3, 3)).shape == (0, 3, 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(method: str, bad: float) -> None:
    A = torch.eye(3)
    A[1, 1] = bad
    refused(polar, A, method, match="NaN", error=NumericalError)


def test_bad_arguments() -> None:
    refused(gs.polar, torch.eye(2), "qr", match="'qr'; choose one of 'auto', 'svd'")
    refused(gs.polar, torch.ones(3), match="shape \\(3,\\)")
    refused(gs.polar, [[1.0, 2.0]], match="polar needs a tensor, got list")
    refused(gs.polar, torch.ones(3, 3, dtype=torch.complex64), match="complex64")
