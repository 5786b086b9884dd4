from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gramscope.cli.theory import app
from gramscope.errors import InputError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_cnfa_prints_prediction_observation_and_error() -> None:
    text = run("cnfa", "--n", "12", "--d", "6", "--widths", "8,16", "--nets", "3")
    for word in ("predicted", "observed", "difference", "infinite width", "free"):
        assert word in text


def test_cnfa_reads_files_and_writes_json(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=source.normal(size=(9, 4)), y=source.normal(size=(9, 1)))
    text = run(
        "cnfa", "--data", str(tmp_path / "mine.npz"), "--activation", "erf", "--widths", "8", "--nets", "3", "--json"
    )
    rows = json.loads(text)
    assert [row["prediction"] for row in rows] == ["infinite width", "mean kernels"]
    assert rows[0]["difference"] == pytest.approx(rows[0]["predicted"] - rows[0]["observed"])


def test_other_commands_answer() -> None:
    data = json.loads(
        run("nfa-fig3", "--size", "16", "--data-seeds", "1", "--nets", "2", "--balances", "0.5", "--json")
    )
    assert {(row["inverse"], row["scale"]) for row in data} == {
        (rule, scale) for rule in ("pseudo", "literal") for scale in (1.0, 1 / 32)
    }
    assert "largest absolute difference" in run("nfa-fig3", "--size", "16", "--data-seeds", "1", "--nets", "2")
    assert "tr(R³)" in run("formulas", "--size", "16", "--nets", "3")
    assert "width power" in run("widths", "--widths", "4,8", "--depths", "1,2", "--nets", "3", "--activations", "relu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere"), "isotropic"),
        (("--data", "missing.npz"), "no such file"),
        (("--widths", "a"), "whole numbers"),
        (("--widths", "0"), "at least 1"),
        (("--data", "alignment-reversing", "--balance", "2"), "balance=2"),
        (("--activation", "gelu"), "gelu"),
    ],
)
def test_wrong_use_says_what_to_do(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run("cnfa", "--n", "8", "--d", "6", "--nets", "2", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cnfa", "--nets", "0"),
        ("cnfa", "--n", "0"),
        ("cnfa", "--d", "-3"),
        ("cnfa", "--depth", "0"),
        ("nfa-fig3", "--size", "1"),
        ("nfa-fig3", "--data-seeds", "0"),
        ("nfa-fig3", "--nets", "0"),
        ("nfa-fig3", "--balances", "a"),
        ("formulas", "--size", "0"),
        ("formulas", "--nets", "0"),
        ("widths", "--nets", "0"),
        ("widths", "--depths", "0"),
        ("widths", "--activations", "tan"),
        ("cnfa", "--alpha", "nan", "--data", "decay"),
        ("cnfa", "--seed", "-1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(arguments))
    if result.exit_code != 2:
        assert isinstance(result.exception, InputError), result.exception
