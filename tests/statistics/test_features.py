"""How rows and targets are paired: tokens, ignored labels, one label per pixel, integers to regress on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from cases import BY_NAME, Around, normal, pooled, refused
from comparing import assert_same
from gramscope.errors import InputError, NumericalError, joined
from gramscope.linalg.moments import Moments


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [("mean", 6), ("flatten", 6), ("each", 24), (0, 6), (-1, 6), (lambda inputs, target: inputs[..., 0] > 0, None)],
)
def test_token_selection(tokens: object, rows: int | None) -> None:
    model, x, y = BY_NAME["tokens"].make()
    stats = gs.collect(model, (x, y), tokens=tokens)
    part = stats["0"].features
    assert part.n == (int((x[..., 0] > 0).sum()) if rows is None else rows)
    if tokens == 0:
        torch.testing.assert_close(part.joint.mean_h, x[:, 0].mean(0))


def test_token_selection_errors() -> None:
    model, x, y = BY_NAME["tokens"].make()
    refused(gs.collect, model, (x, y), tokens=9, match="tokens=9: layer '0' has 4 sites")
    refused(gs.collect, model, (x, y), tokens="cls", match="tokens='cls'")
    refused(gs.collect, model, (x, y), tokens=lambda inputs, target: target > 0, match=r"mask has shape \(6,\)")


def test_tokens_of_a_sequence_classifier() -> None:
    model = pooled(5, 6, 3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 7, 5, generator=generator, dtype=torch.float64), torch.arange(40) % 3
    Y = F.one_hot(y).double()
    Y = Y - Y.mean(0)
    marked = torch.rand(40, 7, generator=generator) > 0.4
    counts, residual = marked.sum(1), torch.cat([Y[i].expand(int(marked[i].sum()), 3) for i in range(40)])
    residual = residual - residual.mean(0)
    table = gs.measure(
        model, (x, y), nn.CrossEntropyLoss(), measures=["surrogate", "gradient_norm"], tokens=lambda i, t: marked
    )
    assert int(counts.sum()) == residual.shape[0]
    assert table["e"]["surrogate"] == pytest.approx(float((x[marked].T @ residual).square().sum()))
    assert table["r"]["surrogate"] is None
    assert "the token mask has shape (40, 7); layer 'r' has 40 × 1 sites" in table.notes["r"].text
    assert "(output)" not in table.notes
    third = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=["surrogate"], tokens=3)
    assert third["e"]["surrogate"] == pytest.approx(float((x[:, 3].T @ Y).square().sum()))
    assert "tokens=3: layer 'r' has 1 sites" in third.notes["r"].text
    with pytest.raises(InputError, match=r"tokens= returned a list; give a function"):
        gs.collect(model, (x, y), tokens=lambda i, t: [[True] * 7] * 40)


def test_the_label_to_ignore() -> None:
    tokens, x, _ = BY_NAME["tokens"].make()
    labels = torch.arange(24).reshape(6, 4) % 3
    marked = labels.clone()
    marked[0, 1] = marked[2, 3] = 255
    usual = torch.where(marked == 255, -100, marked)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.mT, y, reduction="none", ignore_index=255).sum(1)

    expected = gs.collect(tokens, (x, usual))
    found = gs.collect(tokens, (x, marked), loss, ignore_index=255)
    assert found["0"].features.n == 22
    torch.testing.assert_close(found["0"].features.joint.C_hy, expected["0"].features.joint.C_hy)
    assert found.network.counted == expected.network.counted == 22
    # one label per sample, and the loss's own ignore_index
    model, x, y = BY_NAME["mlp"].make()
    y = torch.where(torch.arange(6) == 2, 255, y)
    stats = gs.collect(model, (x, y), nn.CrossEntropyLoss(ignore_index=255))
    assert stats["0"].features.n == 5
    assert stats.network.counted == 5
    name, loss = "surrogate_change_predicted", nn.CrossEntropyLoss(ignore_index=255, reduction="sum")
    table = gs.measure(model, (x, y), loss, measures=[name])
    without = gs.measure(model, (x[y != 255], y[y != 255]), loss, measures=[name])
    assert table["0"][name] * 6 / 5 == pytest.approx(without["0"][name])  # the step is that of a mean over all samples


def test_labels_of_minus_one_and_one() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    y = torch.tensor([1, -1, 1, 1, -1, -1])
    refused(gs.collect, model, (x, y), match=r"found -1; .*targets=lambda x, y: \(y > 0\).long\(\) makes classes")
    classes = gs.collect(model, (x, y), targets=lambda x, y: (y > 0).long())
    assert classes["0"].features.classes.class_means()[0].tolist() == [3, 3]
    real = gs.measure(model, (x, y.double()), measures=["surrogate", "nc1"])
    assert real["0"]["surrogate"] == pytest.approx(float((x.T @ y.double()).square().sum()))
    assert "class labels" in real.notes["0.nc1"].text


def test_one_label_per_pixel() -> None:
    model = Around(  # a small U-Net: down, up by a transposed convolution, and a skip connection
        lambda m, x: m.out(torch.cat([x, torch.relu(m.up(torch.relu(m.down(x))))], 1)),
        down=nn.Conv2d(1, 4, 3, stride=2, padding=1),
        up=nn.ConvTranspose2d(4, 4, 2, stride=2),
        out=nn.Conv2d(5, 3, 1),
    )
    x, y = normal(8, 1, 4, 6), torch.randint(3, (8, 4, 6), generator=torch.Generator().manual_seed(0))
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss())
    assert table["out"]["gradient_norm"] is not None
    assert table["out"]["nfa"] is not None
    assert table["out"]["target_linearity"] is None
    assert table["out"]["feature_rank"] is not None
    assert "the target has one label per position, (8, 4, 6); tokens='each'" in table.notes["out"].text
    assert table.network["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    each = gs.collect(model, (x, y), tokens="each")
    with gs.capture(model, gradients=False) as tape:
        model(x)
    rows, onehot = tape["out"].h.flatten(0, 1), F.one_hot(y.flatten()).double()
    torch.testing.assert_close(each["out"].features.joint.HtY, rows.T @ onehot)
    assert each["down"].features.joint.C_hy.shape == (1 * 9, 0)
    assert "do not give one label to each of 48 rows" in each.notes["down"][0].text


def test_targets_too_wide_to_regress_on_are_noted() -> None:
    model = nn.Linear(4, 2).double()
    table = gs.measure(
        model, (torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 70, 70)), measures=["weight_norm", "surrogate"]
    )
    assert "the target has 4900 columns, more than 4096" in table.notes["(model)"].text
    assert table["(model)"]["weight_norm"] is not None


def test_real_targets_of_the_users_choice() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), targets=lambda inputs, target: inputs[:, :2])
    torch.testing.assert_close(stats["2"].features.joint.mean_y, x[:, :2].mean(0))
    assert isinstance(stats["0"].features.moments, Moments)
    assert isinstance(gs.collect(model, (x, y))["0"].features.classes, Moments)


def test_a_layer_whose_rows_are_not_samples_is_noted() -> None:
    model = Around(
        lambda m, x: m.head(m.inner(x.transpose(0, 1).flatten(0, 1)).reshape(2, len(x), -1).mean(0)),
        inner=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    stats = gs.collect(model, (normal(6, 2, 5), torch.arange(6) % 3), F.cross_entropy)
    assert stats["inner"].features is None
    assert "12 rows for 6 samples" in joined(stats.notes["inner"]).text
    assert stats["inner"].D.shape == (4, 5)


def test_a_data_loader_and_integer_targets_of_other_shapes() -> None:
    model, x, y = BY_NAME["mlp"].make()
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    assert_same(gs.collect(model, (x, y), F.cross_entropy), gs.collect(model, data, F.cross_entropy))
    stats = gs.collect(model, (x, torch.ones(6, 2, dtype=torch.long)))
    torch.testing.assert_close(stats["0"].features.joint.mean_h, x.mean(0))
    assert (
        "no targets: integer targets of shape (6, 2) do not give one label to each of 6 rows"
        in joined(stats.notes["0"]).text
    )
    some = gs.collect(model, [(x, torch.ones(6, 2, dtype=torch.long)), (x, y)])  # nor are rows of two kinds mixed
    assert some["0"].features is None
    assert "in a part of the batches integer targets" in joined(some.notes["0"]).text
    with pytest.raises(InputError, match=r"'0': integer targets.*in the other part of the data they fit"):
        stats.merge(gs.collect(model, (x, y)))
    refused(gs.collect, model, (x, y), "mse", match="loss='mse' is not callable")


def test_labels_that_mark_nothing_and_labels_that_are_too_large() -> None:
    model, x, y = BY_NAME["mlp"].make()
    marked = y.clone()
    marked[0] = -100
    assert gs.collect(model, (x, marked))["0"].features.n == 5
    refused(gs.collect, model, (x, y + 2_000_000_000), match="labels reach 2000000002")
    with pytest.raises(NumericalError, match="the targets are NaN"):
        gs.collect(model, (x, torch.full((6, 1), float("nan"), dtype=torch.float64)))
    with (
        pytest.warns(UserWarning, match="target size"),
        pytest.raises(InputError, match="broadcast against each other"),
    ):
        gs.collect(nn.Linear(5, 1).double(), (x, x[:, 0]), nn.MSELoss())


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, nn.HuberLoss(reduction="sum")])
@pytest.mark.parametrize("columns", [(), (1,)])
def test_integers_under_a_loss_of_regression_are_numbers(loss: Any, columns: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)) if columns == () else nn.Linear(5, 1)
    model = model.double()
    x = normal(40, 5)
    y = torch.randint(-50, 50, (40, *columns), generator=torch.Generator().manual_seed(1))
    stats = gs.collect(model, (x, y), loss)
    (layer,) = stats
    torch.testing.assert_close(layer.features.joint.HtY, x.T @ y.double().reshape(40, 1))
    assert "numbers to regress on" in joined(stats.notes["(targets)"]).text
    assert stats.network.accuracy is None
    held = gs.measure(model, (x[:30], y[:30]), loss, held_out=(x[30:], y[30:]), measures="target_linearity_held_out")
    beta = torch.linalg.lstsq(x[:30], y[:30].double().reshape(-1, 1)).solution
    Y = y[30:].double().reshape(-1, 1)
    expected = 1 - (Y - x[30:] @ beta).square().sum() / (Y - Y.mean()).square().sum()
    assert held[layer.name]["target_linearity_held_out"] == pytest.approx(float(expected))
    classes = gs.collect(model, (x, y.abs() % 3), loss, targets=lambda i, t: t)
    assert next(iter(classes)).features.classes is not None
    assert "(targets)" not in classes.notes
