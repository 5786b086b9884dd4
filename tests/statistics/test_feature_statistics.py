"""Rows in place of HᵀH and projected labels: exact under merging, and right within the stated error."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gramscope as gs
from cases import normal
from gramscope.linalg.budget import Budget
from gramscope.linalg.moments import moments
from gramscope.measures.linearity import label_rows
from gramscope.measures.table import Table, format_cell
from gramscope.statistics import features as feature_statistics
from gramscope.statistics.features import Features, projected
from gramscope.statistics.sums import Plan, Seen


def labelled(n: int, d: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(c, (n,), generator=generator)
    centres = torch.randn(c, d, generator=generator, dtype=torch.float64)
    return centres[y] + torch.randn(n, d, generator=generator, dtype=torch.float64), y


def features(H: Tensor, y: Tensor, lengths: list[int], gram: bool | str = True, memory: int = 2**28) -> Features:
    """The statistics of rows that come in batches of these lengths."""
    found = Features("h", H[:0], Plan((Features,), gram=gram, budget=Budget(memory)))
    for rows, target in zip(H.split(lengths), y.split(lengths), strict=True):
        found.add(Seen("h", H[:0], SimpleNamespace(), rows=rows, target=target))  # type: ignore[arg-type]
    found.finish()
    return found.whole()


def same(a: Features, b: Features) -> None:
    assert (a.n, a.labels, a.labelled) == (b.n, b.labels, b.labelled)
    for name in ("mean_h", "mean_y", "C_hh", "C_hy", "C_yy"):
        left, right = getattr(a.moments, name), getattr(b.moments, name)
        assert (left is None) == (right is None)
        assert left is None or torch.allclose(left, right, atol=1e-9), name


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5),
    st.sampled_from(["few labels", "labels beyond the limit", "real"]),
    st.integers(0, 4),
)
def test_batches_and_merging_in_any_order_do_not_matter(lengths: list[int], kind: str, first: int) -> None:
    n = sum(lengths)
    if n == 0:
        return
    H, y = labelled(n, 4, 9, seed=n)
    if kind == "real":
        y = H[:, :2] @ H[:2, :2]
    elif kind == "few labels":
        y = y % 4
    else:
        y[: lengths[0]] %= 4  # the first part may have few labels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_statistics, "CLASSES", 5)
        whole = features(H, y, [n])
        same(features(H, y, lengths), whole)
        parts = [features(h, t, [len(h)]) for h, t in zip(H.split(lengths), y.split(lengths), strict=True) if len(h)]
        parts = parts[first:] + parts[:first]
        same(reduce(Features.merge, parts), whole)
        same(reduce(lambda a, b: b.merge(a), parts), whole)


def test_classes_from_moments_are_those_of_the_rows() -> None:
    H, y = labelled(200, 5, 6)
    y[y == 4] = 3  # a class without samples
    classes, expected = features(H, y, [60, 140]).classes, moments(H, label_rows(y))
    assert classes is not None
    (counts, means), (few, of_few) = classes.class_means(), expected.class_means()
    assert counts[counts > 0].tolist() == few.tolist()
    assert torch.allclose(means[counts > 0], of_few)
    assert torch.allclose(classes.require_gram(), expected.require_gram(), atol=1e-10)


def test_projected_labels_are_the_one_hot_rows_times_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_statistics, "CLASSES", 5)
    H, y = labelled(60, 4, 9)
    found = features(H, y, [60])
    assert found.labels == 9
    assert torch.allclose(found.moments.HtY, H.T @ projected(y))


def net(d: int, c: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, d), nn.Tanh(), nn.Linear(d, c)).double()


def test_projected_labels_agree_within_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = net(10, 40), labelled(400, 6, 40)
    names = ["target_linearity", "surrogate", "surrogate_linearized"]
    exact = gs.measure(model, (x, y), measures=names)
    assert not exact.errors
    monkeypatch.setattr(feature_statistics, "CLASSES", 16)
    table = gs.measure(model, [(x[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)], measures=names)
    for layer in exact:
        for name in names:
            value, error = table[layer][name], table.errors[layer][name]
            truth = exact[layer][name]
            assert value is not None
            assert truth is not None
            assert abs(value - truth) < 4 * error, (layer, name)
            assert error < 0.3 * abs(truth)
            assert "64 random combinations of the 40 labels" in table.notes[f"{layer}.{name}"].text
    assert format_cell(table["0"]["target_linearity"]) in str(table)
    assert Table.from_dict(table.to_dict()).errors == table.errors


def test_too_many_labels_have_no_class_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_statistics, "CLASSES", 16)
    table = gs.measure(net(10, 40), labelled(300, 6, 40), measures=["nc1"])
    assert table["0"]["nc1"] is None
    assert "40 labels are too many for a mean each" in table.notes["0.nc1"].text


@pytest.mark.parametrize("labels", [True, False])
def test_few_rows_of_many_features_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch, labels: bool) -> None:
    monkeypatch.setattr("gramscope.linalg.budget.ROWS_SIDE", 4)
    H, y = labelled(24, 12, 3)
    target: Any = y if labels else normal(24, 2)
    model = nn.Linear(12, 3).double()
    names = ["target_linearity", "feature_rank", "surrogate", "surrogate_normalized", *["nc1"] * labels]
    moments = gs.measure(model, (H[:10], target[:10]), measures=names, gram=True, ridge=0.1)
    stats = gs.collect(model, [(H[:5], target[:5]), (H[5:10], target[5:10])])
    assert stats["(model)"].features.rows is not None
    rows = gs.measure(model, [(H[:5], target[:5]), (H[5:10], target[5:10])], measures=names, ridge=0.1)
    for name in names:
        assert rows["(model)"][name] == pytest.approx(moments["(model)"][name], rel=1e-6), name
    # merged beyond d rows, HᵀH takes their place
    merged = stats.merge(gs.collect(model, (H[10:], target[10:])))
    whole = gs.collect(model, (H, target))["(model)"].features
    found = merged["(model)"].features
    assert isinstance(found, Features)
    assert found.rows is None
    assert torch.allclose(found.joint.C_hh, whole.joint.C_hh)
    assert torch.allclose(found.joint.C_hy, whole.joint.C_hy)
    assert torch.allclose(
        whole.merge(stats["(model)"].features).joint.C_hh,
        features(torch.cat([H, H[:10]]), torch.cat([target, target[:10]]), [34]).joint.C_hh,
    )
