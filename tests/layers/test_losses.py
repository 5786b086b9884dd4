"""Losses of single samples from criteria, functions and stated reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, Around, normal, refused, sample_losses, split
from comparing import assert_same
from gramscope.errors import InputError


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        F.cross_entropy,
        lambda f, y: F.cross_entropy(f, y, reduction="none"),
    ],
)
def test_every_reduction_gives_the_same(loss: Callable[..., Tensor]) -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = gs.collect(model, (x, y), sample_losses)
    assert_same(expected, gs.collect(model, split(x, y, 2), loss))


def test_stated_reductions() -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = gs.collect(model, (x, y), sample_losses)

    def mean(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target)

    refused(gs.collect, model, (x, y), mean, match="mean returns one number for 6 samples; state how")
    assert_same(expected, gs.collect(model, split(x, y, 2), mean, reduction="mean"))
    assert_same(expected, gs.collect(model, split(x, y, 2), mean, reduction=2))


def test_ignored_positions_and_mean_squared_error() -> None:
    model, x, y = BY_NAME["mlp"].make()
    # mean squared error: only the average over the batch is undone
    target = normal(6, 3)
    mse = gs.collect(model, split(x, target, 2), nn.MSELoss())
    assert_same(gs.collect(model, (x, target), lambda f, t: (f - t).square().mean(1)), mse)
    # token labels: ignored positions count neither in the loss nor as feature rows
    tokens, sequences, _ = BY_NAME["tokens"].make()
    labels = torch.arange(24).reshape(6, 4) % 3
    labels[0, 1] = labels[2, 3] = -100
    swapped = Around(lambda m, x: m.tokens(x).transpose(1, 2), tokens=tokens)
    stats = gs.collect(swapped, split(sequences, labels, 2), nn.CrossEntropyLoss())
    assert stats["tokens.0"].features.n == 22
    masked = gs.collect(
        swapped, (sequences, labels), lambda f, t: F.cross_entropy(f, t, reduction="none", ignore_index=-100)
    )
    assert_same(masked, stats)


@pytest.mark.parametrize("factor", [1, 2.5])
def test_a_factor_multiplies_losses_of_every_shape(factor: float) -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = factor * gs.collect(model, (x, y), sample_losses)["0"].D
    summed = gs.collect(model, (x, y), lambda f, t: sample_losses(f, t).sum(), reduction=factor)
    single = gs.collect(model, (x, y), sample_losses, reduction=factor)
    assert single.network.loss == pytest.approx(summed.network.loss)
    for found in (summed["0"].D, single["0"].D):
        torch.testing.assert_close(found, expected)
    for reduce in (torch.sum, torch.clone):
        with gs.capture(model, reduction=factor) as tape:
            tape.backward(reduce(sample_losses(model(x), y)))
        torch.testing.assert_close(tape["0"].D, expected)


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), True, "average", [2]])
def test_impossible_factors(factor: object) -> None:
    model, x, y = BY_NAME["mlp"].make()
    with pytest.raises(InputError, match="reduction=.*: give 'mean', 'sum', 'none' or the factor as a positive number"):
        gs.collect(model, (x, y), sample_losses, reduction=factor)
    with pytest.raises(InputError, match="reduction="), gs.capture(model, reduction=factor):
        pass


def test_a_stated_mean_with_ignored_labels() -> None:
    net, X, Y = BY_NAME["mlp"].make()
    y = torch.where(Y == 2, -100, Y)
    with pytest.raises(
        InputError, match=r"divided by the 6 samples, but 2 of 6 labels are -100.*give the criterion itself"
    ):
        gs.collect(net, (X, y), lambda f, t: F.cross_entropy(f, t), reduction="mean")
    with pytest.raises(InputError, match=r"2 of 6 labels are 2"):
        gs.collect(net, (X, Y), lambda f, t: F.cross_entropy(f, t, ignore_index=2), reduction="mean", ignore_index=2)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(X), y, reduction="sum"), net[0].weight)
    for loss, reduction in ((nn.CrossEntropyLoss(), None), (lambda f, t: F.cross_entropy(f, t), 4.0)):
        torch.testing.assert_close(gs.collect(net, (X, y), loss, reduction=reduction)["0"].D, gradient)
    with gs.capture(net, reduction=4.0) as tape:  # what the loss divided by
        F.cross_entropy(net(X), y).backward()
    torch.testing.assert_close(tape["0"].D, gradient)


def test_wrappers_that_reduce_by_themselves_are_told() -> None:
    model, x, y = BY_NAME["mlp"].make()

    class Wrapped(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(f, t).reshape(1)

    with pytest.raises(InputError, match="does not divide into 6 samples; .* reduction='mean', 'sum' or a factor"):
        gs.collect(model, (x, y), Wrapped())


def test_targets_with_the_batch_second() -> None:
    model, x, y = nn.Linear(4, 3).double(), normal(4, 3, 4), torch.arange(12).reshape(4, 3) % 3

    def loss(f: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(f.movedim(1, 0).flatten(0, 1), t.flatten(), reduction="none")

    with pytest.raises(
        InputError, match=r"3 inputs but 4 targets; .*unpack=lambda b: \(b\[0\], b\[1\].movedim\(1, 0\)\)"
    ):
        gs.collect(model, (x, y), loss, batch_dim=1)
    found = gs.collect(model, [(x, y)], loss, batch_dim=1, unpack=lambda b: (b[0], b[1].movedim(1, 0)))
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), model.weight
    )
    torch.testing.assert_close(found["(model)"].D, gradient)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            torch.arange(6) % 3 + 1,
            r"CrossEntropyLoss failed on an output of \(6, 3\) torch.float32 and a target of ",
        ),
        (nn.BCEWithLogitsLoss(), torch.ones(6, 3, dtype=torch.long), r"a target of \(6, 3\) torch.int64: "),
        (nn.CrossEntropyLoss(), torch.zeros(6, 4, dtype=torch.long), r"a target of \(6, 4\) torch.int64: "),
        (
            lambda f, y: f[9],
            torch.arange(6) % 3,
            r"<lambda> failed on an output of \(6, 3\).*second argument is called batch gets all",
        ),
    ],
)
def test_losses_that_fail_are_named(loss: Any, y: Tensor, message: str) -> None:
    refused(gs.collect, nn.Linear(2, 3), (torch.ones(6, 2), y), loss, match=message)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, nn.MSELoss(), F.mse_loss, nn.HuberLoss()])
def test_losses_of_pixels_are_means_over_all_of_them(loss: Any) -> None:
    """One rule for labels and for numbers: what the criterion gives on all data at once, over any batches."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    x, y = normal(5, 2, 6, 6), normal(5, 3, 4, 4)
    if loss in (F.cross_entropy,) or isinstance(loss, nn.CrossEntropyLoss):
        y = y.argmax(1)
        y[0, 1], y[3, :2] = -100, -100
    table = gs.measure(net, split(x, y, 2), loss, measures=["gradient_norm", "vcs_residual"], gamma=0.5)
    total = loss(net(x), y)
    (gradient,) = torch.autograd.grad(total, net[0].weight)
    assert table.network["loss"] == pytest.approx(float(total.detach()))
    assert table["0"]["gradient_norm"] == pytest.approx(float(gradient.norm()))
    assert "means over all positions (tokens, pixels) that count" in table.notes["(positions)"].text
    with gs.capture(net) as tape:
        loss(net(x), y).backward()
    W, D = tape["0"].weight, tape["0"].D
    step = (W - 0.5 * D).T @ (W - 0.5 * D) - W.T @ W
    residual = (0.25 * (D.T @ D - W.T @ tape["0"].Sigma @ W)).norm() / step.norm()
    assert table["0"]["vcs_residual"] == pytest.approx(float(residual))


def test_classes_may_be_last_and_padding_is_left_out() -> None:
    net, x = nn.Linear(4, 3).double(), normal(5, 6, 4)
    labels = torch.arange(30).reshape(5, 6) % 3
    last = gs.measure(net, split(x, labels, 2), nn.CrossEntropyLoss(), measures="gradient_norm")
    total = F.cross_entropy(net(x).flatten(0, 1), labels.flatten())
    assert last.network["loss"] == pytest.approx(float(total.detach()))
    assert last.network["accuracy"] == pytest.approx(float((net(x).argmax(-1) == labels).double().mean()))
    mask = torch.arange(6) < torch.tensor([6, 2, 3, 1, 5])[:, None]
    model, y = Around(lambda m, x, attention_mask: m.net(x), net=net), normal(5, 6, 3)
    batches = [{"x": x[i], "attention_mask": mask[i], "labels": y[i]} for i in (slice(0, 2), slice(2, 5))]
    table = gs.measure(model, batches, nn.MSELoss(), measures="gradient_norm")
    total = F.mse_loss(net(x)[mask], y[mask])
    (gradient,) = torch.autograd.grad(total, net.weight)
    assert table.network["loss"] == pytest.approx(float(total.detach()))
    assert table["net"]["gradient_norm"] == pytest.approx(float(gradient.norm()))
