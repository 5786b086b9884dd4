"""All cases in several processes of torch.distributed: one torchrun launch for each number of processes runs all of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def cases() -> list[str]:
    found = []
    for path in sorted(FOLDER.glob("*_cases.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        found += [f"{path.stem}.{label}" for label in names if label.startswith("case_")]
    return found


@pytest.mark.parametrize("processes", [2, 4])
def test_every_case_passes(processes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    done = subprocess.run(
        [*command, str(FOLDER / "worker.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed ")]
    failed = [line for line in done.stdout.splitlines() if line.endswith("failed")]
    assert done.returncode == 0, f"{failed}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert passed == cases()
