"""Cosines and the neural feature ansatz against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
import reference
from cases import randoms, refused
from gramscope.errors import ResultWarning
from gramscope.linalg.factored import FactoredGram
from gramscope.measures.alignment import corrupted, double_centered_ratio


def kernel(k: int, seed: int) -> Tensor:
    (J,) = randoms((k + 2, k), seed=seed)
    return J.T @ J / (k + 2)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 2), (5,)])
def test_cosine_of_dense_matrices(shape: tuple[int, ...], center: bool) -> None:
    A, B = randoms(shape, shape)
    assert torch.allclose(gs.cosine(A + 1, B, center), reference.correlation(A + 1, B, center))
    assert torch.allclose(
        gs.cosine((A + 1).float(), B.float(), center), reference.correlation(A + 1, B, center), atol=1e-6
    )


@pytest.mark.parametrize("center", [False, True])
def test_cosine_of_factors(center: bool) -> None:
    U, V, X, Y = randoms((2, 5), (2, 5), (3, 5), (3, 5))
    A, B = FactoredGram(U, V), FactoredGram(X, Y)
    expected = reference.correlation(A.dense(), B.dense(), center)
    for one, two in ((A, B), (A, B.dense()), (A.dense(), B)):
        assert torch.allclose(gs.cosine(one, two, center), expected)


def test_cosine_with_nothing_is_nan() -> None:
    A = torch.ones(2, 2)
    assert gs.cosine(A, torch.zeros(2, 2)).isnan()
    assert gs.cosine(torch.eye(2), 0.1 * A, center=True).isnan()
    assert not gs.cosine(torch.eye(2), A).isnan()
    assert gs.nfa(A, torch.eye(2), A, kind="centered").isnan()  # at initialisation


def dense_nfa(W: Tensor, K: Tensor, center: bool, power: float = 1.0) -> Tensor:
    G = W.T @ K @ W
    return reference.correlation(W.T @ W, G if power == 1 else reference.power_of(G, power), center)


@given(st.integers(1, 6), st.integers(2, 6), st.booleans(), st.integers(0, 4))
def test_all_kinds_equal_the_dense_form(k: int, d: int, center: bool, seed: int) -> None:
    W, W0 = randoms((k, d), (k, d), seed=seed)
    K, Kc = kernel(k, seed + 1), kernel(k, seed + 2)

    def close(value: Tensor, expected: Tensor) -> bool:
        return torch.allclose(value, expected, atol=1e-9)

    assert close(gs.nfa(W, K, center=center), dense_nfa(W, K, center))
    assert close(gs.nfa(W, K, W0, kind="centered", center=center), dense_nfa(W - W0, K, center))
    assert close(gs.nfa(W, K, W0, Kc, kind="double", center=center), dense_nfa(W - W0, Kc, center))
    assert close(gs.nfa(W, K, W0, Kc, kind="ptk", center=center), dense_nfa(W0, Kc, center))
    bar = W - W0
    F = bar.T @ bar
    expected = torch.trace(F @ bar.T @ Kc @ bar) / torch.trace(F @ bar.T @ K @ bar)
    assert close(double_centered_ratio(W, K, W0, Kc), expected)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("k", "d"), [(3, 7), (7, 3), (4, 4)])
@pytest.mark.parametrize("power", [0.5, 0.25, 2.0])
def test_powers_equal_the_dense_form(k: int, d: int, power: float, center: bool) -> None:
    W, J = randoms((k, d), (2, k))
    for K in (kernel(k, 1), J.T @ J):  # of full rank and of rank two
        assert torch.allclose(gs.nfa(W, K, center=center, power=power), dense_nfa(W, K, center, power), atol=1e-9)


def test_grouped_weights_count_as_one_matrix() -> None:
    W = torch.stack(randoms((3, 5), (3, 5)))
    K = torch.stack([kernel(3, 1), kernel(3, 2)])
    blocks, big = torch.block_diag(*W), torch.block_diag(*K)
    assert torch.allclose(gs.nfa(W, K), dense_nfa(blocks, big, False))
    assert torch.allclose(gs.nfa(W, K, power=0.5), dense_nfa(blocks, big, False, 0.5))
    assert torch.allclose(gs.nfa(W.mT, torch.eye(5).expand(2, 5, 5)), torch.ones((), dtype=torch.float64))


def test_what_a_kind_needs_is_named() -> None:
    W, K = torch.ones(2, 3), torch.eye(2)
    refused(gs.nfa, W, K, kind="centered", match="needs W0")
    refused(gs.nfa, W, K, W, kind="ptk", match="needs K_centered")
    refused(gs.nfa, W, K, kind="other", match="kind must be")
    refused(gs.nfa, W, torch.eye(3), match=r"K has shape \(3, 3\)")
    refused(gs.cosine, torch.eye(2), torch.eye(3), match="one shape")
    refused(gs.cosine, FactoredGram.gram(W.double()), torch.eye(2), match="one shape")
    refused(gs.cosine, torch.eye(2), torch.full((2, 2), float("nan")), match="NaN")
    refused(gs.nfa, W.to("meta"), K, match="W lies on the meta device")
    refused(corrupted, torch.ones(2, 3), torch.Generator(), match="square")


def test_corruption_keeps_the_spectrum_and_nothing_else(generator: torch.Generator) -> None:
    K = torch.stack([kernel(4, 0), kernel(4, 1)])
    Q = corrupted(K, generator)
    assert torch.allclose(torch.linalg.eigvalsh(Q), torch.linalg.eigvalsh(K))
    assert not torch.allclose(Q, K)
    assert torch.allclose(Q, Q.mT)
    assert torch.equal(Q, corrupted(K, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e30, 1e100])
@pytest.mark.parametrize("center", [False, True])
def test_correlations_do_not_depend_on_scales(scale: float, center: bool) -> None:
    A, B, W, W0 = randoms((6, 6), (6, 6), (4, 6), (4, 6))
    K, Kc = kernel(4, 1), kernel(4, 2)
    for one, two in ((A, B), (FactoredGram.gram(W), FactoredGram.gram(W0)), (FactoredGram.gram(W), B)):
        expected = gs.cosine(one, two, center)
        big = FactoredGram(one.left * scale, one.right) if isinstance(one, FactoredGram) else one * scale
        other = FactoredGram(two.left, two.right * scale) if isinstance(two, FactoredGram) else two * scale
        torch.testing.assert_close(gs.cosine(big, other, center), expected, rtol=1e-12, atol=1e-12)
    for V in (W, W.T[:, :3]):
        kernels = K if V is W else kernel(6, 3)
        for power in (1.0, 0.5):
            expected = gs.nfa(V, kernels, center=center, power=power)
            found = gs.nfa(V * scale, kernels / scale, center=center, power=power)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gs.nfa(W * scale, K, W0 * scale, Kc * scale, kind="double"), gs.nfa(W, K, W0, Kc, kind="double")
    )
    ratio = double_centered_ratio(W * scale, K / scale, W0 * scale, Kc / scale)
    torch.testing.assert_close(ratio, double_centered_ratio(W, K, W0, Kc), rtol=1e-12, atol=0.0)


def test_an_initial_weight_that_moved_along_is_announced() -> None:
    layer = torch.nn.Linear(3, 2)
    W0 = layer.weight.detach()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.warns(ResultWarning, match=r"W0 shares its memory with W .*W.detach\(\).clone\(\)"):
        assert gs.nfa(layer.weight, torch.eye(2), W0, kind="centered").isnan()
