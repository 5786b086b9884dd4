"""Thin factors give what their dense form gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.factored import FactoredGram


def factors(shape: tuple[int, ...], seed: int) -> FactoredGram:
    generator = torch.Generator().manual_seed(seed)
    return FactoredGram(*(torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from([(), (3,)]), st.integers(0, 3))
def test_equals_the_dense_form(r: int, q: int, d: int, stack: tuple[int, ...], seed: int) -> None:
    A, B = factors((*stack, r, d), seed), factors((*stack, q, d), seed + 10)
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
    with pytest.raises(InputError, match="one shape"):
        FactoredGram(torch.ones(2, 3), torch.ones(3, 3))
