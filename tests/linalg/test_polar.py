"""The polar factor against SciPy: every shape, conditioning, precision and method."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
import reference
from gramscope.errors import InputError, NumericalError, RescueWarning
from gramscope.linalg.newton_schulz import newton_schulz

METHODS = ("auto", "svd", "newton-schulz")
sizes = st.integers(1, 24)


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
    Q = gs.polar(A * scale, method)
    assert orthonormality_error(Q) < 1e-13
    torch.testing.assert_close(Q, reference.polar_factor(A), atol=1e-13 * 10**decades, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@given(m=sizes, n=sizes, decades=st.floats(0, 3), seed=st.integers(0, 10**6))
def test_float32(method: str, m: int, n: int, decades: float, seed: int) -> None:
    A = with_condition(m, n, decades, seed).float()
    Q = gs.polar(A, method)
    assert Q.dtype == torch.float32
    assert orthonormality_error(Q) < 2e-6
    torch.testing.assert_close(Q.double(), reference.polar_factor(A), atol=3e-6 * 10**decades, rtol=0)


def square_product() -> Tensor:
    W = torch.randn(256, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return W @ W.mT


@pytest.mark.parametrize("method", METHODS)
def test_large_square_and_ill_conditioned(method: str) -> None:
    for A in (square_product(), with_condition(256, 256, 10, 1)):
        assert orthonormality_error(gs.polar(A, method)) < 1e-13


def test_ten_quintic_iterations_from_frobenius_scaling_do_not_converge() -> None:
    """What the convergence test is for: the published iteration, on the product a square layer has."""
    X = square_product()
    X = X / X.norm()
    for _ in range(10):
        G = X @ X.mT
        X = (15 * X - 10 * G @ X + 3 * G @ G @ X) / 8
    unfinished = (torch.linalg.svdvals(X) < 0.99).double().mean()
    assert 0.1 < unfinished < 0.3


@pytest.mark.parametrize("method", METHODS)
@given(m=sizes, n=sizes, rank=st.integers(0, 10), seed=st.integers(0, 10**6))
@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
def test_rank_deficient_is_completed_towards_the_identity(method: str, m: int, n: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(m, rank, generator=generator, dtype=torch.float64) @ torch.randn(
        rank, n, generator=generator, dtype=torch.float64
    )
    Q = gs.polar(A, method)
    assert orthonormality_error(Q) < 1e-12
    # A polar factor: QᵀA symmetric positive semi-definite.
    H = Q.mT @ A if m >= n else A @ Q.mT
    torch.testing.assert_close(H, H.mT, atol=1e-11, rtol=0)
    assert torch.linalg.eigvalsh(H).min() > -1e-11
    # Of all of them, the one nearest to the identity.
    identity = torch.eye(m, n, dtype=torch.float64)
    assert (Q - identity).norm() < (reference.polar_factor(A) - identity).norm() + 1e-10


@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
@pytest.mark.parametrize("method", METHODS)
def test_null_space_is_left_alone(method: str) -> None:
    assert torch.equal(gs.polar(torch.zeros(3, 5), method), torch.eye(3, 5))
    W = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gs.polar(W @ W.mT, method), torch.eye(6, dtype=torch.float64))


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
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        A = torch.randn(100, 60, generator=generator, dtype=dtype) @ torch.randn(
            60, 100, generator=generator, dtype=dtype
        )
        assert newton_schulz(A[None])[1] is not None
        with pytest.warns(RescueWarning):
            Q = gs.polar(A, "newton-schulz")
        torch.testing.assert_close(Q, gs.polar(A, "svd"), atol=1e3 * torch.finfo(dtype).eps, rtol=0)


def test_float32_is_orthonormal_to_rounding() -> None:
    A = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for method in METHODS:
        Q = gs.polar(A, method).double()
        assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(256, dtype=torch.float64), 2) < 1e-6


@given(m=sizes, n=sizes, seed=st.integers(0, 10**6))
def test_is_the_nearest_orthonormal_matrix(m: int, n: int, seed: int) -> None:
    A = with_condition(m, n, 1, seed)
    distance = (gs.polar(A) - A).norm()
    for other in range(5):
        Z = gs.polar(with_condition(m, n, 1, seed + 1 + other))
        assert distance <= (Z - A).norm() + 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_the_matrices_one_by_one(method: str) -> None:
    A = torch.stack([with_condition(9, 5, decades, decades) for decades in range(6)]).reshape(2, 3, 9, 5)
    Q = gs.polar(A, method)
    assert Q.shape == A.shape
    torch.testing.assert_close(Q, torch.stack([gs.polar(a, "svd") for a in A.flatten(0, 1)]).reshape(A.shape))
    torch.testing.assert_close(gs.polar(A.mT, method), Q.mT)


def test_newton_schulz_falls_back_only_where_it_must() -> None:
    A = torch.stack([with_condition(6, 6, 2, seed) for seed in range(3)])
    A[1, :, 0] = 0
    deficient = newton_schulz(A)[1]
    assert deficient is not None
    assert deficient.tolist() == [False, True, False]
    assert newton_schulz(A[::2])[1] is None
    with pytest.warns(RescueWarning, match="1 of 3 matrices of shape \\(6, 6\\)"):
        Q = gs.polar(A, "newton-schulz")
    torch.testing.assert_close(Q, gs.polar(A, "svd"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    A = with_condition(12, 8, 2, 0).to(dtype)
    assert torch.equal(gs.polar(A), gs.polar(A.float()).to(dtype))


@pytest.mark.parametrize("method", ["svd", "newton-schulz"])
def test_is_differentiable_at_full_rank(method: str) -> None:
    A = with_condition(5, 3, 0.5, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gs.polar(x, method), A)


def test_input_is_not_changed_and_empty_is_allowed() -> None:
    A = with_condition(5, 4, 1, 0)
    before = A.clone()
    for method in METHODS:
        gs.polar(A, method)
    assert torch.equal(A, before)
    assert gs.polar(torch.zeros(0, 3, 3)).shape == (0, 3, 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(method: str, bad: float) -> None:
    A = torch.eye(3)
    A[1, 1] = bad
    with pytest.raises(NumericalError, match="NaN"):
        gs.polar(A, method)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="'qr'; choose one of 'auto', 'svd', 'newton-schulz'"):
        gs.polar(torch.eye(2), "qr")
    with pytest.raises(InputError, match="shape \\(3,\\)"):
        gs.polar(torch.ones(3))
    with pytest.raises(InputError, match="complex64"):
        gs.polar(torch.ones(3, 3, dtype=torch.complex64))


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5)])
@pytest.mark.parametrize("method", ["svd", "newton-schulz"])
def test_gradient_where_singular_values_are_equal(shape: tuple[int, int], method: str) -> None:
    A = (2 * torch.eye(*shape, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: gs.polar(X, method), A)
    stack = torch.stack([A.detach(), A.detach() + torch.full(shape, 0.1, dtype=torch.float64)]).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: gs.polar(X, method), stack)


def test_polar_of_no_tensor() -> None:
    with pytest.raises(InputError, match="polar needs a tensor, got list"):
        gs.polar([[1.0, 2.0]])  # type: ignore[arg-type]
