"""Every code block of the README runs, every command it names exists, every example runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_readme_shows_both_commands_on_its_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:25])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks("python")
    assert len(found) >= 3
    code = "\n".join(found)
    program = f"import torch\ntorch.manual_seed(0)\n{code}"
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "target_linearity" in result.stdout


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("gramscope ")]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_console_commands_exist_with_these_options(command: list[str]) -> None:
    """Each command's own help names every option the README uses."""
    words = [word for word in command[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
    groups = {"data", "theory", "bench", "runs"}
    name = words[:2] if words[0] in groups and words[0] != "bench" else words[:1]
    arguments = [sys.executable, "-m", "gramscope", *name, "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, env={"COLUMNS": "200", "PATH": ""})
    assert result.returncode == 0, result.stderr
    for option in (word for word in command if word.startswith("--")):
        assert option in result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    result = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
