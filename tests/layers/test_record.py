"""Applications that the loss or the output does not reach count as zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import Around, normal
from gramscope.errors import LayerError, ResultWarning, joined
from gramscope.instruments.agop import dual_tangent_kernel

CE = nn.CrossEntropyLoss()
Y = torch.arange(6) % 3


class Stateful(nn.Module):
    """Computes a state for later with the layer that it has already used; ``how`` says in which way it is not used."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.h, self.o, self.how = layer, nn.LazyLinear(3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                self.state = self.h(x + 1)
        h = torch.tanh(self.h(x))
        if self.how == "unused":
            self.state = torch.tanh(self.h(h))
        return self.o(h.flatten(1))


LAYERS = {
    "linear": (lambda: nn.Linear(4, 4), (6, 4)),
    "tokens": (lambda: nn.Linear(4, 4), (6, 3, 4)),
    "convolution": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), (6, 4, 3, 3)),
}


@pytest.fixture(params=[(layer, how) for layer in LAYERS for how in ("unused", "no_grad")], ids="-".join)
def stateful(request: pytest.FixtureRequest) -> tuple[Stateful, Tensor]:
    build, shape = LAYERS[request.param[0]]
    model = Stateful(build(), request.param[1])
    x = normal(*shape)
    model(x.float())
    return model.double(), x


def test_gradients_of_reused_layers(stateful: tuple[Stateful, Tensor]) -> None:
    model, x = stateful
    total = F.cross_entropy(model(x), Y, reduction="sum")
    gradient = torch.autograd.grad(total, model.h.weight)[0]
    for own in (True, False):
        with gs.capture(model) as tape:
            losses = F.cross_entropy(model(x), Y, reduction="none")
            tape.backward(losses) if own else losses.sum().backward()
        record = tape["h"]
        torch.testing.assert_close(record.D, record.layer.to_matrix(gradient))
        delta = record.delta
        half = delta.shape[-2] // 2
        unreached = delta[..., half:, :] if model.how == "unused" else delta[..., :half, :]
        assert delta.shape[-2] == 2 * half
        assert unreached.abs().max() == 0
        assert (delta.norm() - unreached.norm()) > 1e-3
        Sigma = torch.einsum("...bsk,...bsl->...kl", delta, delta)
        torch.testing.assert_close(record.Sigma, Sigma)
    stats = gs.collect(model, (x, Y), CE)
    torch.testing.assert_close(stats["h"].D, record.D)
    torch.testing.assert_close(stats["h"].Sigma, Sigma)
    assert "h" not in stats.notes


def test_kernels_of_reused_layers(stateful: tuple[Stateful, Tensor]) -> None:
    model, x = stateful
    z = model.h(x).detach().requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda z: model.o(torch.tanh(z).flatten(1)), z)  # [n, c, n, …]
    groups = model.h.groups if isinstance(model.h, nn.Conv2d) else 1
    K = torch.zeros(groups, 4 // groups, 4 // groups, dtype=torch.float64)
    flat = []
    for i in range(6):
        J = jacobian[i, :, i]
        rows = (J.flatten(2) if groups > 1 else J.reshape(3, -1, 4).mT).reshape(3, groups, 4 // groups, -1)
        K += torch.einsum("cgks,cgls->gkl", rows, rows) / 6
        flat.append(J.flatten())
    for layers in (None, "h"):
        found = gs.tangent_kernel(model, x, layers)["h"]
        torch.testing.assert_close(found.reshape(K.shape), K)
    dual = torch.stack(flat) @ torch.stack(flat).T
    torch.testing.assert_close(dual_tangent_kernel(model, x)["h"], dual)


def test_layers_that_nothing_reaches_stay_errors() -> None:
    def aside(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.a(x), m.b(x) + m.b(2 * x)

    model, x = Around(aside, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), normal(6, 4)
    with gs.capture(model) as tape:
        CE(model(x)[0], Y).backward()
    with pytest.raises(LayerError, match="no gradient reached layer 'b'"):
        _ = tape["b"].D
    with pytest.raises(
        LayerError, match="'b': no Jacobians: the output does not depend on it.*leave it out of layers="
    ):
        gs.agop(model, x, ["a", "b"], output=0)
    with pytest.warns(ResultWarning, match="left out b: no Jacobians: the output does not depend on it"):
        assert list(gs.agop(model, x, output=0)) == ["a"]
    for layers in ("b", ["a", "b"]):
        with pytest.raises(LayerError, match="'b': no gradient: the loss does not reach it.*leave it out of layers="):
            gs.collect(model, (x, Y), CE, layers=layers, output=0)
    for jacobians in (False, True):
        stats = gs.collect(model, (x, Y), CE, output=0, jacobians=jacobians)
        assert stats["b"].D is None
        assert joined(stats.notes["b"]).text == "no gradient: the loss does not reach it"
    assert gs.collect(model, (x, Y), CE, output=0, layers="a")["a"].D.shape == (3, 4)


def test_a_forward_without_a_backward_is_still_an_error() -> None:
    model, x = nn.Linear(4, 3).double(), normal(6, 4)
    with gs.capture(model) as tape:
        CE(model(x), Y).backward()
        model(2 * x)
    with pytest.raises(LayerError, match="no gradient reached layer"):
        _ = tape["(model)"].delta


def expert(m: Any, x: Tensor) -> Tensor:
    """Uses its expert's output only where the sum of a batch is positive, and runs it in any case."""
    z = m.expert(x)
    return m.head(z if float(x.sum()) > 0 else x)


@pytest.mark.parametrize("layers", [None, ["expert", "head"]])
def test_layers_reached_in_some_batches_only(layers: list[str] | None) -> None:
    model, x = Around(expert, expert=nn.Linear(4, 4), head=nn.Linear(4, 3)), normal(6, 4).abs()
    data = [(x, Y), (-x, Y)]
    found = [gs.collect(model, order, CE, layers=layers, jacobians=True) for order in (data, data[::-1])]
    if layers is None:
        reached, unreached = (gs.collect(model, part, CE, jacobians=True) for part in data)
        assert unreached.notes["expert"][0].kind in ("no gradient", "no Jacobians")
        found += [reached.merge(unreached), unreached.merge(reached)]
    total = F.cross_entropy(model(x), Y, reduction="sum")
    W = model.head.weight.detach()
    for stats in found:
        assert "expert" not in stats.notes
        torch.testing.assert_close(
            stats["expert"].D, torch.autograd.grad(total, model.expert.weight, retain_graph=True)[0]
        )
        torch.testing.assert_close(stats["expert"].JtJ, 6 * W.T @ W)
        assert stats["expert"].features.n == 12  # both batches' inputs


def test_no_trainable_leaf_weight_at_all() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    expected = gs.collect(model, (normal(6, 4), Y), CE)
    found = gs.collect(model.requires_grad_(False), (normal(6, 4), Y), CE, autograd=True, residuals=True)
    torch.testing.assert_close(found["0"].D, expected["0"].D)
    assert gs.measure(model, (normal(6, 4), Y), CE, measures="all")["0"]["gradient_norm"] is not None


class Queried(nn.Module):
    """The loss of a batch, for a query that all samples share, given first."""

    def __init__(self) -> None:
        super().__init__()
        self.of_query, self.of_samples = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return (self.of_query(query) * self.of_samples(x)).sum()


def test_an_input_that_all_samples_share_does_not_count_them() -> None:
    model = Queried().double()
    with gs.capture(model) as tape:
        tape.backward(model(normal(1, 4), normal(6, 4)))
    assert tape.calls[-1].samples == 6
