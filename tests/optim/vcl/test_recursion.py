"""The two solvers against Algorithm 1 in NumPy, and against each other, on random layers of every shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from gramscope.optim.vcl import exact
from gramscope.optim.vcl.recursion import advance
from gramscope.optim.vcl.rules import Batch, Rules
from gramscope.optim.vcl.spectral_map import SpectralMap
from gramscope.optim.vcl.state import rebased, start

SHAPES = [(5, 12), (12, 5), (7, 7), (1, 6), (6, 1), (3, 40)]
STEPS = 20


def layer(k: int, d: int, seed: int = 0) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, d, generator=generator, dtype=torch.float64) / d**0.5, generator


def batch_of(W: Tensor, generator: torch.Generator, b: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of a least-squares problem at W, so that the weights matter."""
    h = torch.randn(b, W.shape[1], generator=generator, dtype=torch.float64)
    y = h[:, : W.shape[0]].repeat(1, W.shape[0])[:, : W.shape[0]].sin()
    return h, (h @ W.double().mT - y) / b


def as_batch(h: Tensor, delta: Tensor, dense: bool = False, second_order: bool = True) -> Batch:
    sigma = delta.mT @ delta if second_order else None
    return Batch(delta.mT @ h, None, sigma) if dense else Batch(h, delta, sigma)


FORMS = [{}, {"W0": True}, {"W0": True, "second_order": False, "floor": 0.05, "aim": 0.7}]


@pytest.mark.parametrize(("k", "d"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dense", [False, True])
def test_both_solvers_are_algorithm_1(k: int, d: int, form: dict[str, Any], dense: bool):
    W0, generator = layer(k, d)
    form = {**form, "W0": W0 if form.get("W0") else None}
    anchor = "current" if form["W0"] is None else "initial"
    rules = Rules(SpectralMap(0.3, form.get("floor", 0.0)), anchor, form.get("aim", 0.0))
    expected = W = W0
    V = torch.zeros(d, d, dtype=torch.float64)
    state, small = exact.start(W, rules), start(W0, rules)
    for _ in range(STEPS):
        h, delta = batch_of(expected, generator)
        batch = as_batch(h, delta, dense, form.get("second_order", True))
        expected, V = reference.vcl_step(expected, V, h, delta, 0.1, 0.3, **form)
        state, W, exact_report = exact.advance(state, W, batch, 0.1, rules)
        small, found, report = advance(small, batch, 0.1, rules, rank=d)
        torch.testing.assert_close(W, expected, atol=1e-8, rtol=0)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        here, there = report.numbers(), exact_report.numbers()
        assert here["moved"] == pytest.approx(there["moved"], abs=1e-6, rel=1e-6)
        assert here["largest"] == pytest.approx(there["largest"], abs=1e-6)
        assert min(here["most_negative"], 0) == pytest.approx(min(there["most_negative"], 0), abs=1e-6)
        assert here["constraint"] == pytest.approx(there["constraint"], abs=1e-6)
        assert here["discarded"] < 1e-20


def test_float32_recursion_errs_no_more_than_dense_float32():
    """Over 20 steps from one float64 trajectory: no more than three times the error of dense float32."""
    k, d, gamma, alpha = 16, 120, 0.5, 0.1
    W0, generator = layer(k, d)
    rules = Rules(SpectralMap(alpha=alpha))
    W, V = W0, torch.zeros(d, d, dtype=torch.float64)
    w32, v32 = W0.float(), torch.zeros(d, d)
    small = start(W0.float(), rules)
    found = W0.float()
    for _ in range(STEPS):
        h, delta = batch_of(W, generator, b=6)
        W, V = reference.vcl_step(W, V, h, delta, gamma, alpha)
        w32, v32 = reference.vcl_step(w32, v32, h, delta, gamma, alpha, dtype="float32")
        small, found, _ = advance(small, as_batch(h.float(), delta.float()), gamma, rules, rank=d)
    dense_error, error = (w32.double() - W).norm(), (found.double() - W).norm()
    assert error < 3 * dense_error
    assert dense_error < 1e-3 * W.norm()


def test_at_most_k_positive_eigenvalues():
    """Why cutting at k loses nothing: G is negative semidefinite off W's rows."""
    W, generator = layer(4, 15)
    for anchor in ("current", "initial"):
        rules = Rules(SpectralMap(alpha=0.2), anchor=anchor)
        state, weights = exact.start(W, rules), W
        for _ in range(STEPS):
            G = state.matrix + (weights.mT @ weights if anchor == "current" else 0)
            values = torch.linalg.eigvalsh(G)
            assert (values > 1e-9 * values.abs().max()).sum() <= 4
            state, weights, _ = exact.advance(state, weights, as_batch(*batch_of(weights, generator)), 0.3, rules)


@pytest.mark.parametrize("anchor", ["current", "initial"])
@pytest.mark.parametrize("aim", [0.0, 0.5])
def test_light_steps_follow_full_ones(anchor: str, aim: float):
    k, d, rank = 8, 60, 16
    W0, generator = layer(k, d)
    rules = Rules(SpectralMap(alpha=0.2), anchor=anchor, aim=aim)
    state = start(W0, rules)
    for _ in range(30):
        state, W, _ = advance(state, as_batch(*batch_of(state.matrix, generator)), 0.05, rules, rank)
    full = light = state
    for _ in range(4):
        h, delta = batch_of(full.matrix, generator)
        full, W, _ = advance(full, as_batch(h, delta), 0.05, rules, rank)
        light, found, report = advance(light, as_batch(h, delta), 0.05, rules, rank, full=False)
        assert report.unsettled < 0.1
        assert (found - W).norm() < 0.08 * (W - state.matrix).norm()
    basis = light.basis
    torch.testing.assert_close(basis @ basis.mT, torch.eye(rank, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(light.shift, light.shift.mT)
    assert light.since == 4


@pytest.mark.parametrize(("k", "d"), [(12, 5), (7, 7), (5, 12)])
def test_light_steps_without_truncation_at_small_gamma(k: int, d: int):
    W0, generator = layer(k, d)
    rules = Rules(SpectralMap(alpha=0.4, floor=0.05), anchor="initial")
    state, _, _ = advance(start(W0, rules), as_batch(*batch_of(W0, generator), second_order=False), 1e-3, rules, d)
    while state.basis.shape[-2] < d:
        state, _, _ = advance(state, as_batch(*batch_of(W0, generator), second_order=False), 1e-3, rules, d)
    batch = as_batch(*batch_of(state.matrix, generator), second_order=False)
    for gamma, tolerance in ((1e-2, 0.1), (1e-3, 0.01)):  # first order: ten times smaller steps, ten times more exact
        exact, light = (advance(state, batch, gamma, rules, d, full=full)[1] for full in (True, False))
        assert (light - exact).norm() < tolerance * (exact - state.matrix).norm()


def test_stacks_are_worked_on_matrix_by_matrix():
    rules = Rules(SpectralMap(alpha=0.2))
    layers = [layer(3, 8, seed) for seed in range(3)]
    stack = start(torch.stack([W for W, _ in layers]), rules)
    single = [start(W, rules) for W, _ in layers]
    for step in range(8):
        pairs = [batch_of(s.matrix, g) for s, (_, g) in zip(single, layers, strict=True)]
        h, delta = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        full = step < 6
        stack, W, report = advance(stack, as_batch(h, delta), 0.1, rules, 6, full)
        done = [advance(s, as_batch(*pair), 0.1, rules, 6, full) for s, pair in zip(single, pairs, strict=True)]
        single = [state for state, _, _ in done]
        torch.testing.assert_close(W, torch.stack([w for _, w, _ in done]), atol=1e-7, rtol=0)
        assert report.numbers()["moved"] == pytest.approx([r.numbers()["moved"] for _, _, r in done], abs=1e-7)


def test_truncation_keeps_own_directions_then_the_largest(generator: torch.Generator):
    W0, generator = layer(3, 30)
    rules = Rules(SpectralMap(alpha=0.2))
    free = cut = start(W0, rules)
    for _ in range(3):
        h, delta = batch_of(free.matrix, generator)
        free, _, _ = advance(free, as_batch(h, delta), 0.3, rules, 30)
    h, delta = batch_of(free.matrix, generator)
    cut, _, report = advance(free, as_batch(h, delta), 0.3, rules, 5)
    everything, _, _ = advance(free, as_batch(h, delta), 0.3, rules, 30)
    W = free.matrix @ everything.basis.mT
    values = torch.linalg.eigvalsh(everything.shift + W.mT @ W).flip(0)
    rest = values[3:].abs().sort(descending=True).values
    assert report.numbers()["discarded"] == pytest.approx(float(rest[2:].square().sum() / values.square().sum()))
    assert cut.basis.shape == (5, 30)


@pytest.mark.parametrize("anchor", ["current", "initial"])
@pytest.mark.parametrize(("k", "d"), [(4, 20), (9, 6)])
def test_rebased_state_has_the_same_shift_and_the_new_weights(anchor: str, k: int, d: int):
    W0, generator = layer(k, d)
    rules = Rules(SpectralMap(alpha=0.2), anchor=anchor)
    state = start(W0, rules)
    for _ in range(5):
        state, _, _ = advance(state, as_batch(*batch_of(state.matrix, generator)), 0.1, rules, min(12, d))
    V = state.basis.mT @ state.shift @ state.basis
    W = state.matrix + 0.1 * torch.randn(k, d, generator=generator, dtype=torch.float64)
    moved = rebased(state, W)
    torch.testing.assert_close(moved.basis.mT @ moved.shift @ moved.basis, V)
    torch.testing.assert_close(moved.matrix, W)
    h, delta = batch_of(W, generator)
    expected = exact.advance(exact.Dense(V), W, as_batch(h, delta), 0.1, rules)[1]
    torch.testing.assert_close(advance(moved, as_batch(h, delta), 0.1, rules, d)[1], expected, atol=1e-6, rtol=0)


def test_zero_gradient_keeps_the_gram():
    """α = ½, initial anchor: with no shift there is nothing to do, in either solver."""
    W0, _ = layer(4, 9)
    rules = Rules(SpectralMap(alpha=0.5), anchor="initial")
    nothing = Batch(torch.zeros(4, 9, dtype=torch.float64), None, torch.zeros(4, 4, dtype=torch.float64))
    _, W, report = exact.advance(exact.start(W0, rules), W0, nothing, 1.0, rules)
    torch.testing.assert_close(W, W0)
    state = start(W0, rules)
    for _ in range(3):
        state, W, report = advance(state, nothing, 1.0, rules, 8)
        torch.testing.assert_close(W, W0)
    assert report.numbers()["moved"] < 1e-6


def test_small_steps_into_new_directions_are_preconditioned_gradient_steps():
    """To first order ``W⁺ − W = −γ P Λ^(2α−1) Pᵀ D`` there: what has learned much moves less."""
    alpha, gamma = 0.2, 1e-6
    W0, generator = layer(4, 40)
    rules = Rules(SpectralMap(alpha=alpha), anchor="initial")
    state, W = exact.start(W0, rules), W0
    for _ in range(4):
        state, W, _ = exact.advance(state, W, as_batch(*batch_of(W, generator)), 0.3, rules)
    h, delta = batch_of(W, generator)
    _, after, _ = exact.advance(state, W, as_batch(h, delta), gamma, rules)
    P, s, _ = torch.linalg.svd(W, full_matrices=False)
    values, vectors = torch.linalg.eigh(state.matrix)
    new = vectors[:, values.abs() < 1e-9]
    assert new.shape[1] == 20
    expected = -P @ torch.diag(s ** ((2 * alpha - 1) / alpha)) @ P.mT @ (delta.mT @ h) @ new
    torch.testing.assert_close((after - W) @ new / gamma, expected, atol=1e-4, rtol=1e-4)
