"""The command: listing, tables, JSON, several experiments, wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramscope_lab.cli.app import app
from refusals import assert_refused

SMALL = ["--seeds", "1", "--set", "n=16", "--set", "d=16", "--set", "widths=[8,16]", "--set", "alphas=[0.0,1.0]"]
SMALL += ["--set", "nets=2", "--device", "cpu"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list() -> None:
    assert "nfa-fig9" in call("--list")
    entries = json.loads(call("--list", "--json"))
    assert {"name", "source", "title"} == set(entries[0])


def test_table_and_json(tmp_path: Path) -> None:
    table = call("nfa-fig6", *SMALL, "--out", str(tmp_path / "x"))
    assert "published" in table
    assert "nfa-fig6.png" in table.replace("\n", "")
    found = json.loads(call("nfa-fig6", *SMALL, "--out", str(tmp_path / "x"), "--json"))
    assert found["name"] == "nfa-fig6"
    assert found["scale"] == "quick"
    assert {"claim", "published", "measured", "holds", "reason"} == set(found["claims"][0])


def test_several_go_on_after_one_that_cannot_run(tmp_path: Path) -> None:
    arguments = ["reproduce", "nfa-fig1", "nfa-fig6", *SMALL, "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert "nfa-fig1 has no setting 'widths'" in first["error"]
    assert second["claims"]
    assert (tmp_path / "nfa-fig6-quick" / "figures" / "nfa-fig6.pdf").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment, or all"),
        (["nfa-fig1", "--scale", "big"], "--scale big: use quick or paper"),
        (["nfa-fig1", "--data", "mnist"], "nfa-fig1 has no setting 'data'"),
        (["nfa-fig3", "--seeds", "3,7"], "numbers its data sets from 0"),
        (["nfa-fig6", "--seeds", "1,1"], r"seeds = \[1, 1\]: a value occurs twice"),
        (["gram-fig2", "--data", "swiss-roll"], "swiss-roll has no classes.*gram-fig2 needs them: digits, faces"),
        (["vcl-fig2", "--data", "digits,digits"], r"data = \['digits', 'digits'\]: a value occurs twice"),
        (["nfa-fig9", "--data", "nosuchset"], "no data set 'nosuchset'"),
        (["nfa-fig2", "--set", "scales=0,1"], r"scales = \[0.0, 1.0\]: must be above zero"),
        (["nfa-fig2", "--set", "spectra=foo"], r"spectra = \['foo'\]: choose of isotropic, decay-1, decay-2"),
        (["nfa-fig4", "--set", "varied=foo"], r"varied = \['foo'\]: choose of first, hidden"),
        (["gram-fig5", "--set", "labels=2"], r"labels = \[2\]: name two classes"),
        (["gram-fig1", "--set", "frames=50"], "frames = 50: at most 11 are there, one every 10 of 100 epochs"),
        (["gram-fig1", "--set", "every=7"], "every = 7: must divide epochs = 100"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "x")] if arguments else []
    assert_refused(message, call, *arguments, *out)
    assert not (tmp_path / "x").exists()
