"""Values of a user put into settings."""

from __future__ import annotations

from typing import Any

import pytest

from gramscope_lab.experiments.experiment import settings_table, with_values
from refusals import assert_refused
from small_experiments import MadeUpSettings as Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 1}, "made has no setting 'epochs'; it has: seeds, steps, rate"),
        ({"steps": "many"}, "steps = 'many': give a value of the same type as 3"),
        ({"steps": 2.5}, "the same type as 3"),
        ({"seeds": ()}, "give at least one value"),
        ({"seeds": "3,x"}, "the same type as 0"),
        ({"seeds": ("a",)}, "the same type as 0"),
        ({"seeds": (1, 1)}, r"seeds = \[1, 1\]: a value occurs twice"),
        ({"seeds": (0, -1)}, "seeds = -1: must not be negative"),
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"rate": -0.5}, "rate = -0.5: must not be negative"),
        ({"rate": float("nan")}, "rate = nan: must be finite"),
        ({"rate": float("inf")}, "rate = inf: must be finite"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    assert_refused(message, with_values, "made", Settings(), values)


def test_whole_numbers_serve_as_floats_and_one_value_as_several() -> None:
    assert with_values("made", Settings(), {"rate": 1, "seeds": 1}) == Settings((1,), 3, 1.0)
    assert settings_table(with_values("made", Settings(), {"seeds": "3, 1"}))["seeds"] == [3, 1]
