from __future__ import annotations

import pytest

from gramscope_lab.experiments.theory_checks import WidthCheck, check_formulas, check_widths, fit_powers
from refusals import assert_refused


def test_monte_carlo_confirms_the_right_formulas_and_refutes_the_misprints() -> None:
    """n = k = d = 512, 24 nets, each with the moments of its own R, isotropic and correlated data."""
    rows = check_formulas(size=512, nets=24)
    assert {row.data for row in rows} == {"isotropic", "decay 0.5"}
    for row in rows:
        assert (abs(row.z) < 3) == row.agrees_with_rule, row
    assert {row.equation for row in rows if row.agrees_with_rule} == {"(20)", "(22)", "(28) corrected"}


def test_distance_from_the_limit_falls_like_depth_over_width() -> None:
    rows = check_widths(("relu", "linear"), widths=(48, 96, 192), nets=250, n=5, d=4)
    for fit in fit_powers(rows):
        assert fit.width_power == pytest.approx(1, abs=0.15), fit
        assert fit.depth_power == pytest.approx(1, abs=0.25), fit


def test_fit_recovers_powers() -> None:
    rows = [WidthCheck("relu", d, w, 3 * d**1.5 / w**0.7, 0.0) for d in (1, 2, 3) for w in (10, 20, 50)]
    (fit,) = fit_powers(rows)
    assert (fit.depth_power, fit.width_power) == pytest.approx((1.5, 0.7))
    assert_refused("two depths", fit_powers, rows[:3])
