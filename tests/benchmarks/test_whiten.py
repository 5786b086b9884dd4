"""The benchmark of whitened steps: what it compares, how long it takes and what it says of their accuracy."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from benchmarks import whiten
from benchmarks.whiten import Case


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whiten, "CASES", (Case(20, 30, cpu_goal=1e9), Case(24, 24, cpu_goal=0.0)))
    monkeypatch.setattr(whiten, "STEPS", (2e-2,))


def test_every_case_is_compared_with_muon_and_its_accuracy_measured() -> None:
    rows = list(whiten.run(seconds=0.0))
    assert [row.method for row in rows] == 2 * ["Muon", "GramWhitened(SGD)", "SGD"]
    assert [row.ratio for row in rows if row.method == "Muon"] == [1.0, 1.0]
    first, second = (row for row in rows if row.note)
    assert (first.met, second.met) == (True, False)
    for row in (first, second):
        excess, gram = (float(x) for x in re.findall(r"(-?[\d.]+) %|off by (.*)", row.note) for x in x if x)
        assert -1e-4 < excess < 2.2
        assert gram < 5e-7


def test_rows_come_one_case_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def problem(case: Case, step: float, device: torch.device | str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        started.append(case.k)
        return found(case, step, device)

    found = whiten._problem
    monkeypatch.setattr(whiten, "_problem", problem)
    rows = whiten.run(seconds=0.0)
    list(itertools.islice(rows, 3))
    assert started == [20]


def test_large_matrices_are_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whiten, "_DECOMPOSED", 20)
    first, second = (row for row in whiten.run(seconds=0.0) if row.note)
    assert "excess distance" in first.note
    assert "excess distance" not in second.note


def test_the_time_is_that_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compare(*ways: object, **options: object) -> dict[str, float]:
        asked.append((options["seconds"], options["least"]))
        return timed(*ways, **options)  # type: ignore[arg-type]

    timed = whiten.compare
    monkeypatch.setattr(whiten, "compare", compare)
    list(whiten.run(seconds=0.01))
    assert asked == [(0.01, 1), (0.01, 1)]


def test_gradients_have_the_size_of_the_step_and_cancel() -> None:
    W, gradients = whiten._problem(Case(20, 30), 2e-2, "cpu")
    for gradient in gradients:
        assert float(gradient.norm() / W.norm()) == pytest.approx(2e-2, rel=1e-5)
    assert torch.stack(gradients).sum(0).norm() < 0.2 * 2e-2 * W.norm()
