from __future__ import annotations

import math

import pytest

from gramscope_lab.report.plotly_figures import log_ticks


def test_ticks_of_a_logarithmic_axis() -> None:
    assert log_ticks(0.02, 9000) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert all(0.31 <= mark <= 0.62 for mark in log_ticks(0.31, 0.62))
    assert all(math.isfinite(mark) for mark in log_ticks(1e-12, 1e12))
