from __future__ import annotations

import math
import statistics

import pytest
import torch

from gramscope.theory.early_time import speeds_from_kernel
from gramscope.theory.montecarlo import RandomMLP
from gramscope_lab.experiments.nfa_theory import (
    Decaying,
    compare_cnfa,
    decays,
    mean_kernel_correlation,
    polynomial_task,
    reversals,
)
from refusals import assert_refused
from studies.theory import check_formulas, check_widths, fit_powers


def test_predictions_of_a_wide_net_come_true() -> None:
    x, y = polynomial_task(24, 16, None, "high-rank", torch.Generator().manual_seed(0))
    for activation, depth in (("quadratic", 1), ("relu", 2)):
        rows = compare_cnfa(
            x, y, [2000], activation=activation, depth=depth, nets=12, generator=torch.Generator().manual_seed(1)
        )
        by_name = {row["prediction"]: row for row in rows}
        for name in ("infinite width", "mean kernels"):
            assert abs(by_name[name]["difference"]) < 4 * by_name[name]["observed_error"] + 0.004, by_name[name]
        assert ("free" in by_name) == (activation == "quadratic" and depth == 1)


def test_jackknife_error_matches_the_spread_of_repeated_predictions() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net, generator = RandomMLP(4, (8, 8), "relu"), torch.Generator().manual_seed(2)
    drawn = [torch.cat([j @ j.mT for j, _, _ in net.draws(x, 40, generator)]) for _ in range(40)]
    found = [mean_kernel_correlation(kernels, x) for kernels in drawn]
    square = (drawn[0] @ drawn[0]).mean(0)
    assert float(found[0]) == pytest.approx(float(speeds_from_kernel(x, drawn[0].mean(0), square).correlation))
    assert statistics.mean(f.error for f in found) == pytest.approx(statistics.stdev(found), rel=0.4)


def test_free_prediction_of_a_square_problem() -> None:
    x, y = polynomial_task(200, 200, None, "high-rank", torch.Generator().manual_seed(0))
    rows = compare_cnfa(x, y, [200], nets=6, generator=torch.Generator().manual_seed(1))
    by_name = {row["prediction"]: row for row in rows}
    assert abs(by_name["free"]["difference"]) < 4 * by_name["free"]["observed_error"] < 0.02
    assert abs(by_name["infinite width"]["difference"]) > 0.03, "the mean term alone misses the proportional regime"
    assert abs(by_name["gaussian"]["predicted"] - by_name["gaussian"]["ratio_of_means"]) < 0.02


def test_reversal_prediction_follows_observation() -> None:
    small = 0.18 / math.sqrt(128)
    rows = [row for balance in (0.3, 0.9, 1.0) for row in reversals(128, balance, 1, 10, small=0.18)]
    assert len(rows) == 2 * 2 * 3
    by_key = {(row["scale"], row["inverse"], row["balance"]): row for row in rows}
    assert by_key[1.0, "pseudo", 0.3]["observed"] > 0.999
    assert by_key[1.0, "literal", 0.3]["observed"] < 0.96
    assert by_key[small, "pseudo", 0.3]["observed"] < 0.75 < 0.999 < by_key[small, "pseudo", 1.0]["observed"]
    assert by_key[1.0, "pseudo", 0.9]["observed"] == by_key[1.0, "literal", 0.9]["observed"], "one net, the same data"
    assert all(abs(row["predicted"] - row["observed"]) < 0.08 for row in rows)
    assert next(iter(reversals(128, 0.3, 1, 10, small=0.18))) == rows[0]


def test_the_data_decay_at_every_alpha() -> None:
    settings = Decaying(n=20, d=12, widths=(64,), alphas=(0.0, 1.0), nets=3)
    rows = [row for target in settings.targets for row in decays(settings, target, 0)]
    assert len(rows) == 2 * 2 * 2
    assert all(0 < row["observed"] <= 1 and 0 < row["predicted"] <= 1 and row["observed_error"] > 0 for row in rows)
    assert len({(row["alpha"], row["target"], row["activation"]) for row in rows}) == len(rows)


def test_bad_input_is_named() -> None:
    source = torch.Generator()
    assert_refused("target", polynomial_task, 4, 4, None, "middle-rank", source)
    x = torch.ones(3, 2)
    assert_refused("labels", compare_cnfa, x, torch.zeros(3), [4], generator=source)
    assert_refused("NaN", compare_cnfa, x * math.nan, torch.ones(3), [4], generator=source)
    assert_refused("one output", compare_cnfa, x, torch.ones(3, 2), [4], generator=source)
    assert_refused("balance", lambda: list(reversals(8, 1.5, 1, 2)))


def test_monte_carlo_confirms_the_right_formulas_and_refutes_the_misprints() -> None:
    """n = k = d = 512, 24 nets, each with the moments of its own R, isotropic and correlated data."""
    rows = check_formulas(size=512, nets=24)
    assert {row["data"] for row in rows} == {"isotropic", "decay 0.5"}
    for row in rows:
        assert (abs(row["z"]) < 3) == row["agrees_with_rule"], row
    assert {row["equation"] for row in rows if row["agrees_with_rule"]} == {"(20)", "(22)", "(28) corrected"}


def test_distance_from_the_limit_falls_like_depth_over_width() -> None:
    rows = check_widths(("relu", "linear"), widths=(48, 96, 192), nets=250, n=5, d=4)
    for fit in fit_powers(rows):
        assert fit["width_power"] == pytest.approx(1, abs=0.15), fit
        assert fit["depth_power"] == pytest.approx(1, abs=0.25), fit


def test_fit_recovers_powers() -> None:
    points = [(d, w) for d in (1, 2, 3) for w in (10, 20, 50)]
    rows = [{"activation": "relu", "depth": d, "width": w, "distance": 3 * d**1.5 / w**0.7} for d, w in points]
    (fit,) = fit_powers(rows)
    assert (fit["depth_power"], fit["width_power"]) == pytest.approx((1.5, 0.7))
    assert_refused("two depths", fit_powers, rows[:3])
