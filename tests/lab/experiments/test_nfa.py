"""What the nfa experiments record, at small settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gramscope_lab.experiments.experiment import Options, Results
from gramscope_lab.experiments.nfa_faces import FIG9
from gramscope_lab.experiments.running import Reproduction, reproduce
from gramscope_lab.runs.directory import RunDirectory
from refusals import assert_refused
from small_experiments import SMALL

Run = Callable[[str], Reproduction]


def test_corruption_loses_alignment(done: Run) -> None:
    for record in RunDirectory.open(done("nfa-fig1").path).records("alignment"):
        assert record["nfa"] > record["corrupted"]
        assert 0 < record["eigenvalue_spread"] < math.sqrt(15)


def test_curves_start_where_they_must(done: Run) -> None:
    records = RunDirectory.open(done("nfa-fig2").path).records("nfa")
    assert len(records) == 2 * 2 * 3 * 2 * 2  # varied, layers, steps, scales, seeds
    start = [r for r in records if r["step"] == 0]
    assert all(r["centered"] is None and r["uncentered"] > 0 for r in start)
    # at initialisation a factor on the first layer changes neither side of the uncentred ansatz but their scale
    first = {(r["seed"], r["scale"]): r["uncentered"] for r in start if r["layer"] == 1 and r["varied"] == "first"}
    assert first[0, 0.01] == pytest.approx(first[0, 1.0], rel=1e-4)
    assert all(0 <= r["centered"] <= 1 + 1e-9 for r in records if r["step"] > 0)


def test_the_figure_of_faces_says_what_its_numbers_are(results: Callable[[str], Results[Any]]) -> None:
    found = results("nfa-fig9")
    drawn = [place.get_title() for place in FIG9.figure(found).axes]
    (record,) = found.records("diagonals")
    assert f"{record['pearson']:.2f}" in drawn[1]
    assert "one draw" in drawn[2]
    assert f"mean over draws {record['corrupted']:.2f}" in drawn[2]


def test_a_start_that_failed_is_not_in_the_way(tmp_path: Path) -> None:
    small = {**SMALL["nfa-fig9"], "epochs": 1.0}
    run = partial(reproduce, "nfa-fig9", Options(device="cpu"), out=tmp_path / "x")
    assert_refused("digits has no option", run, values={**small, "data": "digits"})
    run(values=small)
