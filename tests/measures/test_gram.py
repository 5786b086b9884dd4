"""The weight Gram and its dtype, stacks and patches; what is no matrix is refused."""

from __future__ import annotations

import numpy as np
import torch

import gramscope as gs
from cases import refused
from gramscope.measures.gram import fle_residual
from gramscope.measures.spectrum import weight_spectrum


def test_matrices_keep_the_dtype_of_the_arguments() -> None:
    W = torch.ones(2, 3)
    assert gs.weight_gram(W).dtype == torch.float32
    assert gs.weight_gram(W.bfloat16()).dtype == torch.float32
    assert gs.weight_gram(np.ones((2, 3))).dtype == torch.float64
    assert gs.virtual_covariance_shift(W, W.double(), torch.eye(2), 0.1).dtype == torch.float64
    assert not gs.weight_gram(torch.nn.Parameter(W)).requires_grad


def test_residual_of_nothing_is_zero() -> None:
    assert float(fle_residual(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(3, 3))) == 0.0


def test_convolution_weights_are_taken_in_patch_space() -> None:
    conv = torch.nn.Conv2d(2, 5, 3, dtype=torch.float64)
    W = conv.weight.detach().flatten(1)
    torch.testing.assert_close(gs.weight_gram(conv.weight), W.T @ W)
    torch.testing.assert_close(weight_spectrum(conv.weight).values, torch.linalg.svdvals(W))
    assert gs.weight_gram(torch.nn.Conv3d(2, 3, 2).weight).shape == (16, 16)
    with gs.capture(conv) as tape:
        conv(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(gs.weight_gram(tape["(model)"].weight), W.T @ W)


def test_bad_input_is_named() -> None:
    refused(gs.weight_gram, torch.ones(2, 2, dtype=torch.complex64), match="complex")
    refused(gs.weight_gram, torch.ones(2), match=r"matrix \[rows, columns\]")
    refused(gs.weight_gram, torch.ones(2, 2, dtype=torch.int64), match="integer dtype")
