"""Runs and their panels that the report's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gramscope_lab.report.figures import Panel
from gramscope_lab.report.page import all_panels
from gramscope_lab.report.read import Runs, read_runs
from made_up_runs import write_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, and claims; not to be written to."""
    return write_group(tmp_path_factory.mktemp("report") / "both")


@pytest.fixture(scope="session")
def runs(group: Path) -> Runs:
    return read_runs([group])


@pytest.fixture(scope="session")
def panels(runs: Runs) -> dict[str, Panel]:
    return {panel.key: panel for panel in all_panels(runs)}
