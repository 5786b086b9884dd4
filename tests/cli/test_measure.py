from __future__ import annotations

import re

import pytest

from gramscope.cli.measure import print_measures


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("layers", [2, 12])
def test_no_heading_is_broken_inside_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, layers: int
) -> None:
    monkeypatch.setattr("gramscope.cli.measure.console_width", lambda: width)
    monkeypatch.setattr("gramscope.cli.console.console_width", lambda: width)
    names = ["target_linearity", "surrogate_normalized", "weight_norm", "nfa", "nc1", "vcs_gram_cosine", "stable_rank"]
    rows = {f"encoder.layer.{number}": dict.fromkeys(names, 0.123456) for number in range(layers)}
    print_measures("a run", rows)
    shown = capsys.readouterr().out
    assert {name for name in (*names, *rows) if not re.search(rf"\b{re.escape(name)}\b", shown)} == set()
    assert shown.count("0.1235") == len(names) * layers
    assert max(map(len, shown.splitlines())) <= width
