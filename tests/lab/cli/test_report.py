from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramscope_lab.cli.app import app
from made_up_runs import write_run


def test_report_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "x", epochs=1)

    def report(*options: str) -> str:
        result = CliRunner().invoke(app, ["report", str(run.path), *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    page = run.path / "figures" / "report.html"
    assert json.loads(report("--json")) == {"page": str(page)}
    assert page.stat().st_size > 1e6
    assert "report.html" in report("--live")  # the run has ended, so the page is written once
    assert 'http-equiv="refresh"' not in page.read_text(encoding="utf-8")
