from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramscope_lab.cli.app import app
from made_up_runs import write_run
from refusals import assert_refused


def test_report_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    arguments = ["report", str(run.path), "--no-figures", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found == {"page": str(run.path / "figures" / "report.html"), "figures": []}
    assert Path(found["page"]).stat().st_size > 1e6
    assert_refused("--live", CliRunner().invoke, app, [*arguments, "--live"], catch_exceptions=False)


def test_live_names_wrong_ports_and_open_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "x", epochs=1)

    def live(*options: str) -> str:
        return CliRunner().invoke(app, ["report", str(run.path), "--live", *options], catch_exceptions=False).output

    assert_refused("port 99999 does not exist", live, "--port", "99999")
    monkeypatch.setattr("gramscope_lab.report.live.LiveServer.serve_forever", lambda self: None)
    assert "warning" in live("--host", "0.0.0.0", "--port", "0", "--allow-host", "lab.example")
    assert "warning" not in live("--port", "0")
