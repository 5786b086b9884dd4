"""Neural collapse at the readout: ignored labels count nowhere, on held-out data neither; and what NC4 needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import Around, normal


def task(ignored: int) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = normal(200, 5), torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0))
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double(), x, torch.where(y == 3, ignored, y)


@pytest.mark.parametrize("ignored", [3, -1, -100])
def test_ignored_samples_count_nowhere(ignored: int) -> None:
    model, x, y = task(ignored)
    loss, kept = nn.CrossEntropyLoss(ignore_index=ignored), y != ignored
    names = ["nc1", "nc3", "nc4", "target_linearity", "target_linearity_held_out"]
    first, rest = slice(100), slice(100, None)
    found = gs.measure(model, (x[first], y[first]), loss, held_out=(x[rest], y[rest]), measures=names)
    a, b = ((x[part][kept[part]], y[part][kept[part]]) for part in (first, rest))
    expected = gs.measure(model, a, nn.CrossEntropyLoss(), held_out=b, measures=names)
    H = torch.relu(model[0](a[0])).detach()
    means = torch.stack([H[a[1] == c].mean(0) for c in range(3)])
    agree = torch.cdist(H, means).argmin(1) == model(a[0]).argmax(1)
    assert found["2"]["nc4"] == pytest.approx(float(agree.double().mean()))
    for row in found:
        assert found[row] == pytest.approx(expected[row])
    assert "2.target_linearity_held_out" not in found.notes
    chosen = gs.measure(model, (x[first], y[first]), measures=["nc4"], ignore_index=ignored)
    assert chosen["2"]["nc4"] == found["2"]["nc4"]


def test_nc4_of_targets_of_ones_own() -> None:
    model, x, y = task(3)
    own = gs.measure(model, (x, y), measures="nc4", targets=lambda i, t: torch.where(t == 3, -100, t))
    expected = gs.measure(model, (x, y), nn.CrossEntropyLoss(ignore_index=3), measures="nc4")
    assert own["2"]["nc4"] == expected["2"]["nc4"]


def test_collapse_where_it_is_undefined() -> None:
    model, x, y = task(3)
    names = ["nc1", "nc3", "nc4"]
    one = gs.measure(model, (x, torch.zeros_like(y)), measures=names)
    for name in names:
        assert one["2"][name] is None
        assert "at least two classes with samples, got 1" in one.notes[f"2.{name}"].text
    own = gs.measure(nn.Linear(5, 200).double(), (x, torch.arange(200)), measures=names)
    for name in names:
        assert "each of the 200 rows has a class of its own" in own.notes[f"(model).{name}"].text
    once = gs.measure(model, iter([(x, y)]), measures="nc4")
    assert once["2"]["nc4"] is None
    assert "this loader can be read once; give a DataLoader" in once.notes["2.nc4"].text


def test_held_out_data_that_do_not_reach_a_layer() -> None:
    _, x, y = task(3)
    model = Around(lambda m, x: m.r(m.a(x) if len(x) > 50 else x), a=nn.Linear(5, 5), r=nn.Linear(5, 4))
    table = gs.measure(model, (x, y), held_out=(x[:40], y[:40]), measures="target_linearity_held_out")
    assert table["a"]["target_linearity_held_out"] is None
    assert table.notes["a.target_linearity_held_out"].text == "the held-out data do not reach it"
    assert table["r"]["target_linearity_held_out"] is not None
