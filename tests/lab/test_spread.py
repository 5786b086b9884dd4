from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope_lab.spread import spread


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_spread_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = spread([None, *values, float("nan"), float("inf")])
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9, rel=1e-9)
    assert found.deviation == pytest.approx(statistics.stdev(values), abs=1e-6, rel=1e-9)
    assert (found.least, found.largest) == (min(values), max(values))


def test_one_value_has_no_spread_and_none_is_none() -> None:
    found = spread([2.0])
    assert found is not None
    assert (found.deviation, found.least, found.largest) == (0.0, 2.0, 2.0)
    assert spread([None]) is None
