from __future__ import annotations

import statistics

import pytest

from gramscope_lab.report.panel import Panel
from made_up_runs import value


def test_collapse_is_shown_at_the_readout(panels: dict[str, Panel]) -> None:
    facets = panels["collapse"].views[0].facets
    last = facets[0].frames[0].lines[0].y[-1]
    assert last == pytest.approx(statistics.mean(value("nc1", s, 4, 1, 0.3) for s in (0, 1)))
    assert len(facets) == 5
