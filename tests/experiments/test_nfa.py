"""Each nfa experiment end to end, as small as it goes; nfa-fig7 and 8 are nfa-fig2 on other inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gramscope.errors import InputError
from gramscope.experiments.experiment import Options, Results
from gramscope.experiments.nfa_faces import FIG9
from gramscope.experiments.running import Reproduction, reproduce
from gramscope.experiments.settings import with_values
from gramscope.runs.directory import RunDirectory

CURVES = {"seeds": (0, 1), "scales": (0.01, 1.0), "n": 32, "d": 8, "width": 12, "steps": 20, "every": 10}
SMALL: dict[str, dict[str, Any]] = {
    "nfa-fig1": {"seeds": (0, 1), "n": 64, "d": 8, "width": 16, "steps": 100, "corruptions": 2},
    "nfa-fig2": CURVES,
    "nfa-fig3": {"seeds": (0, 1), "size": 32, "balances": (0.25, 1.0), "nets": 3},
    "nfa-fig4": CURVES,
    "nfa-fig5": CURVES,
    "nfa-fig6": {"seeds": (0,), "n": 16, "d": 16, "widths": (16, 64), "alphas": (0.0, 1.0, 4.0), "nets": 2},
    "nfa-fig9": {"seeds": (0,), "samples": 40, "image_size": 12, "width": 8, "epochs": 2, "corruptions": 2},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reproduction]:
    """Runs an experiment once for all tests."""
    return cache(
        lambda name: reproduce(
            name, Options(device="cpu"), values=SMALL[name], out=tmp_path_factory.mktemp("runs") / name
        )
    )


@pytest.mark.parametrize("name", SMALL)
def test_runs_end_to_end(name: str, done: Callable[[str], Reproduction]) -> None:
    found = done(name)
    assert found.claims
    assert all(claim.measured and "nan" not in claim.measured for claim in found.claims)
    assert found.figures[0].stat().st_size > 5000


def test_plot_only_repeats_the_claims(done: Callable[[str], Reproduction]) -> None:
    found = done("nfa-fig6")
    again = reproduce("nfa-fig6", Options(device="cpu"), out=found.path, plot_only=True)
    assert again.claims == found.claims


def test_corruption_loses_alignment(done: Callable[[str], Reproduction]) -> None:
    for record in RunDirectory.open(done("nfa-fig1").path).records("alignment"):
        assert record["nfa"] > record["corrupted"]
        assert 0 < record["eigenvalue_spread"] < math.sqrt(15)


def test_curves_start_where_they_must(done: Callable[[str], Reproduction]) -> None:
    records = RunDirectory.open(done("nfa-fig2").path).records("nfa")
    assert len(records) == 2 * 2 * 3 * 2 * 2  # varied, layers, steps, scales, seeds
    start = [r for r in records if r["step"] == 0]
    assert all(r["centered"] is None and r["uncentered"] > 0 for r in start)
    # at initialisation a factor on the first layer changes neither side of the uncentred ansatz but their scale
    first = {(r["seed"], r["scale"]): r["uncentered"] for r in start if r["layer"] == 1 and r["varied"] == "first"}
    assert first[0, 0.01] == pytest.approx(first[0, 1.0], rel=1e-4)
    assert all(0 <= r["centered"] <= 1 + 1e-9 for r in records if r["step"] > 0)


def test_the_figure_of_faces_says_what_its_numbers_are(done: Callable[[str], Reproduction]) -> None:
    found = done("nfa-fig9")
    settings = with_values("nfa-fig9", FIG9.quick, SMALL["nfa-fig9"])
    results = Results("nfa-fig9", settings, Options(), RunDirectory.open(found.path))
    drawn = [place.get_title() for place in FIG9.figure(results).axes]
    (record,) = results.records("diagonals")
    assert f"{record['pearson']:.2f}" in drawn[1]
    assert "one draw" in drawn[2]
    assert f"mean over draws {record['corrupted']:.2f}" in drawn[2]


def test_a_start_that_failed_is_not_in_the_way(tmp_path: Path) -> None:
    small = {**SMALL["nfa-fig9"], "epochs": 1.0}
    with pytest.raises(InputError, match="digits has no option"):
        reproduce("nfa-fig9", Options(device="cpu"), values={**small, "data": "digits"}, out=tmp_path / "x")
    reproduce("nfa-fig9", Options(device="cpu"), values=small, out=tmp_path / "x")
    with pytest.raises(InputError, match="image_size = 12, not 13"):
        reproduce("nfa-fig9", Options(device="cpu"), values={**small, "image_size": 13}, out=tmp_path / "x")
