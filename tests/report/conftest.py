"""Run directories that the report's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_up_runs import write_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, and claims; not to be written to."""
    return write_group(tmp_path_factory.mktemp("report") / "both")
