"""Grams, virtual covariance and what a gradient step really does, against sums over samples and autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
import reference
from gramscope.errors import InputError
from gramscope.measures.gram import fle_residual, gram_shift, gram_shift_residual
from gramscope.measures.virtual import (
    AccumulatedShift,
    virtual_covariance_factors,
    virtual_trajectory,
    virtual_update,
)
from gramscope.measures.virtual_against_actual import lipschitz_constant, virtual_against_actual


def layer(n: int, k: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """W, h and δ."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (k, d), (n, d), (n, k)
    W, h, delta = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return W, h, delta


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 3.0), st.integers(0, 3))
def test_shift_equals_the_sum_over_samples(n: int, k: int, d: int, gamma: float, seed: int) -> None:
    W, h, delta = layer(n, k, d, seed)
    D, Sigma = delta.T @ h, delta.T @ delta
    expected = reference.virtual_shift(W, h, delta, gamma)
    shift = gs.virtual_covariance_shift(W, D, Sigma, gamma)
    scale = 1e-11 * (1 + float(expected.abs().max()))
    assert torch.allclose(shift, expected, atol=scale)
    assert torch.allclose(virtual_covariance_factors(W, D, Sigma, gamma).dense(), expected, atol=scale)
    # the Gram's own change differs by the stated residual, exactly
    moved = W - gamma * D
    actual = moved.T @ moved - W.T @ W
    assert torch.allclose(gram_shift(W, D, gamma), actual, atol=100 * scale)
    assert torch.allclose(shift + gram_shift_residual(W, D, Sigma, gamma), actual, atol=100 * scale)
    # Feature Learning Equation
    assert float(fle_residual(W, D, (delta @ W).T @ h)) < 1e-12


def test_stacks_are_matrix_by_matrix() -> None:
    parts = [layer(7, 3, 4, seed) for seed in range(2)]
    W = torch.stack([p[0] for p in parts])
    D = torch.stack([p[2].T @ p[1] for p in parts])
    Sigma = torch.stack([p[2].T @ p[2] for p in parts])
    stacked = gs.virtual_covariance_shift(W, D, Sigma, 0.3)
    for i in range(2):
        assert torch.allclose(stacked[i], gs.virtual_covariance_shift(W[i], D[i], Sigma[i], 0.3))
        assert torch.allclose(gs.weight_gram(W)[i], W[i].T @ W[i])


def test_matrices_keep_the_dtype_of_the_arguments() -> None:
    W = torch.ones(2, 3)
    assert gs.weight_gram(W).dtype == torch.float32
    assert gs.weight_gram(W.bfloat16()).dtype == torch.float32
    assert gs.weight_gram(np.ones((2, 3))).dtype == torch.float64
    assert gs.virtual_covariance_shift(W, W.double(), torch.eye(2), 0.1).dtype == torch.float64
    assert not gs.weight_gram(torch.nn.Parameter(W)).requires_grad


def test_residual_of_nothing_is_zero() -> None:
    assert float(fle_residual(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(3, 3))) == 0.0


@pytest.mark.parametrize("form", ["dense", "diagonal", "low-rank"])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_accumulated_shift_is_the_sum(form: str, stack: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    total = AccumulatedShift(form, rank=12 if form == "low-rank" else None)  # type: ignore[arg-type]
    expected = torch.zeros(*stack, 12, 12, dtype=torch.float64)
    for _ in range(5):
        W, D, S = (
            torch.randn(*stack, *s, dtype=torch.float64, generator=generator) for s in ((2, 12), (2, 12), (2, 2))
        )
        total.add(W, D, S @ S.mT, 0.2)
        expected += gs.virtual_covariance_shift(W, D, S @ S.mT, 0.2)
    assert total.steps == 5
    assert torch.allclose(total.diagonal(), expected.diagonal(dim1=-2, dim2=-1))
    if form == "diagonal":
        with pytest.raises(InputError, match="only the diagonal"):
            total.dense()
        return
    assert torch.allclose(total.dense(), expected, atol=1e-10)
    if form == "low-rank":
        assert total.discarded < 1e-12
        assert torch.allclose(total.factored().dense(), expected, atol=1e-10)


def test_low_rank_sum_keeps_the_largest_magnitudes_and_bounds_its_error() -> None:
    generator = torch.Generator().manual_seed(0)
    total, exact = AccumulatedShift("low-rank", rank=4), AccumulatedShift()
    for _ in range(6):
        W, D = (torch.randn(3, 10, dtype=torch.float64, generator=generator) for _ in range(2))
        for one in (total, exact):
            one.add(W, D, torch.eye(3), 0.5)
    assert 0 < float((total.dense() - exact.dense()).norm()) <= total.discarded
    assert torch.linalg.matrix_rank(total.dense()) == 4


def test_truncation_is_by_magnitude() -> None:
    W, D = torch.eye(3, 6, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    D[0, 0], D[1, 1], D[2, 2] = 5.0, -1.0, -2.0  # the shift is −2γ of this diagonal
    total = AccumulatedShift("low-rank", rank=2)
    total.add(W, D, torch.zeros(3, 3), 0.5)
    assert total.diagonal().tolist() == pytest.approx([-5.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    assert total.discarded == pytest.approx(1.0)


def test_trajectory_sums_the_gradients() -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    gradients = [x * step for step in range(1, 6)]
    frames = virtual_trajectory(x, iter(gradients), gamma=0.2, every=2)
    assert frames.shape == (3, 4, 2)
    assert torch.allclose(frames[2], -x, atol=1e-6)
    assert torch.equal(frames[0], x)


def quadratic(z: Tensor) -> Tensor:
    return z.square() / 2


@pytest.mark.parametrize(
    ("activation", "value"),
    [("relu", 1.0), ("leaky_relu", 1.0), ("tanh", 1.0), ("softplus", 1.0), ("sigmoid", 0.25), ("hardswish", 1.5)],
)
def test_lipschitz_constants(activation: str, value: float) -> None:
    assert lipschitz_constant(activation) == pytest.approx(value, rel=1e-6)


def test_lipschitz_constant_of_gelu_is_at_root_two() -> None:
    # Φ(z) + zφ(z) is largest where (2 − z²)φ(z) = 0.
    z = torch.tensor(2.0, dtype=torch.float64).sqrt()
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    expected = normal.cdf(z) + z * normal.log_prob(z).exp()
    assert lipschitz_constant(F.gelu) == pytest.approx(float(expected), rel=1e-12)
    assert lipschitz_constant(lambda z: 3 * torch.tanh(z)) == pytest.approx(3.0)


def test_an_activation_without_a_constant_is_refused() -> None:
    with pytest.raises(InputError, match="grows without bound"):
        lipschitz_constant(quadratic)
    with pytest.raises(InputError, match="no activation 'rellu'"):
        lipschitz_constant("rellu")
    with pytest.raises(InputError, match="entry by entry"):
        lipschitz_constant(lambda z: z.sum())


@pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.tanh, F.leaky_relu, F.silu])
def test_actual_updates_are_those_of_a_gradient_step(activation: Callable[[Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    W, h = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((6, 4), (9, 4)))
    readout = torch.randn(6, dtype=torch.float64, generator=generator)
    gamma, bound, sign, ratios = 0.05, 0, 0, []
    constant = lipschitz_constant(activation)
    g = torch.empty(9, 6, dtype=torch.float64)
    for i in range(9):
        weight = W.clone().requires_grad_()
        out = activation(weight @ h[i])
        out.retain_grad()
        ((readout * out).sum() - 1).square().backward()
        assert weight.grad is not None
        assert out.grad is not None
        g[i] = out.grad
        actual = activation((W - gamma * weight.grad) @ h[i]) - out.detach()
        virtual = -gamma * out.grad
        limit = constant**2 * h[i].square().sum() * virtual.abs()
        ratios.append(float((actual.abs() / limit).max()))
        bound += int((actual.abs() <= limit * (1 + 1e-12)).sum())
        sign += int((actual * virtual >= 0).sum())
    result = virtual_against_actual(h, h @ W.T, g, gamma, activation)
    assert result.bound == bound / 54 == 1.0  # the theorem
    assert result.sign == sign / 54
    assert result.largest_ratio == pytest.approx(max(ratios), rel=1e-9)
    assert result.coordinates == 54
    if activation in (F.relu, torch.tanh, F.leaky_relu):
        assert result.sign == 1.0  # non-decreasing


def test_gelu_breaks_the_bound_with_constant_one() -> None:
    generator = torch.Generator().manual_seed(0)
    h = F.normalize(torch.randn(200, 5, dtype=torch.float64, generator=generator))
    z, g = (torch.randn(200, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    assert virtual_against_actual(h, z + 1.4, g, 1e-3, "gelu").bound == 1.0
    assert virtual_against_actual(h, z + 1.4, g, 1e-3, "gelu", lipschitz=1.0).bound < 0.7


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="complex"):
        gs.weight_gram(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"matrix \[rows, columns\]"):
        gs.weight_gram(torch.ones(2))
    with pytest.raises(InputError, match="integer dtype"):
        gs.weight_gram(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(
        InputError, match=r"Sigma has shape \(3, 3\) but W of shape \(2, 3\) needs Sigma of shape \(2, 2\)"
    ):
        gs.virtual_covariance_shift(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 3), 0.1)
    with pytest.raises(InputError, match="must agree"):
        virtual_update(torch.ones(2), torch.ones(3), 0.1)
    with pytest.raises(InputError, match=r"gradients\[1\] has shape"):
        virtual_trajectory(torch.ones(2), [torch.ones(2), torch.ones(3)], 0.1)
    with pytest.raises(InputError, match="at least 1"):
        virtual_trajectory(torch.ones(2), [], 0.1, every=0)
    with pytest.raises(InputError, match="rank="):
        AccumulatedShift("low-rank")
    with pytest.raises(InputError, match="form must be"):
        AccumulatedShift("sparse")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no shift has been added"):
        AccumulatedShift().dense()
    one = AccumulatedShift()
    one.add(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), 0.1)
    with pytest.raises(InputError, match="has no factors"):
        one.factored()
    with pytest.raises(InputError, match="must fit"):
        virtual_against_actual(torch.ones(2, 1), torch.ones(3, 2), torch.ones(3, 2), 0.1, "relu")
    with pytest.raises(InputError, match="gamma must be positive"):
        virtual_against_actual(torch.ones(2, 1), torch.ones(2, 2), torch.ones(2, 2), 0.0, "relu")


def test_convolution_weights_are_taken_in_patch_space() -> None:
    from gramscope.measures.spectrum import weight_spectrum

    conv = torch.nn.Conv2d(2, 5, 3, dtype=torch.float64)
    W = conv.weight.detach().flatten(1)
    torch.testing.assert_close(gs.weight_gram(conv.weight), W.T @ W)
    torch.testing.assert_close(weight_spectrum(conv.weight).values, torch.linalg.svdvals(W))
    assert gs.weight_gram(torch.nn.Conv3d(2, 3, 2).weight).shape == (16, 16)
    with gs.capture(conv) as tape:
        conv(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(gs.weight_gram(tape["(model)"].weight), W.T @ W)
