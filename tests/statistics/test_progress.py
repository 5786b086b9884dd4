"""A bar on terminals, nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import gramscope as gs
from cases import BY_NAME
from gramscope.statistics.collect import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = BY_NAME["mlp"].make()
    for stream, shown, expected in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        gs.measure(model, [(x, y)] * 3, measures="weight_norm", progress=shown)
        text = stream.getvalue()
        assert ("collecting" in text and "measuring" in text) == expected
        assert bool(text) == expected
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    gs.Monitor(model, (x, y), measures="weight_norm")
    assert not stream.getvalue()


def test_the_bar_counts_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("collecting", 7) as advance:
        assert "0/7" in stream.getvalue()
        for _ in range(7):
            advance()
    assert "7/7" in stream.getvalue()


def test_statistics_print_their_size() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), torch.nn.CrossEntropyLoss())
    assert repr(stats) == f"Statistics({len(x)} samples, 3 layers, with Covariance, Features, Gradient)"
    shown = [repr(layer) for layer in stats]  # shapes, no numbers
    assert all("weight (" in text and "tensor" not in text for text in shown)
