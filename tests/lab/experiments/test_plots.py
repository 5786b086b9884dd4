"""Averages behind the curves."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import pytest

from gramscope.errors import StorageError
from gramscope_lab.experiments.plots import (
    PALETTE,
    band,
    curve,
    figure_style,
    mean,
    panels,
    save_figure,
)
from gramscope_lab.runs.directory import RunDirectory


def test_curve_averages_equal_x_and_leaves_out_what_is_missing() -> None:
    records = [{"x": 2, "y": 1.0}, {"x": 1, "y": 5.0}, {"x": 2, "y": 4.0}, {"x": 1, "y": None}, {"x": 3}]
    xs, means, spreads = curve(records, "x", "y")
    assert xs == [1, 2]
    assert means == [5.0, 2.5]
    assert spreads == [0.0, pytest.approx(math.sqrt(4.5))]


def test_the_mean_of_nothing_is_no_number() -> None:
    assert math.isnan(mean([]))
    assert mean([1.0, 2.0]) == 1.5


def test_band_is_two_deviations_wide() -> None:
    page, axes = panels(1, 1)
    band(axes[0, 0], [{"x": 0, "y": 0.0}, {"x": 0, "y": 2.0}, {"x": 1, "y": 1.0}], "x", "y", index=1)
    line, filled = axes[0, 0].lines[0], axes[0, 0].collections[0]
    assert line.get_color() == PALETTE[1]
    heights = filled.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(1 + 2 * math.sqrt(2))
    assert page.axes == [axes[0, 0]]


def test_style_does_not_leak() -> None:
    before = mpl.rcParams["font.size"]
    with figure_style():
        assert mpl.rcParams["font.size"] == 8
    assert mpl.rcParams["font.size"] == before


def test_a_full_disk_leaves_the_figure_that_was_there(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    figure, _ = panels(1, 1)
    (tmp_path / "figures").mkdir()
    picture, _ = save_figure(figure, RunDirectory(tmp_path), "one")
    content, before = picture.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*one\.png"):
            save_figure(figure, RunDirectory(tmp_path), "one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert picture.read_bytes() == content
    assert sorted(path.name for path in picture.parent.iterdir()) == ["one.pdf", "one.png"]
