"""Which axis of a captured module's output holds the features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError
from gramscope.notes import joined
from gramscope.statistics.layouts import layout


class Block(nn.Module):
    """A user's own block around a 1-d convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x))


def one_dimensional() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.ReLU(), Block(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(12, 2)
    )
    x = torch.randn(8, 2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model.double(), x, torch.arange(8) % 2


def test_channels_of_one_dimensional_convolutions() -> None:
    model, x, y = one_dimensional()
    expected = model[0](x).mean(2).mean(0)
    stats = gs.collect(model, (x, y), outputs=["0", "3"])
    torch.testing.assert_close(stats.outputs["0"].joint.mean_h, expected.detach())
    assert stats.outputs["3"].joint.mean_h.shape == (3,)
    for name in ("1", "2"):
        with pytest.raises(InputError, match=rf"output of module '{name}' has shape \(8, 3, 7\).*channels='first'"):
            gs.collect(model, (x, y), outputs=name)
        assert gs.collect(model, (x, y), outputs=name, channels="first").outputs[name].joint.mean_h.shape == (3,)
    assert gs.measure(model, (x, y), outputs="2", channels="last")["2"]["feature_rank"] is not None
    with pytest.raises(InputError, match="channels='middle'"):
        gs.collect(model, (x, y), outputs="0", channels="middle")


def test_other_outputs_are_read_as_before() -> None:
    linear, norm = nn.Linear(5, 3), nn.LayerNorm(5)
    assert layout(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Dropout()), linear) == "last"
    assert layout(nn.MultiheadAttention(4, 2), Block()) == "last"
    assert layout(nn.Identity(), norm) == "usual"
    assert layout(nn.Identity(), Block()) == "unknown"
    model = nn.Sequential(nn.Identity(), linear, nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.ones(4, 6, 7, 5), torch.arange(4) % 2
    model(x)
    stats = gs.collect(model, (x, y), outputs=["0", "1"])
    assert stats.outputs["0"].joint.mean_h.shape == (6,)  # four axes: an image with 6 channels
    assert stats.outputs["1"].joint.mean_h.shape == (3,)  # but a linear layer has its features last
    assert gs.collect(model, (x, y), outputs="0", channels="last").outputs["0"].joint.mean_h.shape == (5,)


def test_a_module_that_runs_twice_is_noted() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.branch(x) * self.branch(2 * x))

    model, x = Siamese(), torch.ones(4, 3)
    stats = gs.collect(model, (x, torch.arange(4) % 2), outputs="branch")
    assert "ran 2 times in a forward; its output is the one of the last time" in joined(stats.notes["branch"]).text
    torch.testing.assert_close(stats.outputs["branch"].joint.mean_h, model.branch(2 * x)[0].detach().double())
