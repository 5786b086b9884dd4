from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gramscope.errors import InputError
from gramscope_lab.cli.app import app
from refusals import assert_refused


def run(command: str) -> str:
    result = CliRunner().invoke(app, ["theory", *command.split()], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_cnfa_prints_prediction_observation_and_error() -> None:
    text = run("--n 12 --d 6 --widths 8,16 --nets 3")
    for word in ("predicted", "observed", "difference", "infinite width", "free"):
        assert word in text


def test_cnfa_reads_files_and_writes_json(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=source.normal(size=(9, 4)), y=source.normal(size=(9, 1)))
    rows = json.loads(run(f"--data {tmp_path / 'mine.npz'} --activation erf --widths 8 --nets 3 --json"))
    assert [row["prediction"] for row in rows] == ["infinite width", "mean kernels"]
    assert rows[0]["difference"] == pytest.approx(rows[0]["predicted"] - rows[0]["observed"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--n 8 --d 6 --data nowhere", "isotropic"),
        ("--data missing.npz", "no such file"),
        ("--n 8 --d 6 --widths a", "whole numbers"),
        ("--n 8 --d 6 --data alignment-reversing --balance 2", "balance=2"),
        ("--n 8 --d 6 --activation gelu", "gelu"),
        ("--alpha nan --data decay", "alpha"),
    ],
)
def test_wrong_use_says_what_to_do(arguments: str, message: str) -> None:
    assert_refused(message, run, arguments)


@pytest.mark.parametrize("option", ["nets", "n", "d", "depth", "widths", "seed"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["theory", f"--{option}", "-1" if option == "seed" else "0"])
    assert result.exit_code == 2 or isinstance(result.exception, InputError), result.exception
