"""Features of layers that see each sample in several windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import normal


class Windows(nn.Module):
    """Eight positions in four windows of two; a layer inside the windows, and the same layer applied to all positions."""

    def __init__(self, sample_by_sample: bool) -> None:
        super().__init__()
        self.inside, self.plain = nn.Linear(3, 3), nn.Linear(3, 3)
        self.plain.load_state_dict(self.inside.state_dict())
        self.head = nn.Linear(3, 3)
        self.sample_by_sample = sample_by_sample

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(len(x), 4, 2, 3)
        parts = parts if self.sample_by_sample else parts.transpose(0, 1)
        z = self.inside(parts.reshape(-1, 2, 3)).reshape(parts.shape)
        z = z if self.sample_by_sample else z.transpose(0, 1)
        return self.head(torch.tanh(z.reshape(x.shape) + self.plain(x)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [[9], [4, 4, 1], [1, 8]])
def test_windows_of_a_sample_are_averaged(sizes: list[int]) -> None:
    model, x, y = Windows(True).double(), normal(9, 8, 3), torch.arange(9) % 3
    table = gs.measure(
        model,
        list(zip(x.split(sizes), y.split(sizes), strict=True)),
        F.cross_entropy,
        measures=["target_linearity", "nc1"],
    )
    assert table["inside"] == pytest.approx(table["plain"], rel=1e-9)
    assert table["inside"]["nc1"] > 0


def test_other_orders_are_not_paired() -> None:
    table = gs.measure(
        Windows(False).double(),
        (normal(9, 8, 3), torch.arange(9) % 3),
        F.cross_entropy,
        measures=["target_linearity", "nfa"],
    )
    assert table["inside"]["target_linearity"] is None
    assert table["inside"]["nfa"] is not None
    assert "36 rows for 9 samples" in table.notes["inside"].text


@pytest.mark.parametrize("positions", [6, 4, 8])
def test_positions_first_inside_the_model(positions: int) -> None:
    """As XLNet and Longformer have them; with as many positions as samples the shape does not show it."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.plain = nn.Linear(3, 3), nn.Linear(3, 3)
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.inside(x.transpose(0, 1)).transpose(0, 1) + self.plain(x)
            return self.head(torch.tanh(z).mean(1))  # type: ignore[no-any-return]

    table = gs.measure(
        Transposed().double(),
        (normal(6, positions, 3), torch.arange(6) % 3),
        F.cross_entropy,
        measures=["target_linearity", "nc1"],
    )
    assert table["inside"] == pytest.approx(table["plain"], rel=1e-9)
    assert table["inside"]["nc1"] > 0
