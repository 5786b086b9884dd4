"""The two solvers against Algorithm 1 in NumPy, and against each other, on random layers of every shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from gramscope.optim.vcl.exact import cutoff, exact_step, singular_values
from gramscope.optim.vcl.recursion import Recursion, factors, rebased, recursive_step, start

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


def recursive(
    state: Recursion, h: Tensor, delta: Tensor, gamma: float, alpha: float, rank: int, dense: bool = False
) -> tuple[Recursion, Tensor, dict[str, Tensor]]:
    D = delta.mT @ h
    factored = factors(D, D.shape[-2] if dense else h.shape[-2], 1e-8 if D.dtype == torch.float64 else 1e-2)
    assert dense or (factored[0] is None) == (h.shape[-2] >= D.shape[-2])
    return recursive_step(state, factored, delta.mT @ delta, gamma, alpha, rank)


def exact(
    V: Tensor | None, W: Tensor, h: Tensor, delta: Tensor, gamma: float, alpha: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return exact_step(V, W, delta.mT @ h, delta.mT @ delta, gamma, alpha)


@pytest.mark.parametrize(("k", "d"), SHAPES)
@pytest.mark.parametrize("dense", [False, True])
def test_both_solvers_are_algorithm_1(k: int, d: int, dense: bool):
    W0, generator = layer(k, d)
    expected = W = W0
    V, mine = torch.zeros(d, d, dtype=torch.float64), None
    small = start(W0)
    for _ in range(STEPS):
        h, delta = batch_of(expected, generator)
        expected, V = reference.vcl_step(expected, V, h, delta, 0.1, 0.3)
        mine, W, there = exact(mine, W, h, delta, 0.1, 0.3)
        small, found, here = recursive(small, h, delta, 0.1, 0.3, d, dense)
        torch.testing.assert_close(W, expected, atol=1e-8, rtol=0)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        for name in ("moved", "largest", "constraint"):
            assert float(here[name]) == pytest.approx(float(there[name]), abs=1e-6, rel=1e-6)
        assert min(float(here["most_negative"]), 0) == pytest.approx(min(float(there["most_negative"]), 0), abs=1e-6)
        assert float(here["discarded"]) < 1e-20


def test_float32_recursion_errs_no_more_than_dense_float32():
    """Over 20 steps from one float64 trajectory: no more than three times the error of dense float32."""
    k, d, gamma, alpha = 16, 120, 0.5, 0.1
    W0, generator = layer(k, d)
    W, V = W0, torch.zeros(d, d, dtype=torch.float64)
    w32, v32 = W0.float(), torch.zeros(d, d)
    small = start(W0.float())
    found = W0.float()
    for _ in range(STEPS):
        h, delta = batch_of(W, generator, b=6)
        W, V = reference.vcl_step(W, V, h, delta, gamma, alpha)
        w32, v32 = reference.vcl_step(w32, v32, h, delta, gamma, alpha, dtype="float32")
        small, found, _ = recursive(small, h.float(), delta.float(), gamma, alpha, d)
    dense_error, error = (w32.double() - W).norm(), (found.double() - W).norm()
    assert error < 3 * dense_error
    assert dense_error < 1e-3 * W.norm()


def test_at_most_k_positive_eigenvalues():
    """Why cutting at k loses nothing: G is negative semidefinite off W's rows."""
    W, generator = layer(4, 15)
    V = torch.zeros(15, 15, dtype=torch.float64)
    for _ in range(STEPS):
        values = torch.linalg.eigvalsh(V + W.mT @ W)
        assert (values > 1e-9 * values.abs().max()).sum() <= 4
        V, W, _ = exact(V, W, *batch_of(W, generator), 0.3, 0.2)


def test_stacks_are_worked_on_matrix_by_matrix():
    layers = [layer(3, 8, seed) for seed in range(3)]
    stack = start(torch.stack([W for W, _ in layers]))
    single = [start(W) for W, _ in layers]
    for _ in range(8):
        pairs = [batch_of(s.matrix, g, 2) for s, (_, g) in zip(single, layers, strict=True)]
        h, delta = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        stack, W, numbers = recursive(stack, h, delta, 0.1, 0.2, 6)
        done = [recursive(s, *pair, 0.1, 0.2, 6) for s, pair in zip(single, pairs, strict=True)]
        single = [state for state, _, _ in done]
        torch.testing.assert_close(W, torch.stack([w for _, w, _ in done]), atol=1e-7, rtol=0)
        assert numbers["moved"].tolist() == pytest.approx([float(n["moved"]) for _, _, n in done], abs=1e-7)


def test_truncation_keeps_own_directions_then_the_largest():
    W0, generator = layer(3, 30)
    free = start(W0)
    for _ in range(3):
        free, _, _ = recursive(free, *batch_of(free.matrix, generator), 0.3, 0.2, 30)
    h, delta = batch_of(free.matrix, generator)
    cut, _, numbers = recursive(free, h, delta, 0.3, 0.2, 5)
    everything, _, _ = recursive(free, h, delta, 0.3, 0.2, 30)
    W = free.matrix @ everything.basis.mT
    values = torch.linalg.eigvalsh(everything.shift + W.mT @ W).flip(0)
    rest = values[3:].abs().sort(descending=True).values
    assert float(numbers["discarded"]) == pytest.approx(float(rest[2:].square().sum() / values.square().sum()))
    assert cut.basis.shape == (5, 30)


@pytest.mark.parametrize(("k", "d"), [(4, 20), (9, 6)])
def test_rebased_state_has_the_same_shift_and_the_new_weights(k: int, d: int):
    W0, generator = layer(k, d)
    state = start(W0)
    for _ in range(5):
        state, _, _ = recursive(state, *batch_of(state.matrix, generator), 0.1, 0.2, min(12, d))
    V = state.basis.mT @ state.shift @ state.basis
    W = state.matrix + 0.1 * torch.randn(k, d, generator=generator, dtype=torch.float64)
    moved = rebased(state, W)
    torch.testing.assert_close(moved.basis.mT @ moved.shift @ moved.basis, V)
    torch.testing.assert_close(moved.matrix, W)
    h, delta = batch_of(W, generator)
    expected = exact(V, W, h, delta, 0.1, 0.2)[1]
    torch.testing.assert_close(recursive(moved, h, delta, 0.1, 0.2, d)[1], expected, atol=1e-6, rtol=0)


def test_a_gradient_of_higher_rank_is_not_factored():
    _, generator = layer(1, 1)
    h, delta = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (30, 9))
    D = delta.mT @ h
    left, rows = factors(D, 4, 1e-9)
    assert left is not None
    assert rows.shape == (4, 30)
    torch.testing.assert_close(left.mT @ rows, D)
    assert factors(D.clamp(-0.1, 0.1), 4, 1e-9)[0] is None
    assert factors(D, 9, 1e-9)[0] is None


def test_eigenvalues_at_rounding_level_are_cut():
    values = torch.tensor([3.0, 1e-3, 0.0, -2.0, -1e6], dtype=torch.float64)
    assert (singular_values(values.float(), 0.1, 5) > 0).tolist() == [True, True, False, False, False]
    small = torch.tensor([1.0, cutoff(torch.float64, 9), 1e-10], dtype=torch.float64)
    torch.testing.assert_close(singular_values(small, 0.1, 9), torch.tensor([1.0, 0.0, 0.1], dtype=torch.float64))


def test_small_steps_into_new_directions_are_preconditioned_gradient_steps():
    """Where W has singular values s, ``W⁺`` moves by ``−γ P s^(2α−1) Pᵀ D`` there: what has learned much moves less."""
    W, generator = layer(4, 40)
    h, delta = batch_of(W, generator)
    nothing, zero = torch.zeros(4, 40, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    P, s, R = torch.linalg.svd(W, full_matrices=False)
    new = torch.linalg.svd(R, full_matrices=True)[2][4:].mT  # directions that W does not span
    for alpha in (0.5, 0.2):
        before = exact_step(None, W, nothing, zero, 1.0, alpha)[1]
        after = exact(None, W, h, delta, 1e-6, alpha)[1]
        expected = -P @ torch.diag(s ** (2 * alpha - 1)) @ P.mT @ (delta.mT @ h) @ new
        torch.testing.assert_close((after - before) @ new / 1e-6, expected, atol=1e-4, rtol=1e-4)
