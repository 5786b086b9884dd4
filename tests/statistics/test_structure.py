"""Where the samples are: windows, positions first, and samples that influence each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around, normal
from gramscope.errors import LayerError


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


LINKS = {n: torch.eye(n).roll(1, 0).double() for n in (6, 40)}
COUPLED: list[Callable[[nn.Module, Tensor], Tensor]] = [
    lambda net, x: net[1](LINKS[len(x)] @ torch.tanh(net[0](x))),  # a graph whose nodes are rows
    lambda net, x: net[1](torch.tanh(net[0](x - x.mean(0)))),
    lambda net, x: net[1](torch.tanh(net[0](x))) / x.norm(),
    lambda net, x: net[1](torch.tanh(net[0](x + x[-1:]))),  # one sample influences the others, and none influences it
    lambda net, x: net[1](torch.tanh(net[0](x + x[:1]))),
]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("n", LINKS)
@pytest.mark.parametrize("forward", COUPLED)
def test_coupled_samples_are_found(forward: Callable[[nn.Module, Tensor], Tensor], n: int) -> None:
    net, x, y = two_layers(), normal(n, 3), torch.arange(n) % 2
    model = Around(lambda m, x: forward(m.net, x), net=net)
    table = gs.measure(model, (x, y), nn.CrossEntropyLoss())
    assert table["net.0"]["nfa"] is None
    assert "samples of a batch influence each other" in table.notes["(output)"].text
    assert "give batches of one sample" in table.notes["(output)"].text
    total = nn.functional.cross_entropy(model(x), y)  # the gradient of the weight needs no samples
    (gradient,) = torch.autograd.grad(total, net[0].weight)
    assert table["net.0"]["gradient_norm"] == pytest.approx(float(gradient.norm()))
    for kernel in (gs.agop, gs.tangent_kernel, gs.dual_tangent_kernel):
        with pytest.raises(LayerError, match="influence each other.*a wrapper that adds a batch axis"):
            kernel(model, x)


def test_large_batches_are_not_run_again() -> None:
    seen = []

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        return m.net[1](torch.tanh(m.net[0](x)))  # type: ignore[no-any-return]

    gs.collect(Around(forward, net=two_layers()), (normal(40, 3), torch.arange(40) % 2), nn.CrossEntropyLoss())
    assert seen == [40, 2]


@pytest.mark.parametrize("n", LINKS)
def test_what_is_not_coupled(n: int) -> None:
    """Sampling inside the forward, inputs that must be sorted, and samples along another axis."""
    net, x = two_layers(), normal(n, 3)
    noisy = Around(lambda m, x: m.net[1](torch.tanh(m.net[0](x + torch.randn_like(x)))), net=net)
    assert gs.tangent_kernel(noisy, x)["net.0"].shape == (5, 5)

    def ordered(m: nn.Module, x: Tensor) -> Tensor:
        if (x[:, 0].diff() < 0).any():
            raise ValueError("sort the samples")
        return m.net[1](torch.tanh(m.net[0](x)))  # type: ignore[no-any-return]

    rising = x[x[:, 0].argsort()]
    torch.testing.assert_close(
        gs.agop(Around(ordered, net=net), rising)["net.0"],
        gs.agop(nn.Sequential(net[0], nn.Tanh(), net[1]), rising)["0"],
    )
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()  # [length, batch, features]
    assert len(gs.agop(encoder, normal(3, n, 4), batch_dim=1)) == 6
