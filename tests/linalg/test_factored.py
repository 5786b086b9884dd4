"""Thin factors give what their dense form gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import randoms, refused
from gramscope.linalg.factored import FactoredGram


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from([(), (3,)]), st.integers(0, 3))
def test_equals_the_dense_form(r: int, q: int, d: int, stack: tuple[int, ...], seed: int) -> None:
    U, V, X, Y = randoms((*stack, r, d), (*stack, r, d), (*stack, q, d), (*stack, q, d), seed=seed)
    A, B = FactoredGram(U, V), FactoredGram(X, Y)
    a, b = A.dense(), B.dense()

    def close(one: Tensor, two: Tensor) -> bool:
        return torch.allclose(one, two, atol=1e-10)

    assert tuple(A.shape) == tuple(a.shape)
    assert close(A.diagonal(), a.diagonal(dim1=-2, dim2=-1))
    assert close(A.trace(), a.diagonal(dim1=-2, dim2=-1).sum())
    assert close(A.norm(), a.norm())
    assert close(A.total(), a.sum())
    assert close(A.inner(B), (a * b).sum())
    assert close(A.inner(b), (a * b).sum())
    assert close((A + B).dense(), a + b)


def test_grams_are_factored() -> None:
    W = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    K = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    assert torch.allclose(FactoredGram.gram(W).dense(), W.T @ W)
    assert torch.allclose(FactoredGram.gram(W, K).dense(), W.T @ K @ W)


def test_factors_must_fit() -> None:
    refused(FactoredGram, torch.ones(2, 3), torch.ones(3, 3), match="one shape")
