"""Fitted exponents, flops beside the peak, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from benchmarks import scale
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.scale import Case, Growth, cases, fitted_exponent, processes
from benchmarks.timing import Row


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_exponents_are_those_of_the_larger_sizes(power: float) -> None:
    sizes = [1, 10, 20, 50]
    assert fitted_exponent(sizes, [100.0, *(size**power for size in sizes[1:])]) == pytest.approx(power)


def test_a_case_is_timed_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Case("waiting", "n", (2, 4, 8), 1, lambda n: lambda: time.sleep(n / 100), lambda n: 1e3 * n)
    monkeypatch.setattr(scale, "cases", lambda device: iter([waits]))
    monkeypatch.setattr(scale, "PEAK_SIDE", 8)
    monkeypatch.setattr(scale, "processes", lambda: Growth("p", "processes", (1, 2), (1.0, 1.0), 0.0, 0.0))
    rows = list(scale.run(seconds=0.0))
    row = next(row for row in rows if row.case == "waiting")
    assert row.exponent == pytest.approx(1.0, abs=0.4)
    assert row.gflops is not None
    assert row.gflops < 8e3 / 0.08 / 1e9
    assert "ms at n = 2 4 8  exponent" in row.line()
    assert [r.share for r in rows[:2]] == [1.0, 1.0]


def test_every_case_runs_at_its_smallest_size() -> None:
    for case in cases("cpu"):
        case.make(64 if case.variable == "d = k" else case.sizes[0])()
        assert case.flops is None or case.flops(64) > 0


@pytest.mark.slow
def test_processes_are_timed() -> None:
    row = processes((2,))
    assert row.sizes == (2,)
    assert row.milliseconds[0] > 0


def test_bench_all_runs_them_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []

    def run(name: str, **options: object) -> Iterator[Row | Growth]:
        yield Growth("c", "n", (1, 2), (1.0, 2.0), 1.0, 1.0) if name == "scale" else Row(name, "m", 1.0, "b", 1.0)
        printed.append(capsys.readouterr().out)  # before the benchmark goes on

    monkeypatch.setattr("benchmarks.__main__.run_benchmark", run)
    for arguments in (["--json"], []):
        assert main(["all", *arguments]) == 0
        if arguments:
            out = json.loads(capsys.readouterr().out)
            assert list(out) == list(BENCHMARKS)
            assert out["scale"][0]["exponent"] == 1.0
            printed.clear()
    assert len(printed) == len(BENCHMARKS)
    for name, text in zip(BENCHMARKS, printed, strict=True):
        assert text.startswith(f"{name} on cpu")
        assert ("1 2 ms at n = 1 2" if name == "scale" else "1.000 ms") in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all --seconds -1", "seconds = -1: must be a finite number of at least 0"),
        ("measure --device foo", "device = 'foo'"),
        ("measure --steps 10", "measure takes only --device, --seconds and --json"),
        ("optimizers --steps 0", "a run needs at least one step"),
    ],
)
def test_wrong_use_is_one_clear_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
