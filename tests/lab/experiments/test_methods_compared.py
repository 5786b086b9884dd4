"""Choosing settings from records, and what is read off accuracy curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gramscope_lab.experiments import methods_compared
from gramscope_lab.experiments.experiment import Options, Results, part_name
from gramscope_lab.experiments.methods_compared import Curve, choose, compare_finals, settings_of
from gramscope_lab.runs.directory import RunDirectory
from refusals import assert_refused


def curve(*seeds: list[float]) -> Curve:
    records = [{"epoch": float(e), "test_accuracy": v} for values in seeds for e, v in enumerate(values)]
    return Curve("lr 0.1", records)


def test_curve_reads_means_over_seeds() -> None:
    found = curve([0.1, 0.6, 0.5], [0.1, 0.8, 0.7])
    line = found.line
    assert line.final == pytest.approx(0.6)
    assert line.best == (pytest.approx(0.7), 1.0)
    assert line.reaches(0.65) == 1.0
    assert math.isinf(line.reaches(0.9))
    assert line.at(2.0) == pytest.approx(0.6)
    assert line.deviations[1:] == [pytest.approx(0.2 / math.sqrt(2))] * 2
    difference, text = compare_finals(found, curve([0.0, 0.0, 0.4], [0.0, 0.0, 0.4]))
    assert difference == pytest.approx(20.0)
    assert text == "60.0 % and 40.0 % (+20.0 ± 10.0)"


def written(path: Path, runs: dict[str, list[dict[str, Any]]]) -> RunDirectory:
    root = RunDirectory.create(path, {"experiment": "x"})
    RunDirectory.create(path / "sgd-digits", {"part": "sgd"})
    for name, values in runs.items():
        run = RunDirectory.create(path / "sgd-digits" / name, {})
        run.append(*({"kind": "evaluation", "epoch": float(e), **v} for e, v in enumerate(values)))
    return root


def test_the_setting_is_chosen_on_the_validation_part(tmp_path: Path) -> None:
    good, bad = {"test_accuracy": 0.9, "validation_accuracy": 0.5}, {"test_accuracy": 0.5, "validation_accuracy": 0.9}
    runs = {f"lr-{lr},seed-{seed}": [values] for lr, values in (("0.1", good), ("1e-05", bad)) for seed in (0, 1)}
    root = written(tmp_path / "x", runs)
    found = choose(Results("x", None, Options(), root), "sgd-digits")
    assert found.setting == "lr 1e-05"
    assert len(found.records) == 2
    assert_refused("no evaluations of vcl-digits", settings_of, Results("x", None, Options(), root), "vcl-digits")


def test_a_validation_part_is_cut_only_where_something_is_chosen_on_it() -> None:
    chooses, fixed = methods_compared.GRAM_FIG2.quick, methods_compared.GRAM_FIG6.quick
    for settings, held in ((chooses, 0.1), (fixed, 0)):
        part = methods_compared.parts(settings, Options())[0]
        assert part.config.data.validation == held
    assert part_name("sgd", "some/folder/mine.npz") == "sgd-mine"
