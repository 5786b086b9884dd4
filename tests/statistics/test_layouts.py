"""Which axis of a tensor holds the samples, and which one of a module's output the features."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around, normal, refused, split
from gramscope.errors import InputError, joined
from gramscope.statistics.structure import layout


def block() -> nn.Module:
    """A user's own block around a 1-d convolution."""
    return Around(lambda m, x: x + torch.tanh(m.conv(x)), conv=nn.Conv1d(3, 3, 3, padding=1))


def test_channels_of_one_dimensional_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.ReLU(), block(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(12, 2)
    ).double()
    x, y = normal(8, 2, 9), torch.arange(8) % 2
    expected = model[0](x).mean(2).mean(0)
    stats = gs.collect(model, (x, y), outputs=["0", "3"])
    torch.testing.assert_close(stats.outputs["0"].features.joint.mean_h, expected.detach())
    assert stats.outputs["3"].features.joint.mean_h.shape == (3,)
    for name in ("1", "2"):
        with pytest.raises(InputError, match=rf"output of module '{name}' has shape \(8, 3, 7\).*channels='first'"):
            gs.collect(model, (x, y), outputs=name)
        assert gs.collect(model, (x, y), outputs=name, channels="first").outputs[name].features.joint.mean_h.shape == (
            3,
        )
    assert gs.measure(model, (x, y), outputs="2", channels="last")["2"]["feature_rank"] is not None
    refused(gs.collect, model, (x, y), outputs="0", channels="middle", match="channels='middle'")


def test_other_outputs_are_read_as_before() -> None:
    linear, norm = nn.Linear(5, 3), nn.LayerNorm(5)
    assert layout(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Dropout()), linear) == "last"
    assert layout(nn.MultiheadAttention(4, 2), block()) == "last"
    assert layout(nn.Identity(), norm) == "usual"
    assert layout(nn.Identity(), block()) == "unknown"
    model = nn.Sequential(nn.Identity(), linear, nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.ones(4, 6, 7, 5), torch.arange(4) % 2
    model(x)
    stats = gs.collect(model, (x, y), outputs=["0", "1"])
    assert stats.outputs["0"].features.joint.mean_h.shape == (6,)  # four axes: an image with 6 channels
    assert stats.outputs["1"].features.joint.mean_h.shape == (3,)  # but a linear layer has its features last
    assert gs.collect(model, (x, y), outputs="0", channels="last").outputs["0"].features.joint.mean_h.shape == (5,)


def test_a_module_that_runs_twice_is_noted() -> None:
    model = Around(lambda m, x: m.head(m.branch(x) * m.branch(2 * x)), branch=nn.Linear(3, 4), head=nn.Linear(4, 2))
    x = normal(4, 3)
    stats = gs.collect(model, (x, torch.arange(4) % 2), outputs="branch")
    assert "ran 2 times in a forward; its output is the one of the last time" in joined(stats.notes["branch"]).text
    torch.testing.assert_close(stats.outputs["branch"].features.joint.mean_h, model.branch(2 * x).mean(0).detach())


def r_squared(H: Tensor, y: Tensor) -> float:
    """Target linearity by least squares on centred one-hot labels."""
    H, Y = H.detach(), F.one_hot(y).double()
    Y = Y - Y.mean(0)
    return float(1 - (Y - H @ torch.linalg.lstsq(H, Y, driver="gelsd").solution).square().sum() / Y.square().sum())


def test_layers_inside_sequence_first_modules_keep_their_samples() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)  # batch first outside, batch_first=False inside
    model = Around(
        lambda m, x: m.r(torch.tanh(m.mix(m.e(x.transpose(0, 1)))).mean(0)),
        e=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        mix=nn.Linear(6, 6),
        r=nn.Linear(6, 3),
    ).eval()
    x, y = normal(24, 8, 6), torch.arange(24) % 3
    with gs.capture(model, gradients=False) as tape:
        model(x)
    inputs = tape["e.layers.0.linear1"].applications[0].x  # [T, B, d]
    expected = r_squared(inputs.mean(0), y)
    for size in (24, 8, 5):  # 8 is T
        table = gs.measure(model, split(x, y, size), measures=["target_linearity"], outputs="e")
        assert table["e.layers.0.linear1"]["target_linearity"] == pytest.approx(expected)
        for name in ("e", "mix"):  # the output of one is the input of the other
            assert table[name]["target_linearity"] == pytest.approx(r_squared(model.e(x.transpose(0, 1)).mean(0), y))
        assert table["r"]["target_linearity"] is not None


def test_outputs_of_sequence_first_models() -> None:
    block = nn.Sequential(nn.Linear(5, 4), nn.Identity())
    model = Around(lambda m, x: m.r(m.block(x).mean(0)), block=block, r=nn.Linear(4, 3))
    for length in (6, 4):  # as long as the batch, and not
        x, y = normal(length, 6, 5), torch.arange(6) % 3
        Y = F.one_hot(y).double() - 1 / 3
        expected = float((model.block(x).detach().mean(0).T @ Y).square().sum())
        table = gs.measure(model, (x, y), measures="surrogate", outputs="block", batch_dim=1)
        assert table["block"]["surrogate"] == pytest.approx(expected)
