"""Targets that need care: ignored labels, labels of −1 and 1, one label per pixel, factors, shared references."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, sample_losses
from gramscope.errors import InputError, LayerError, ResultWarning


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
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss(ignore_index=255))
    assert table["0"]["surrogate"] is not None


def test_labels_of_minus_one_and_one() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    y = torch.tensor([1, -1, 1, 1, -1, -1])
    with pytest.raises(InputError, match=r"found -1; .*targets=lambda x, y: \(y > 0\).long\(\) makes classes"):
        gs.collect(model, (x, y))
    classes = gs.collect(model, (x, y), targets=lambda x, y: (y > 0).long())
    assert classes["0"].features.classes.counts.tolist() == [3, 3]
    real = gs.measure(model, (x, y.double()), measures=["surrogate", "nc1"])
    assert real["0"]["surrogate"] == pytest.approx(float((x.T @ y.double()).square().sum()))
    assert "class labels" in real.notes["0.nc1"].text


class Segmenter(nn.Module):
    """A small U-Net: down, up by a transposed convolution, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, torch.relu(self.up(torch.relu(self.down(x))))], 1))


def test_one_label_per_pixel() -> None:
    model = Segmenter().double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 1, 4, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8, 4, 6), generator=generator)
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss())
    assert table["out"]["gradient_norm"] is not None
    assert table["out"]["nfa"] is not None
    assert table["out"]["target_linearity"] is None
    assert "the target has one label per position, (8, 4, 6); tokens='each'" in table.notes["out"].text
    assert table.network["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    each = gs.collect(model, (x, y), tokens="each")
    with gs.capture(model, gradients=False) as tape:
        model(x)
    rows, onehot = tape["out"].h.flatten(0, 1), F.one_hot(y.flatten()).double()
    torch.testing.assert_close(each["out"].features.joint.HtY, rows.T @ onehot)
    assert each["down"].features is None
    assert "do not give one label to each of 48 rows" in each.notes["down"][0].text


def test_targets_too_wide_to_regress_on_are_noted() -> None:
    model = nn.Linear(4, 2).double()
    table = gs.measure(model, (torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 70, 70)))
    assert "the target has 4900 columns, more than 4096" in table.notes["(model)"].text
    assert table["(model)"]["weight_norm"] is not None


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
        gs.collect(model, (x, y), sample_losses, reduction=factor)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="reduction="), gs.capture(model, reduction=factor):  # type: ignore[arg-type]
        pass


def test_batch_normalisation_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    message = r"BatchNorm1d '1' is in train mode.*\.D is still the weight gradient"
    with pytest.warns(ResultWarning, match=message), gs.capture(model) as tape:
        model(x).square().sum().backward()
    torch.testing.assert_close(tape["0"].D, model[0].weight.grad)
    before = model[1].running_mean.clone()
    with pytest.raises(LayerError, match="BatchNorm1d '1' is in train mode"):
        gs.collect(model, x, eval_mode=False)  # also without a loss
    assert torch.equal(before, model[1].running_mean)
    with gs.capture(model, gradients=False):
        model(x)
    with gs.capture(model.eval()):
        model(x).sum().backward()


def test_a_reference_that_shares_weights() -> None:
    model, x, y = BY_NAME["mlp"].make()
    with pytest.raises(
        InputError, match=r"reference shares 5 trainable parameters with the model \(0.weight, 0.bias, 2"
    ):
        gs.tangent_kernel(model, x, reference=model)
    with pytest.raises(InputError, match=r"reference shares 5 trainable"):
        gs.measure(model, (x, y), reference=copy.copy(model), measures="weight_change")
    # A frozen part may be shared: each network's own forward counts.
    model[0].requires_grad_(False)
    reference = nn.Sequential(model[0], *copy.deepcopy(list(model)[1:]))
    with torch.no_grad():
        reference[4].weight.add_(0.5)
    apart = copy.deepcopy(reference)
    chosen = ["0", "2", "4"]
    found, expected = (gs.tangent_kernel(model, x, chosen, reference=other) for other in (reference, apart))
    for name in expected:
        torch.testing.assert_close(found[name].K, expected[name].K)
        torch.testing.assert_close(found[name].K_centered, expected[name].K_centered)
