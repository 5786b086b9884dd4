"""Fitted exponents, flops beside the peak, and the command."""

from __future__ import annotations

import json
import time

import pytest

from gramscope.bench import benchmarks, scale
from gramscope.bench.scale import Case, Growth, cases, fitted_exponent, processes
from gramscope.bench.timing import Row
from gramscope.cli import app


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_exponents_are_those_of_the_larger_sizes(power: float) -> None:
    sizes = [1, 10, 20, 50]
    assert fitted_exponent(sizes, [100.0, *(size**power for size in sizes[1:])]) == pytest.approx(power)


def test_a_case_is_timed_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Case("waiting", "n", (2, 4, 8), 1, lambda n: lambda: time.sleep(n / 100), lambda n: 1e3 * n)
    monkeypatch.setattr(scale, "cases", lambda device: iter([waits]))
    monkeypatch.setattr(scale, "PEAK_SIDE", 8)
    monkeypatch.setattr(scale, "processes", lambda: Growth("p", "processes", (1, 2), (1.0, 1.0), 0.0, 0.0))
    rows = scale.run(seconds=0.0)
    row = next(row for row in rows if row.case == "waiting")
    assert row.exponent == pytest.approx(1.0, abs=0.4)
    assert row.gflops is not None
    assert row.gflops < 8e3 / 0.08 / 1e9
    assert "exponent" in row.line()
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
    def run(name: str, **options: object) -> list[Row] | list[Growth]:
        if name == "scale":
            return [Growth("c", "n", (1, 2), (1.0, 2.0), 1.0, 1.0)]
        return [Row("c", "m", 1.0, "b", 1.0)]

    monkeypatch.setattr("gramscope.cli.bench.run_benchmark", run)
    for arguments in (["--json"], []):
        monkeypatch.setattr("sys.argv", ["gramscope", "bench", "all", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
        assert not end.value.code
        out = capsys.readouterr().out
        if arguments:
            assert list(json.loads(out)) == list(benchmarks.BENCHMARKS)
            assert json.loads(out)["scale"][0]["exponent"] == 1.0
        else:
            assert "1 2" in out
