from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from made_up_runs import write_run

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    write_run(Path("runs/x"), epochs=1, layers=(), snapshots=False)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", DOCUMENT, flags=re.MULTILINE | re.DOTALL))
    with torch.random.fork_rng():
        exec(compile(code, "report.md", "exec"), {})
    assert Path("runs/x/figures/report.html").exists()
    text = Path("runs/mine/figures/report.html").read_text(encoding="utf-8")
    assert 'id="layers-linearity"' in text
    assert list(Path("runs/board").glob("events*"))
