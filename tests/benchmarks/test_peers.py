from __future__ import annotations

import pytest
import torch

from benchmarks import peers
from benchmarks.__main__ import run_benchmark
from benchmarks.timing import peak_extra_bytes
from refusals import assert_refused


def test_peers_compute_the_same() -> None:
    for case in peers.linearity_sklearn(torch.Generator().manual_seed(0), 0.05):
        assert case.difference(case.ours(), case.theirs()) < peers.SINGLE


def test_a_row_and_a_missing_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("no-such-package", peers.egop_xrfm), ("scikit-learn", peers.linearity_sklearn)]
    monkeypatch.setattr(peers, "CASES", cases)
    missing, time, memory, *_ = peers.run(seconds=0.0, scale=0.05)
    assert missing.met is None
    assert "pip install no-such-package" in missing.line()
    assert (time.unit, memory.unit) == ("ms", "MB")
    for row in (time, memory):
        assert row.met == (row.ratio >= 1)
        assert row.baseline == "gramscope"
    assert "results agree to" in time.line()


def test_different_results_and_devices_are_refused() -> None:
    case = peers.PeerCase("sum", "nobody", lambda: 1.0, lambda: 2.0, lambda a, b: abs(a - b))
    assert_refused("gramscope and nobody differ by 1.0e\\+00", lambda: list(peers.measure(case, 0.0)))
    assert_refused("device = cuda", next, run_benchmark("peers", device="cuda"))


def test_peak_memory_is_that_of_the_work_alone() -> None:
    entries = 16_000_000
    torch.ones(entries)  # freed, and not counted
    found = peak_extra_bytes(lambda: torch.ones(entries).sum())
    assert 3.6 * entries < found < 6 * entries
