"""Cosines and the neural feature ansatz against dense matrices."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import gramscope as gs
import reference
from cases import normal, randoms, refused
from gramscope.errors import NumericalError, ResultWarning
from gramscope.linalg.gram import Dense, Factor
from gramscope.linalg.psd import random_orthogonal
from gramscope.measures.alignment import agop_spectrum, corrupted, double_centered_ratio
from gramscope.measures.column import exact_ansatz


def kernel(k: int, seed: int) -> Tensor:
    (J,) = randoms((k + 2, k), seed=seed)
    return J.T @ J / (k + 2)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 2), (5,)])
def test_cosine_of_arrays(shape: tuple[int, ...], center: bool) -> None:
    A, B = randoms(shape, shape)
    expected = float(reference.correlation(A + 1, B, center))
    assert gs.cosine(A + 1, B, center) == pytest.approx(expected)
    assert gs.cosine((A + 1).float(), B.float(), center) == pytest.approx(expected, abs=1e-6)


def test_cosine_with_nothing_is_nan() -> None:
    A = torch.ones(2, 2)
    assert math.isnan(gs.cosine(A, torch.zeros(2, 2)))
    assert math.isnan(gs.cosine(torch.eye(2), 0.1 * A, center=True))
    assert not math.isnan(gs.cosine(torch.eye(2), A))
    assert math.isnan(gs.nfa(A, torch.eye(2), A, kind="centered"))  # at initialisation
    for d in range(3, 12):  # of equal entries rounding leaves a variance
        constant, eye = torch.full((1, d, d), 0.1, dtype=torch.float64), torch.eye(d, dtype=torch.float64)[None]
        assert math.isnan(gs.cosine(Dense(constant), Dense(eye), center=True))


def dense_nfa(W: Tensor, K: Tensor, center: bool, power: float = 1.0) -> float:
    G = W.T @ K @ W
    return float(reference.correlation(W.T @ W, G if power == 1 else reference.power_of(G, power), center))


@given(st.integers(1, 6), st.integers(2, 6), st.booleans(), st.integers(0, 4))
def test_all_kinds_equal_the_dense_form(k: int, d: int, center: bool, seed: int) -> None:
    W, W0 = randoms((k, d), (k, d), seed=seed)
    K, Kc = kernel(k, seed + 1), kernel(k, seed + 2)
    close = partial(pytest.approx, abs=1e-9)
    assert gs.nfa(W, K, center=center) == close(dense_nfa(W, K, center))
    assert gs.nfa(W, K, W0, kind="centered", center=center) == close(dense_nfa(W - W0, K, center))
    assert gs.nfa(W, K, W0, Kc, kind="double", center=center) == close(dense_nfa(W - W0, Kc, center))
    assert gs.nfa(W, K, W0, Kc, kind="ptk", center=center) == close(dense_nfa(W0, Kc, center))
    bar = W - W0
    F = bar.T @ bar
    expected = float(torch.trace(F @ bar.T @ Kc @ bar) / torch.trace(F @ bar.T @ K @ bar))
    assert double_centered_ratio(W, K, W0, Kc) == pytest.approx(expected, rel=1e-7)
    for at_inputs in (False, True):
        part = W.T @ K @ W if at_inputs else K
        assert exact_ansatz(Factor(W), part[None], at_inputs).value(center) == close(dense_nfa(W, K, center))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("k", "d"), [(3, 7), (7, 3), (4, 4)])
@pytest.mark.parametrize("power", [0.5, 0.25, 2.0])
def test_powers_equal_the_dense_form(k: int, d: int, power: float, center: bool) -> None:
    W, J = randoms((k, d), (2, k))
    for K in (kernel(k, 1), J.T @ J):  # of full rank and of rank two
        assert gs.nfa(W, K, center=center, power=power) == pytest.approx(dense_nfa(W, K, center, power), abs=1e-9)


def test_grouped_weights_count_as_one_matrix() -> None:
    W = torch.stack(randoms((3, 5), (3, 5)))
    K = torch.stack([kernel(3, 1), kernel(3, 2)])
    blocks, big = torch.block_diag(*W), torch.block_diag(*K)
    assert gs.nfa(W, K) == pytest.approx(dense_nfa(blocks, big, False))
    assert gs.nfa(W, K, power=0.5) == pytest.approx(dense_nfa(blocks, big, False, 0.5))
    assert gs.nfa(W.mT, torch.eye(5).expand(2, 5, 5)) == pytest.approx(1.0)


def test_what_a_kind_needs_is_named() -> None:
    W, K = torch.ones(2, 3), torch.eye(2)
    refused(gs.nfa, W, K, kind="centered", match="needs W0")
    refused(gs.nfa, W, K, W, kind="ptk", match="needs K_centered")
    refused(gs.nfa, W, K, kind="other", match="kind must be")
    refused(gs.nfa, W, torch.eye(3), match=r"K has shape \(3, 3\)")
    refused(gs.cosine, torch.eye(2), torch.eye(3), match="one shape")
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


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_correlations_do_not_depend_on_scales(scale: float) -> None:
    W, W0 = randoms((4, 6), (4, 6))
    K, Kc = kernel(4, 1), kernel(4, 2)
    for power in (1.0, 0.5):
        assert gs.nfa(W * scale, K / scale, power=power, center=True) == pytest.approx(
            gs.nfa(W, K, power=power, center=True)
        )
    ratio = double_centered_ratio(W * scale, K / scale, W0 * scale, Kc / scale)
    assert ratio == pytest.approx(double_centered_ratio(W, K, W0, Kc))
    with pytest.raises(NumericalError, match="has entries up to .*e.1"):
        gs.nfa(W * 1e100, K)


@pytest.mark.parametrize("center", [False, True])
def test_null_is_what_random_eigenvectors_give(center: bool) -> None:
    W, root = randoms((12, 20), (12, 12), seed=3)
    W = W * torch.linspace(0.2, 3.0, 12, dtype=torch.float64)[:, None]
    K = root @ root.mT
    generator = torch.Generator().manual_seed(0)
    draws = [gs.nfa(W, corrupted(K, generator), center=center) for _ in range(400)]
    # A quotient of expectations stands for the expectation of the quotient.
    assert exact_ansatz(Factor(W), K[None]).null(center) == pytest.approx(sum(draws) / 400, abs=0.02)
    tall = exact_ansatz(Factor(W.T), (W.T @ W @ W.T @ W)[None])  # of K only its part in the column space counts
    small = exact_ansatz(Factor(W.T), (W @ W.T @ W @ W.T @ W @ W.T)[None], at_inputs=True)
    assert tall.null(center) == pytest.approx(small.null(center))
    aligned = W @ W.T
    assert exact_ansatz(Factor(W), aligned[None]).null(center) < gs.nfa(W, aligned, center=center) - 0.05


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5)])
def test_the_best_power(shape: tuple[int, int]) -> None:
    W, J = randoms((shape), (30, shape[0]))
    K = J.T @ J * torch.outer(*2 * [torch.arange(1.0, shape[0] + 1).double()])
    spectrum = agop_spectrum(W, K)
    best = minimize_scalar(
        lambda p: -dense_nfa(W, K, False, p), bounds=(1 / 64, 4), method="bounded", options={"xatol": 1e-9}
    )
    assert spectrum.best_power() == pytest.approx(best.x, rel=1e-5)
    assert spectrum.alignment(spectrum.best_power()) == pytest.approx(-best.fun, rel=1e-9)
    assert agop_spectrum(1e-30 * W, 1e30 * K).best_power() == pytest.approx(spectrum.best_power(), rel=1e-9)
    assert math.isnan(agop_spectrum(W, 0 * K).best_power())


@pytest.mark.parametrize("power", [1 / 32, 3.9])
def test_powers_near_the_ends_of_the_search_are_found(power: float) -> None:
    s = torch.linspace(0.9, 1.1, 5, dtype=torch.float64)
    assert agop_spectrum(s.diag(), (s ** (2 / power - 2)).diag()).best_power() == pytest.approx(power, rel=1e-4)


def test_balanced_linear_nets_have_power_one_over_depth() -> None:
    """With W₃W₂W₁ balanced, the AGOP below layer ℓ is (W_ℓᵀW_ℓ)^(4−ℓ)."""
    bases = [random_orthogonal(5, torch.Generator().manual_seed(i)) for i in range(4)]
    s = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.2], dtype=torch.float64)
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).double()
    for layer, low, high in zip(net, bases, bases[1:], strict=False):
        layer.weight.data = (high * s) @ low.T
    table = gs.measure(net, (normal(20, 5), normal(20, 5)), measures=["nfa_depth", "nfa_power", "nfa_fitted", "nfa"])
    for layer, depth in (("0", 3), ("1", 2), ("2", 1)):
        assert table[layer]["nfa_depth"] == pytest.approx(1.0)
        assert table[layer]["nfa_fitted"] == pytest.approx(1.0)
        assert table[layer]["nfa_power"] == pytest.approx(1 / depth, rel=1e-3)
    assert table["0"]["nfa"] < 0.95


def test_rounding_of_single_precision_is_no_direction() -> None:
    W, J = normal(6, 8), normal(30, 3, seed=1) @ normal(3, 6, seed=2)
    noise = normal(6, 6, seed=3)
    K = J.T @ J
    noisy = K + 1e-9 * K.norm() * (noise + noise.T)
    assert agop_spectrum(W.float(), noisy).alignment(0.1) == pytest.approx(dense_nfa(W, K, False, 0.1), abs=1e-5)


def test_an_initial_weight_that_moved_along_is_announced() -> None:
    layer = torch.nn.Linear(3, 2)
    W0 = layer.weight.detach()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.warns(ResultWarning, match=r"W0 shares its memory with W .*W.detach\(\).clone\(\)"):
        assert math.isnan(gs.nfa(layer.weight, torch.eye(2), W0, kind="centered"))
