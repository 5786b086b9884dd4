"""What one pass gives does not depend on how the data are split: into batches, into parts to merge, over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from all_reduce_experts import OPTIONS, routed
from comparing import assert_same
from gramscope.errors import InputError
from gramscope.notes import joined
from two_processes import answers


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def r_squared(H: Tensor, y: Tensor) -> float:
    """Target linearity by least squares on centred one-hot labels."""
    H, Y = H.detach(), F.one_hot(y).double()
    Y = Y - Y.mean(0)
    return float(1 - (Y - H @ torch.linalg.lstsq(H, Y, driver="gelsd").solution).square().sum() / Y.square().sum())


class SequenceFirst(nn.Module):
    """Batch first outside, torch's default ``batch_first=False`` inside."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.e = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.mix, self.r = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(torch.tanh(self.mix(self.e(x.transpose(0, 1)))).mean(0))


def test_layers_inside_sequence_first_modules_keep_their_samples() -> None:
    model, x, y = SequenceFirst().double().eval(), randn(24, 8, 6), torch.arange(24) % 3
    with gs.capture(model, gradients=False) as tape:
        model(x)
    inputs = tape["e.layers.0.linear1"].applications[0].x  # [T, B, d]
    expected = r_squared(inputs.mean(0), y)
    for size in (24, 8, 5):  # 8 is T
        table = gs.measure(model, split(x, y, size), measures=["target_linearity"], outputs="e")
        assert table["e.layers.0.linear1"]["target_linearity"] == pytest.approx(expected)
        assert table["e"]["target_linearity"] == pytest.approx(r_squared(model.e(x.transpose(0, 1)).mean(0), y))
        assert table["mix"]["target_linearity"] is None  # a module of the user's own cannot be told
        assert "cannot be paired" in table.notes["mix"].text
        assert table["r"]["target_linearity"] is not None


def test_outputs_of_sequence_first_models() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.r = nn.Sequential(nn.Linear(5, 4), nn.Identity()), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.r(self.block(x).mean(0))

    model = Tokens().double()
    for length in (6, 4):  # as long as the batch, and not
        x, y = randn(length, 6, 5), torch.arange(6) % 3
        Y = F.one_hot(y).double() - 1 / 3
        expected = float((model.block(x).detach().mean(0).T @ Y).square().sum())
        table = gs.measure(model, (x, y), measures="surrogate", outputs="block", batch_dim=1)
        assert table["block"]["surrogate"] == pytest.approx(expected)


def test_an_expert_with_all_rows_of_one_batch_has_no_features() -> None:
    model, x, y = routed()
    for size in (12, 5, 4):  # the first 5 and the first 4 samples are all of expert 0
        stats = gs.collect(model, split(x, y, size), F.cross_entropy)
        assert stats["experts.0"].features is None
        assert "cannot be paired" in joined(stats.notes["experts.0"]).text
        assert next(iter(stats.layers)) == "embed"
        assert list(stats.layers)[-1] == "r"
    table = gs.measure(model, split(x, y, 5), F.cross_entropy, measures=["nc3", "target_linearity"])
    assert table["r"]["nc3"] is not None  # the readout is last, whenever the experts were seen first
    assert table["experts.0"]["target_linearity"] is None


@pytest.mark.parametrize("cut", [3, 5, 9])
def test_parts_that_have_not_seen_every_layer_merge_as_one_pass(cut: int) -> None:
    model, x, y = routed()
    whole = gs.collect(model, (x, y), F.cross_entropy, **OPTIONS)  # type: ignore[arg-type]
    first, second = (
        gs.collect(model, (x[part], y[part]), F.cross_entropy, **OPTIONS)  # type: ignore[arg-type]
        for part in (slice(cut), slice(cut, None))
    )
    for merged in (first.merge(second), second.merge(first)):
        assert_same(whole, merged)
        assert merged.notes.keys() == whole.notes.keys()
        assert not any(note.kind == "not applied" for found in merged.notes.values() for note in found)
        D = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model.experts[2].weight)[0]
        torch.testing.assert_close(merged["experts.2"].D, D)
        assert merged["experts.2"].n == 12


def test_parts_collected_with_other_options_are_refused() -> None:
    model, x, y = routed()
    full = gs.collect(model, (x, y), F.cross_entropy)
    for options in ({"features": False}, {"covariance": False}, {"gram": True}, {"jacobians": True}, {"outputs": "r"}):
        (name,) = options
        other = gs.collect(model, (x, y), F.cross_entropy, **options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"different options: {name}="):
            full.merge(other)
        with pytest.raises(InputError, match=f"different options: {name}="):
            other.merge(full)


def test_processes_that_differ(tmp_path: Path) -> None:
    expected = ["same", "InputError different weights", "InputError different options"]
    assert answers("all_reduce_experts.py", tmp_path) == [expected, expected]


class Recurrent(nn.Module):
    """Its layer runs twice, and the second result goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.o, self.gate = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.h(x))
        self.state = torch.tanh(self.h(h))
        gated = torch.tanh(self.gate(h))
        return self.o(h + gated if bool((x > 0.5).any()) else h)


def test_an_application_that_the_loss_does_not_reach_adds_nothing() -> None:
    model, x, y = Recurrent().double(), randn(6, 4).abs(), torch.arange(6) % 3
    stats = gs.collect(model, (x, y), F.cross_entropy, jacobians=True)
    total = F.cross_entropy(model(x), y, reduction="sum")
    torch.testing.assert_close(stats["h"].D, torch.autograd.grad(total, model.h.weight)[0])
    z = model.h(x).detach().requires_grad_()
    h = torch.tanh(z)
    output = model.o(h + torch.tanh(model.gate(h)))
    (delta,) = torch.autograd.grad(F.cross_entropy(output, y, reduction="sum"), z, retain_graph=True)
    torch.testing.assert_close(stats["h"].Sigma, delta.T @ delta)
    rows = torch.stack([torch.autograd.grad(output[:, c].sum(), z, retain_graph=True)[0] for c in range(3)])
    torch.testing.assert_close(stats["h"].JtJ, torch.einsum("cik,cil->kl", rows, rows))
    assert "h" not in stats.notes


def test_a_layer_that_some_batches_do_not_reach_has_no_false_note() -> None:
    model = Recurrent().double()
    x, y = (
        torch.cat([0.1 * torch.ones(4, 4), torch.ones(4, 4)]).double() + 0.1 * randn(8, 4).tanh(),
        torch.arange(8) % 3,
    )
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    expected = torch.autograd.grad(F.cross_entropy(model(x[4:]), y[4:], reduction="sum"), model.gate.weight)[0]
    unreached, reached = (gs.collect(model, part, F.cross_entropy, jacobians=True) for part in parts)
    assert unreached.notes["gate"][0].kind in ("no gradient", "no Jacobians")
    for stats in (
        gs.collect(model, parts, F.cross_entropy, jacobians=True),
        gs.collect(model, parts[::-1], F.cross_entropy, jacobians=True),
        unreached.merge(reached),
        reached.merge(unreached),
    ):
        torch.testing.assert_close(stats["gate"].D, expected)
        torch.testing.assert_close(stats["gate"].JtJ, reached["gate"].JtJ)
        assert "gate" not in stats.notes


def test_jacobians_that_some_batches_are_too_wide_for() -> None:
    model = nn.Linear(3, 50).double()
    short, long = (randn(4, 2, 3), None), (randn(4, 9, 3), None)  # 100 and 450 outputs
    parts = [gs.collect(model, [part], jacobians="auto") for part in (short, long)]
    assert parts[0]["(model)"].JtJ is not None
    for stats in (gs.collect(model, [short, long], jacobians="auto"), parts[0].merge(parts[1])):
        assert stats["(model)"].JtJ is None
        assert "450 outputs" in joined(stats.notes["(output)"]).text


def test_residuals_that_some_batches_do_not_have() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.r = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.r(torch.tanh(self.e(x)).mean(1))

    model, y = Pooled().double(), torch.arange(4) % 3
    data = [(randn(4, 1, 3), y), (randn(4, 5, 3), y)]
    for order in (data, data[::-1]):
        stats = gs.collect(model, order, F.cross_entropy, residuals=True)
        assert stats["e"].features.HtE is None
        assert stats["r"].features.HtE is not None
