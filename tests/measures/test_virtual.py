"""Virtual covariance and what a gradient step does to the Gram, against sums over samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gramscope as gs
import reference
from cases import randoms, refused
from gramscope.errors import InputError
from gramscope.linalg.psd import random_orthogonal
from gramscope.measures.spectrum import weight_spectrum
from gramscope.measures.virtual import (
    fle_residual,
    gram_shift,
    virtual_trajectory,
    virtual_update,
)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 3.0), st.integers(0, 3))
def test_shift_equals_the_sum_over_samples(n: int, k: int, d: int, gamma: float, seed: int) -> None:
    W, h, delta = randoms((k, d), (n, d), (n, k), seed=seed)
    D, Sigma = delta.T @ h, delta.T @ delta
    expected = reference.virtual_shift(W, h, delta, gamma)
    shift = gs.virtual_covariance_shift(W, D, Sigma, gamma)
    scale = 1e-11 * (1 + float(expected.abs().max()))
    assert torch.allclose(shift, expected, atol=scale)
    # the Gram's own change differs by the stated residual, exactly
    moved = W - gamma * D
    actual = moved.T @ moved - W.T @ W
    assert torch.allclose(gram_shift(W, D, gamma), actual, atol=100 * scale)
    residual = gamma**2 * (D.T @ D - W.T @ Sigma @ W)
    assert torch.allclose(shift + residual, actual, atol=100 * scale)
    # Feature Learning Equation
    assert float(fle_residual(W, D, (delta @ W).T @ h)) < 1e-12


def test_stacks_are_matrix_by_matrix() -> None:
    W, h, delta = randoms((2, 3, 4), (2, 7, 4), (2, 7, 3))
    D, Sigma = delta.mT @ h, delta.mT @ delta
    stacked = gs.virtual_covariance_shift(W, D, Sigma, 0.3)
    for i in range(2):
        assert torch.allclose(stacked[i], gs.virtual_covariance_shift(W[i], D[i], Sigma[i], 0.3))
        assert torch.allclose(gs.weight_gram(W)[i], W[i].T @ W[i])


def test_columns_of_a_step_equal_the_dense_matrices() -> None:
    """With the null as the mean over rotations of one of them."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 7)).double()
    x, y = randoms((30, 6), (30, 7))
    names = ["vcs_cosine", "vcs_residual", "vcs_gram_cosine", "vcs_null"]
    table = gs.measure(net, (x, y), torch.nn.MSELoss(), measures=names, gamma=0.3)
    for layer in gs.collect(net, (x, y), torch.nn.MSELoss()):
        W, D, rate = layer.weight, layer.gradient, 0.3 / layer.loss_terms
        virtual, actual = gs.virtual_covariance_shift(W, D, layer.covariance, rate), gram_shift(W, D, rate)
        size = virtual.norm() * actual.norm()
        Q = random_orthogonal(W.shape[1], torch.Generator().manual_seed(0), (20_000,))
        rotated = (Q @ virtual @ Q.mT * actual).sum((-2, -1)) / size
        row = table[layer.name]
        assert row["vcs_cosine"] == pytest.approx(float((virtual * actual).sum() / size))
        assert row["vcs_residual"] == pytest.approx(float((actual - virtual).norm() / actual.norm()))
        assert row["vcs_gram_cosine"] == pytest.approx(float(gs.cosine(virtual, gs.weight_gram(W))))
        assert row["vcs_null"] == pytest.approx(float(rotated.mean()), abs=4 * float(rotated.std()) / 20_000**0.5)


def test_matrices_keep_the_dtype_of_the_arguments() -> None:
    W = torch.ones(2, 3)
    assert gs.weight_gram(W).dtype == torch.float32
    assert gs.weight_gram(W.bfloat16()).dtype == torch.float32
    assert gs.weight_gram(np.ones((2, 3))).dtype == torch.float64
    assert gs.virtual_covariance_shift(W, W.double(), torch.eye(2), 0.1).dtype == torch.float64
    assert not gs.weight_gram(torch.nn.Parameter(W)).requires_grad
    assert fle_residual(W, torch.zeros(2, 3), torch.zeros(3, 3)) == 0.0


def test_convolution_weights_are_taken_in_patch_space() -> None:
    conv = torch.nn.Conv2d(2, 5, 3, dtype=torch.float64)
    W = conv.weight.detach().flatten(1)
    torch.testing.assert_close(gs.weight_gram(conv.weight), W.T @ W)
    torch.testing.assert_close(weight_spectrum(conv.weight).values, torch.linalg.svdvals(W))
    assert gs.weight_gram(torch.nn.Conv3d(2, 3, 2).weight).shape == (16, 16)
    with gs.capture(conv) as tape:
        conv(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(gs.weight_gram(tape["(model)"].weight), W.T @ W)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trajectory_sums_the_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = [x * step for step in range(1, 6)]
    frames = virtual_trajectory(x, iter(gradients), gamma=0.2, every=2)
    assert frames.shape == (3, 4, 2)
    assert torch.allclose(frames[1], 0.4 * x, atol=1e-6)
    assert torch.allclose(frames[2], -x, atol=1e-6)
    assert torch.equal(frames[0], x)


def test_bad_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"Sigma has shape \(3, 3\) but W of shape \(2, 3\) needs Sigma of shape \(2, 2\)"
    ):
        gs.virtual_covariance_shift(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 3), 0.1)
    refused(virtual_update, torch.ones(2), torch.ones(3), 0.1, match="must agree")
    refused(virtual_trajectory, torch.ones(2), [torch.ones(2), torch.ones(3)], 0.1, match=r"gradients\[1\] has shape")
    refused(virtual_trajectory, torch.ones(2), [], 0.1, every=0, match="at least 1")
    refused(gs.weight_gram, torch.ones(2, 2, dtype=torch.complex64), match="complex")
    refused(gs.weight_gram, torch.ones(2), match=r"matrix \[rows, columns\]")
    refused(gs.weight_gram, torch.ones(2, 2, dtype=torch.int64), match="integer dtype")
