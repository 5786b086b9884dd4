from __future__ import annotations

import pytest
import torch

from benchmarks import peer_cases, peers
from benchmarks.__main__ import run_benchmark
from benchmarks.timing import peak_extra_bytes
from refusals import assert_refused


@pytest.mark.parametrize(
    "maker", [peer_cases.linearity_inverse, peer_cases.linearity_sklearn, peer_cases.collapse_plain]
)
def test_peers_compute_the_same(maker: peer_cases.CaseMaker) -> None:
    for case in maker(torch.Generator().manual_seed(0), 0.05):
        assert case.difference(case.ours(), case.theirs()) < peer_cases.SINGLE


def test_a_row_and_a_missing_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("no-such-package", peer_cases.egop_xrfm), ("", peer_cases.linearity_inverse)]
    monkeypatch.setattr(peers, "CASES", cases)
    threads = torch.get_num_threads()
    missing, first, _ = peers.run(seconds=0.0, scale=0.05)
    assert torch.get_num_threads() == threads
    assert missing.time is missing.met is None
    assert "pip install no-such-package" in missing.line()
    assert first.time is not None
    assert first.memory is not None
    assert first.met == (first.time >= 1 and first.memory >= 1)
    assert f"time {first.time:6.2f} ({first.peer_ms:.4g} ms / {first.ours_ms:.4g} ms)" in first.line()


def test_different_results_and_devices_are_refused() -> None:
    case = peer_cases.PeerCase("sum", "nobody", lambda: 1.0, lambda: 2.0, lambda a, b: abs(a - b))
    assert_refused("gramscope and nobody differ by 1.0e\\+00", peers.measure, case, 0.0)
    assert_refused("device = cuda", next, run_benchmark("peers", device="cuda"))


def test_peak_memory_is_that_of_the_work_alone() -> None:
    entries = 16_000_000
    torch.ones(entries)  # freed, and not counted
    found = peak_extra_bytes(lambda: torch.ones(entries).sum())
    assert 3.6 * entries < found < 6 * entries
