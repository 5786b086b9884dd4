from __future__ import annotations

from gramscope.measures.columns import COLUMNS
from gramscope_lab.report.measure_texts import GROUPS, MEASURES


def test_formulas_are_those_of_the_measures() -> None:
    for name, measure in COLUMNS.items():
        assert MEASURES[name].formula == measure.formula, name
    assert {name for shown in GROUPS for name in shown.measures} <= set(MEASURES)
