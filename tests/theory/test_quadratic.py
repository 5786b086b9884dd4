from __future__ import annotations

import pytest
import torch

from gramscope.theory.early_time import labelled_inputs, speeds_from_kernel
from gramscope.theory.quadratic import data_matrices, observed_traces, weight_matrix
from refusals import assert_refused


def task(n: int = 9, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, generator=generator, dtype=torch.float64)


def test_observed_traces_are_those_of_the_kernel() -> None:
    x, y = task()
    r = weight_matrix(5, 6, torch.Generator().manual_seed(1))
    expected = speeds_from_kernel(labelled_inputs(x, y), x @ r @ x.mT).correlation
    assert float(observed_traces(data_matrices(x, y), r).correlation) == pytest.approx(float(expected))
    assert float(observed_traces(data_matrices(1e60 * x, 1e-40 * y), r).correlation) == pytest.approx(float(expected))


def test_degenerate_data_is_named() -> None:
    x, y = task()
    assert_refused("labels", data_matrices, x, torch.zeros(9))
    assert_refused("is zero", data_matrices, torch.cat([x[:1], x[:1]]), torch.tensor([1.0, -1.0]))
    assert_refused("one output", data_matrices, x, torch.ones(9, 2))
