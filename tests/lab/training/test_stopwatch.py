from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gramscope_lab.training import stopwatch


def test_what_happens_while_paused_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watch = stopwatch.Stopwatch(torch.device("cpu"), 5.0)
    now[0] += 2
    with watch.paused():
        now[0] += 40
        assert watch.seconds == 7.0
    now[0] += 1
    assert watch.seconds == 8.0
