from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramscope.theory.early_time import (
    Speeds,
    labelled_inputs,
    speeds_from_gradient,
    speeds_from_kernel,
    speeds_from_tangents,
)
from refusals import assert_refused


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 6), st.integers(0, 99))
def test_the_three_ways_agree(n: int, k: int, d: int, seed: int) -> None:
    j, p = normal(n, k, seed=seed), normal(n, d, seed=seed + 100)
    ways = [
        speeds_from_tangents(j, p),
        speeds_from_gradient(j.mT @ p, j.mT @ j / n),
        speeds_from_kernel(p, j @ j.mT),
        speeds_from_kernel(p, j @ j.mT, (j @ j.mT) @ (j @ j.mT)),
    ]
    for other in ways[1:]:
        assert torch.allclose(ways[0].gram, other.gram)
        assert torch.allclose(ways[0].agop, other.agop)
        assert float(ways[0].correlation) == pytest.approx(float(other.correlation))


def test_correlation_is_the_uncentred_cosine_at_any_scale() -> None:
    j, p = normal(8, 5), normal(8, 4, seed=1)
    speeds = speeds_from_tangents(j, p)
    expected = float(torch.nn.functional.cosine_similarity(speeds.gram.flatten(), speeds.agop.flatten(), dim=0))
    assert float(speeds.correlation) == pytest.approx(expected)
    assert float(speeds.traces.correlation) == pytest.approx(expected)
    for scale in (1e-90, 1e90):
        assert float(Speeds(scale * speeds.gram, scale * speeds.agop).correlation) == pytest.approx(expected)


def test_stacks_of_nets() -> None:
    j, p = normal(3, 8, 5), normal(8, 4, seed=1)
    stacked = speeds_from_tangents(j, p).correlation
    assert stacked.tolist() == pytest.approx([float(speeds_from_tangents(one, p).correlation) for one in j])


def test_labelled_inputs_of_several_outputs() -> None:
    x, y = normal(3, 2), normal(3, 2, seed=1)
    p = labelled_inputs(x, y)
    assert torch.equal(p[1], -y[0, 1] * x[0])
    assert torch.equal(p[4], -y[2, 0] * x[2])


def test_bad_data_is_named() -> None:
    x, y = normal(4, 3), normal(4)
    broken = x.clone()
    broken[0, 0] = math.nan
    assert_refused("labels", labelled_inputs, x, torch.zeros(4))
    assert_refused("x is zero", labelled_inputs, torch.zeros(4, 3), y)
    assert_refused("x holds 1 NaN", labelled_inputs, broken, y)
    assert_refused("y holds 4", labelled_inputs, x, y * math.inf)
    assert_refused("must be", labelled_inputs, x, y[:3])
    still = speeds_from_tangents(torch.zeros(4, 2, dtype=torch.float64), x)
    assert_refused("0/0", lambda: still.correlation)
