from __future__ import annotations

import json

import pytest

from gramscope_lab.cli.app import _tell
from gramscope_lab.cli.console import TerminalReporter, messages, print_json, print_table, results

HOSTILE = "name\x1b[2J\x9b31m\r\x07"


def test_control_characters_in_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    results().print(HOSTILE)
    messages().print(f"note: {HOSTILE}")
    print_table(HOSTILE, [{HOSTILE: HOSTILE, "number": 1.0}])
    print_json({HOSTILE: HOSTILE})
    _tell(f"gramscope: {HOSTILE}")
    out, err = capsys.readouterr()
    assert not [letter for letter in out + err if (ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160]
    assert r"name\x1b[2J\x9b31m\x0d\x07" in err


def test_json_keeps_what_it_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": HOSTILE})
    assert json.loads(capsys.readouterr().out) == {"name": HOSTILE}


def test_a_bar_shows_what_was_evaluated_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    reporter = TerminalReporter()
    reporter.start("2 runs", 2, "run")
    reporter.records([{"epoch": 0.5, "test_accuracy": 0.25}], "seed-1")
    reporter.advance(2)
    reporter.finish()
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "seed-1 test accuracy 0.25" in shown
