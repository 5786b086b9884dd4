from __future__ import annotations

import math

import pytest
import torch

from cases import normal, randoms, refused
from gramscope.measures.spectral_scale import log_alignment_ratio, nuclear_rank, spectral_ratio, stable_rank_of_gram


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_dense_formulas(shape: tuple[int, int]) -> None:
    W, H = randoms(shape, (20, shape[1]))
    k, d = shape
    inside = (H @ W.T).square().sum() / (W.square().sum() * H.square().sum())
    assert float(log_alignment_ratio(W, H.T @ H / 20)) == pytest.approx(1 + math.log(inside) / (2 * math.log(d)))
    s = torch.linalg.svdvals(W)
    assert spectral_ratio(W) == pytest.approx(float(s[0]) / math.sqrt(k / d))
    assert nuclear_rank(W) == pytest.approx(float(s.sum() ** 2 / (s**2).sum()))
    largest = torch.linalg.matrix_norm(H, 2)
    assert stable_rank_of_gram(H.T @ H) == pytest.approx(float(H.square().sum() / largest**2))
    assert nuclear_rank(1e-200 * W) == pytest.approx(nuclear_rank(W))


def test_alignment_of_independent_and_of_common_directions() -> None:
    W, H = normal(200, 300), normal(500, 300, seed=1)
    assert float(log_alignment_ratio(W, H.T @ H)) == pytest.approx(0.5, abs=0.01)
    one = torch.outer(W[0], H[0])
    assert float(log_alignment_ratio(one, torch.outer(H[0], H[0]))) == pytest.approx(1.0)


def test_a_stack_counts_as_diagonal_blocks() -> None:
    W, C = normal(2, 3, 4), normal(2, 9, 4, seed=1)
    C = C.mT @ C
    whole, gram = torch.block_diag(*W), torch.block_diag(*C)
    assert float(log_alignment_ratio(W, C)) == pytest.approx(float(log_alignment_ratio(whole, gram)))
    assert nuclear_rank(W) == pytest.approx(nuclear_rank(whole))
    assert stable_rank_of_gram(C) == pytest.approx(stable_rank_of_gram(gram))
    assert spectral_ratio(W) == pytest.approx(spectral_ratio(whole))


def test_nothing_to_compare() -> None:
    assert math.isnan(nuclear_rank(torch.zeros(2, 2)))
    assert math.isnan(stable_rank_of_gram(torch.zeros(2, 2)))
    refused(log_alignment_ratio, torch.ones(1, 1), torch.ones(1, 1), match="base 1")
    refused(log_alignment_ratio, torch.ones(1, 2), torch.ones(1, 1), match="needs")
