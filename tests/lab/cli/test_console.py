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


def test_members_have_lines_of_their_own_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    reporter = TerminalReporter()
    reporter.start("2 runs", 2, "run")
    reporter.member("seed-1", 0.5, 2.0)
    reporter.records([{"epoch": 0.5, "test_accuracy": 0.25}], "seed-1")
    reporter.member_ended("seed-1")
    reporter.advance(2)
    reporter.finish()
    assert "2/2" in capsys.readouterr().err
