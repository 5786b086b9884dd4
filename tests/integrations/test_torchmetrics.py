"""Metrics agree with the functions of the same name on all samples, under any split into batches and processes."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.utilities.checks import check_forward_full_state_property

import gramscope as gs
from gramscope.integrations.torchmetrics import LinearCKA, NeuralCollapse, Surrogate, TargetLinearity
from refusals import assert_refused
from two_metrics import data
from two_processes import answers

H, LABELS = data()
Y = H[:, :2].square() + 1.0
double = partial(torch.tensor, dtype=torch.float64)
COLLAPSE = gs.neural_collapse(H, LABELS)
CASES: list[tuple[Any, torch.Tensor, Any]] = [
    (TargetLinearity(4, num_classes=3), LABELS, gs.target_linearity(H, LABELS)),
    (TargetLinearity(4, num_targets=2, ridge=3.0, intercept=True), Y, gs.target_linearity(H, Y, 3.0, True)),
    (TargetLinearity(4), Y[:, 0], gs.target_linearity(H, Y[:, 0])),
    (Surrogate(4, num_classes=3), LABELS, gs.surrogate(H, LABELS)),
    (
        Surrogate(4, num_targets=2, normalized=True, center=True),
        Y,
        gs.surrogate(H, Y, normalized=True, center=True),
    ),
    (
        NeuralCollapse(4, 3),
        LABELS,
        {name: double(getattr(COLLAPSE, name)) for name in NeuralCollapse.NAMES},
    ),
    (LinearCKA(4, 2), Y, gs.linear_cka(H, Y)),
]


@pytest.mark.parametrize(("metric", "targets", "expected"), CASES)
def test_batches_give_the_value_of_all_samples(metric: Any, targets: torch.Tensor, expected: Any) -> None:
    metric.reset()
    for i, j in ((0, 7), (7, 8), (8, 60)):
        metric.update(H[i:j], targets[i:j])
    torch.testing.assert_close(metric.compute(), expected, check_dtype=False, rtol=1e-9, atol=1e-12)
    copied = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(copied.compute(), metric.compute())
    metric.reset()
    assert metric.update_count == 0
    value = metric(H, targets)  # forward: the value of this batch, which is all there is
    torch.testing.assert_close(value, expected, check_dtype=False, rtol=1e-9, atol=1e-12)


def test_forward_gives_the_batch_and_keeps_the_total() -> None:
    metric = Surrogate(4, num_targets=2)
    first, second = metric(H[:20], Y[:20]), metric(H[20:], Y[20:])
    torch.testing.assert_close(first, gs.surrogate(H[:20], Y[:20]))
    torch.testing.assert_close(second, gs.surrogate(H[20:], Y[20:]))
    torch.testing.assert_close(metric.compute(), gs.surrogate(H, Y))


@pytest.mark.parametrize("metric", [TargetLinearity, Surrogate, NeuralCollapse])
def test_forward_needs_no_full_update(metric: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By torchmetrics' own check, which compares both ways of ``forward``; it raises where they differ."""
    sizes = {"num_features": 4, "num_classes": 3}
    check_forward_full_state_property(metric, sizes, {"features": H, "targets": LABELS}, [2], reps=2)
    assert "full_state_update" in capsys.readouterr().out


def test_states_of_two_metrics_merge() -> None:
    a, b = TargetLinearity(4, 3), TargetLinearity(4, 3)
    a.update(H[:35], LABELS[:35])
    b.update(H[35:], LABELS[35:])
    a.merge_state(b)
    torch.testing.assert_close(a.compute(), gs.target_linearity(H, LABELS))


def test_metrics_of_a_collection_share_one_state() -> None:
    collection = MetricCollection([TargetLinearity(4, 3), Surrogate(4, 3), NeuralCollapse(4, 3)])
    for i in range(0, 60, 20):
        collection.update(H[i : i + 20], LABELS[i : i + 20])
    values = collection.compute()
    assert len(collection.compute_groups) == 1
    torch.testing.assert_close(values["Surrogate"], gs.surrogate(H, LABELS))
    assert float(values["nc1"]) == pytest.approx(COLLAPSE.nc1)


def test_two_processes_give_the_value_of_all_samples(tmp_path: Path) -> None:
    collection = MetricCollection([TargetLinearity(4, 3), Surrogate(4, 3), NeuralCollapse(4, 3)])
    collection.update(H, LABELS)
    cka = gs.linear_cka(H, H[:, :2] ** 2)
    expected = [float(value) for _, value in sorted({**collection.compute(), "LinearCKA": cka}.items())]
    for lines in answers("two_metrics.py", tmp_path):
        assert len(lines) == 2, lines
        assert [float(word) for word in lines[0].split()] == pytest.approx(expected, rel=1e-9)
        assert float(lines[1]) == pytest.approx(float(gs.target_linearity(H, LABELS)))


def test_values_are_drawn() -> None:
    plt.switch_backend("Agg")
    metric = NeuralCollapse(4, 3)
    metric.update(H, LABELS)
    _, axes = metric.plot()
    assert len(axes.get_lines()) == len(NeuralCollapse.NAMES)
    _, axes = TargetLinearity(4).plot([torch.tensor(0.1), torch.tensor(0.5)])
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([0.1, 0.5])
    plt.close("all")


def test_wrong_arguments_are_refused() -> None:
    assert_refused("num_features is 0", Surrogate, 0)
    assert_refused("no samples", TargetLinearity(4)._merged)
    assert_refused("width 4, but TargetLinearity was made for 5", TargetLinearity(5).update, H, Y)
    assert_refused("2 columns, but LinearCKA was made for 4", LinearCKA(4).update, H, Y)
    assert_refused(r"labels \[2\]", NeuralCollapse(4, 2).update, H, LABELS)
    assert_refused("vector of integer labels", NeuralCollapse(4, 2).update, H, Y)
