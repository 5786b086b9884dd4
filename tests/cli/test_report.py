from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramscope.cli.app import app
from gramscope.errors import InputError
from made_up_runs import write_run


def test_report_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    result = CliRunner().invoke(app, ["report", str(run.path), "--no-figures", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found == {"page": str(run.path / "figures" / "report.html"), "figures": []}
    assert Path(found["page"]).stat().st_size > 1e6


def test_live_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    with pytest.raises(InputError, match="--live"):
        CliRunner().invoke(app, ["report", str(run.path), "--live", "--json"], catch_exceptions=False)
