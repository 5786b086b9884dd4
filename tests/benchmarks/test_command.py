"""The command, and steps of optimizers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import vcl_speed
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.timing import Row


def test_steps_and_their_memory_have_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    small = vcl_speed.Case(lambda g: vcl_speed._hidden_layer(g, d=20, k=16), (20,), 4)
    monkeypatch.setattr(vcl_speed, "CASES", {"3072→256": small, "ViT": vcl_speed.CASES["ViT"]})
    monkeypatch.setattr(vcl_speed, "LARGE", {"3072→1024": small})
    rows = list(vcl_speed.run(seconds=0.0))
    methods = ["SGD", "AdamW", "Muon", "VCL recursive", "VCL exact", "FreeMuon"]
    assert [row.method for row in rows] == [*methods, "SGD", "AdamW", "Muon", "FreeMuon", "Muon", "FreeMuon"]
    for row in rows:
        assert (row.goal != "") == (row.method == "FreeMuon")
    assert rows[-1].unit == "MB"
    assert rows[-1].met == (rows[-1].ratio <= float(rows[-1].goal.removeprefix("≤ ")))


def test_steps_are_timed_with_torch_and_numpy_alone() -> None:
    code = """
import sys
for name in "matplotlib rich typer pydantic scipy sklearn pooch plotly safetensors filelock tomli_w".split():
    sys.modules[name] = None  # as if it were not installed
from benchmarks import __main__, vcl_speed
vcl_speed.CASES, vcl_speed.LARGE = {"ViT": vcl_speed.CASES["ViT"]}, {}
sys.exit(__main__.main(["vcl", "--seconds", "0"]))
"""
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "FreeMuon" in found.stdout


def test_bench_all_runs_them_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []

    def run(name: str, **options: object) -> Iterator[Row]:
        yield Row(name, "m", 1.0, "b", 1.0)
        printed.append(capsys.readouterr().out)  # before the benchmark goes on

    def threads(count: int) -> None:
        asked.append(count)

    asked: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads)
    monkeypatch.setattr("benchmarks.__main__.run_benchmark", run)
    for arguments in (["--json"], []):
        assert main(["all", *arguments]) == 0
        if arguments:
            out = json.loads(capsys.readouterr().out)
            assert list(out) == list(BENCHMARKS)
            assert out["whiten"][0]["ratio"] == 1.0
            printed.clear()
    assert len(printed) == len(BENCHMARKS)
    assert asked == 2 * len(BENCHMARKS) * [torch.get_num_threads()]
    for name, text in zip(BENCHMARKS, printed, strict=True):
        assert text.startswith(f"{name} on cpu")
        assert "1.000 ms" in text


def test_a_stopped_benchmark_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, **options: object) -> Iterator[Row]:
        yield Row(name, "m", 1.0, "b", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.__main__.run_benchmark", run)
    assert main(["whiten"]) == 130
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all --seconds -1", "seconds = -1: must be a finite number of at least 0"),
        ("measure --device foo", "device = 'foo'"),
        ("measure --steps 10", "measure takes only --device, --seconds and --json"),
        ("optimizers --steps 0", "a run needs at least one step"),
        ("optimizers --method Moun", "method = ['Moun']: there are FreeMuon;"),
        ("optimizers --seeds 0", "seeds = 0"),
        ("optimizers --print", "--print shows the runs in --records"),
    ],
)
def test_wrong_use_is_one_clear_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
