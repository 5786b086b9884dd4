"""The nearest matrix with a given Gram against SciPy's orthogonal Procrustes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from cases import refused
from gramscope.errors import NumericalError
from gramscope.optim.procrustes import nearest_with_gram

METHODS = ("auto", "svd")
SHAPES = ((12, 30), (16, 16), (30, 12), (17, 16), (40, 12), (1, 7), (7, 1), (40, 200))


def pair(k: int, d: int, decades: float, change: float, seed: int) -> tuple[Tensor, Tensor]:
    """Float32 weights with singular values over ``decades`` and a neighbour at relative distance ``change``."""
    generator = torch.Generator().manual_seed(seed)
    r = min(k, d)
    U, V = (torch.linalg.qr(torch.randn(x, r, generator=generator, dtype=torch.float64))[0] for x in (k, d))
    W1 = ((U * torch.logspace(0, -decades, r, dtype=torch.float64)) @ V.mT).float()
    D = torch.randn(k, 2, generator=generator) @ torch.randn(2, d, generator=generator)
    D = D + 0.3 * torch.randn(k, d, generator=generator)
    return W1, W1 + D * (change * W1.norm() / D.norm())


def gram_error(X: Tensor, W: Tensor) -> float:
    G, wanted = (Z.double().mT @ Z.double() for Z in (X, W))
    return float((G - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("method", METHODS)
@given(
    shape=st.sampled_from(SHAPES),
    decades=st.floats(0, 9),
    change=st.sampled_from([0.0, 1e-5, 1e-3, 1e-2, 0.3, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_has_the_gram_and_is_nearest(
    method: str, shape: tuple[int, int], decades: float, change: float, seed: int
) -> None:
    W1, W2 = pair(*shape, decades, change, seed)
    X = nearest_with_gram(W1, W2, method)
    assert X.dtype == torch.float32
    assert gram_error(X, W2) < 2e-7
    wanted = reference.nearest_with_gram(W1, W2)
    if method == "auto":  # large steps are exact, small ones never longer than the proposal
        most = (wanted - W1).norm() if change > 0.2 else (W2.double() - W1).norm()
        assert (X.double() - W1).norm() <= (1 + 1e-5) * most + 1e-7 * W2.norm()
        return
    assert (X.double() - W1).norm() < (wanted - W1).norm() + 1e-7 * W2.norm()
    if decades <= 6:  # beyond, W1 W2ᵀ leaves the solution undetermined even in float64
        torch.testing.assert_close(X.double(), wanted, atol=1e-6 * float(W2.norm()), rtol=0)


@pytest.mark.parametrize("change", [5e-4, 2e-2, 0.1])
@pytest.mark.parametrize("shape", [(64, 576), (128, 128), (100, 150), (150, 100), (300, 60), (48, 48)])
def test_the_distance_is_within_the_tolerance(shape: tuple[int, int], change: float) -> None:
    generator = torch.Generator().manual_seed(0)
    W1 = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    D = torch.randn(shape[0], 8, generator=generator) @ torch.randn(8, shape[1], generator=generator)
    W2 = W1 + D * (change * W1.norm() / D.norm())
    least = (reference.nearest_with_gram(W1, W2) - W1).norm()
    X = nearest_with_gram(W1, W2)
    assert gram_error(X, W2) < 2e-7
    assert (X.double() - W1).norm() <= (1.02 + 2 * change**2) * least  # what an equation of first order leaves out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-20, 1e-17, 1e17, 1e20, 1e30])
def test_extreme_scales(shape: tuple[int, int], scale: float) -> None:
    """Scaling by a power of two changes nothing but the scale."""
    W1, W2 = pair(*shape, 1, 1e-3, 0)
    power = 2.0 ** round(torch.tensor(scale).log2().item())
    X = nearest_with_gram(power * W1, power * W2)
    torch.testing.assert_close(X / power, nearest_with_gram(W1, W2), atol=1e-6 * float(W2.norm()), rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rank_deficient_products_keep_the_gram_exact(method: str, shape: tuple[int, int]) -> None:
    k, d = shape
    W1, W2 = pair(k, d, 0, 0.1, 0)
    dead_rows, dead_columns, low_rank = W1.clone(), W1.clone(), W1[:, :1] @ W1[:1]
    dead_rows[: k // 2] = 0
    dead_columns[:, : d // 2] = 0
    for old in (dead_rows, dead_columns, low_rank, torch.zeros_like(W1)):
        for new in (W2, old, torch.zeros_like(W1), old + 1e-4 * W2):
            X = nearest_with_gram(old, new, method)
            wanted = new.double().mT @ new.double()
            assert (X.double().mT @ X.double() - wanted).norm() < 2e-7 * wanted.norm() + 1e-30
            least = (reference.nearest_with_gram(old, new) - old).norm()
            assert (X.double() - old).norm() <= (1.05 if method == "auto" else 1) * least + 1e-6 * (
                old.norm() + new.norm()
            )
    # with nothing to be near to, the proposal is taken as it is
    torch.testing.assert_close(nearest_with_gram(torch.zeros_like(W1), W2, method), W2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_change_comes_back_unchanged(method: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    W = pair(*shape, 3, 0, 0)[0].to(dtype)
    X = nearest_with_gram(W, W, method)
    assert X.dtype == dtype
    assert float((X - W).norm()) <= (0 if dtype != torch.float64 else 1e-12) * float(W.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_stacks_are_the_matrices_one_by_one(shape: tuple[int, int]) -> None:
    pairs = [pair(*shape, 1, 10.0**-seed, seed) for seed in range(4)]
    W1, W2 = (torch.stack(x).reshape(2, 2, *shape) for x in zip(*pairs, strict=True))
    for method in METHODS:
        X = nearest_with_gram(W1, W2, method).flatten(0, 1)
        for x, (old, new) in zip(X, pairs, strict=True):
            torch.testing.assert_close(x, nearest_with_gram(old, new, method), atol=3e-7 * float(new.norm()), rtol=0)


def test_half_turns_and_steps_of_many_times_the_weights() -> None:
    W = pair(12, 30, 1, 0, 0)[0]
    torch.testing.assert_close(nearest_with_gram(-W, W), -W, atol=1e-6, rtol=0)
    for factor in (2.5, -1.5, 10.0):
        torch.testing.assert_close(nearest_with_gram(W, factor * W), abs(factor) * W, atol=1e-5, rtol=0)


def test_what_is_a_reflection_for_scipy_costs_little_as_a_rotation(generator: torch.Generator) -> None:
    """A small step that changes the sign of the smallest singular value: the best rotation keeps that direction as it is."""
    U, V = (torch.linalg.qr(torch.randn(24, 24, generator=generator))[0] for _ in range(2))
    sizes = torch.linspace(1, 0.2, 24)
    W1 = (U * torch.cat([sizes[:-1], torch.tensor([1e-3])])) @ V.mT
    W2 = (U * torch.cat([sizes[:-1], torch.tensor([-1e-3])])) @ V.mT
    X = nearest_with_gram(W1, W2)
    assert gram_error(X, W2) < 2e-7
    assert (X - W1).norm() <= 1.001 * (W2 - W1).norm()
    assert (reference.nearest_with_gram(W1, W2) - W1).norm() < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_entries_too_large_for_the_type_raise(method: str) -> None:
    """Two columns of length 65,600 are turned to the axes; the largest number is 65,504."""
    along, across = 64900.0, math.sqrt(65600.0**2 - 64900.0**2)
    W = torch.tensor([[along, -across], [across, along]], dtype=torch.float16)
    target = torch.tensor([[65000.0, 0.0], [0.0, 65000.0]], dtype=torch.float16)
    refused(nearest_with_gram, target, W, method, match="too large for torch.float16", error=NumericalError)


def test_a_rotation_that_is_not_orthogonal_is_left_to_the_polar_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.optim.rotation.MOST_POLISHES", 0)
    W1, W2 = pair(12, 30, 0, 0.15, 0)
    assert gram_error(nearest_with_gram(W1, W2), W2) < 2e-7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_entries_that_are_not_finite_raise(which: int, bad: float) -> None:
    for method in METHODS:
        matrices = list(pair(6, 9, 0, 1e-3, 0))
        matrices[which][2, 3] = bad
        refused(nearest_with_gram, *matrices, method, match="NaN or infinite entries", error=NumericalError)


def test_the_source_is_not_changed_and_reduced_precision_is_not_used() -> None:
    W1, W2 = pair(12, 30, 0, 1e-2, 0)
    before = W2.clone()
    allowed = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        X = nearest_with_gram(W1, W2)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = allowed
    assert torch.equal(W2, before)
    assert gram_error(X, W2) < 2e-7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("change", [5e-4, 2e-2, 0.09, 0.15])
@pytest.mark.parametrize("shape", [(256, 1024), (256, 256), (600, 100), (64, 576)])
def test_cuda_gives_the_gram_and_the_distance(shape: tuple[int, int], change: float, allow_tf32: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    try:
        for seed in range(6):
            W1 = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[1] ** 0.5
            W2 = W1 + change * torch.randn(shape, generator=torch.Generator().manual_seed(99 + seed)) / shape[1] ** 0.5
            X = nearest_with_gram(W1.cuda(), W2.cuda()).cpu()
            assert gram_error(X, W2) < 2e-7
            least = (reference.nearest_with_gram(W1, W2) - W1).norm()
            assert (X.double() - W1).norm() < (1.02 + 2 * change**2) * least
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
