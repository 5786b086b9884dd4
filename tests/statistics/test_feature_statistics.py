"""Rows in place of HᵀH and projected labels: exact under merging, and right within the stated error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import normal
from gramscope.linalg.symmetric_sum import SymmetricSum
from gramscope.measures.table import Table
from gramscope.statistics import feature_moments, feature_statistics
from gramscope.statistics.feature_statistics import (
    FeatureStatistics,
    add_rows,
    merge_features,
    projected,
    statistics_of,
    with_gram,
)


def labelled(n: int, d: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(c, (n,), generator=generator)
    centres = torch.randn(c, d, generator=generator, dtype=torch.float64)
    return centres[y] + torch.randn(n, d, generator=generator, dtype=torch.float64), y


def test_late_labels_beyond_the_limit_project_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_statistics, "CLASSES", 5)
    H, y = labelled(60, 4, 9)
    y[:30] %= 4  # the first part alone has few labels
    whole = statistics_of("h", H, y, True)
    merged = merge_features(statistics_of("h", H[:30], y[:30], True), statistics_of("h", H[30:], y[30:], True))
    assert whole.labels == merged.labels
    assert whole.moments is not None
    assert merged.moments is not None
    for name in ("mean_h", "mean_y", "C_hh", "C_hy", "C_yy"):
        assert torch.allclose(getattr(whole.moments, name), getattr(merged.moments, name), atol=1e-10), name
    Y = projected(y)
    assert torch.allclose(whole.moments.HtY, H.T @ Y)
    # two parts of few labels each whose union has many
    few = [statistics_of("h", H[:30], y[:30], True), statistics_of("h", H[:30], y[:30] + 1, True)]
    monkeypatch.setattr(feature_statistics, "CLASSES", 4)
    assert merge_features(*few).labels == 5


@pytest.mark.parametrize("largest", [(3, 9, 3), (9, 3, 9), (3, 4, 2)])
def test_rows_added_in_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch, largest: tuple[int, ...]) -> None:
    monkeypatch.setattr(feature_statistics, "CLASSES", 5)
    blocks = [labelled(20 + c, 4, c, seed) for seed, c in enumerate(largest)]
    total, found = SymmetricSum(4), None
    for H, y in blocks:
        found = add_rows(found, total, "h", H, y)
    assert found is not None
    found = with_gram(found, total.dense())
    whole = statistics_of("h", *(torch.cat(parts) for parts in zip(*blocks, strict=True)), True)
    assert found.labels == whole.labels
    for name in ("mean_h", "mean_y", "C_hh", "C_hy", "C_yy"):
        assert torch.allclose(getattr(found.joint, name), getattr(whole.joint, name), atol=1e-10), name


def net(d: int, c: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, d), nn.Tanh(), nn.Linear(d, c)).double()


def test_projected_labels_agree_within_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = net(10, 40), labelled(400, 6, 40)
    names = ["target_linearity", "surrogate", "surrogate_linearized"]
    exact = gs.measure(model, (x, y), measures=names)
    assert not exact.errors
    monkeypatch.setattr(feature_statistics, "CLASSES", 16)
    monkeypatch.setattr(feature_moments, "CLASSES", 16)
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
    assert f"{table['0']['target_linearity']:.4f} ± {table.errors['0']['target_linearity']:.1g}" in str(table)
    assert Table.from_dict(table.to_dict()).errors == table.errors


def test_collapse_of_frequent_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_statistics, "CLASSES", 16)
    monkeypatch.setattr(feature_moments, "CLASSES", 16)
    monkeypatch.setattr(feature_moments, "FREQUENT", 3)
    H, y = labelled(300, 6, 40)
    y[::2] = torch.arange(150) % 3 + 20  # the three most frequent labels
    kept = (y >= 20) & (y < 23)
    expected = gs.neural_collapse(H[kept], y[kept])
    table = gs.measure(net(10, 40), (H, y), measures=["nc1", "nc2_equinorm", "nc3"])
    assert table["0"]["nc1"] == pytest.approx(expected.nc1)
    assert table["0"]["nc2_equinorm"] == pytest.approx(expected.nc2_equinorm)
    assert "of the 3 most frequent of 40 labels" in table.notes["0.nc1"].text
    assert table["2"]["nc3"] is None


@pytest.mark.parametrize("labels", [True, False])
def test_few_rows_of_many_features_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch, labels: bool) -> None:
    monkeypatch.setattr(feature_statistics, "SMALL", 4)
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
    assert isinstance(found, FeatureStatistics)
    assert found.rows is None
    assert torch.allclose(found.joint.C_hh, whole.joint.C_hh)
    assert torch.allclose(found.joint.C_hy, whole.joint.C_hy)
    assert torch.allclose(
        merge_features(whole, stats["(model)"].features).joint.C_hh,
        statistics_of("h", torch.cat([H, H[:10]]), torch.cat([target, target[:10]]), True).joint.C_hh,
    )
