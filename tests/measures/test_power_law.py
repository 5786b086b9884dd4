from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import normal, refused
from gramscope.measures.power_law import weight_exponent


def clauset(values: np.ndarray) -> float:
    """The fit of Clauset, Shalizi and Newman by loops."""
    values, fits = np.sort(values), []
    for start in range(len(values) - 9):
        tail = values[start:]
        alpha = 1 + len(tail) / np.log(tail / tail[0]).sum()
        law = 1 - (tail / tail[0]) ** (1 - alpha)
        steps = [(i / len(tail), (i + 1) / len(tail)) for i in range(len(tail))]
        fits.append((max(max(abs(x - a), abs(x - b)) for x, (a, b) in zip(law, steps, strict=True)), alpha))
    return min(fits)[1]


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (12, 12)])
def test_fit_by_loops(shape: tuple[int, int]) -> None:
    W = normal(*shape)
    assert weight_exponent(W) == pytest.approx(clauset(np.linalg.svd(W.numpy(), compute_uv=False) ** 2), rel=1e-9)
    assert weight_exponent(1e-30 * W) == pytest.approx(weight_exponent(W))


@pytest.mark.parametrize("alpha", [2.0, 4.0])
def test_a_known_law_is_found(alpha: float) -> None:
    quantiles = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    eigenvalues = quantiles ** (-1 / (alpha - 1))
    assert weight_exponent(torch.diag(eigenvalues.sqrt())) == pytest.approx(alpha, rel=0.05)


def test_few_eigenvalues() -> None:
    refused(weight_exponent, normal(9, 50), match="at least 10 eigenvalues; this weight has 9")
    assert weight_exponent(torch.eye(12)) != weight_exponent(torch.eye(12))  # no law: NaN
