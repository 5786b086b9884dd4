"""Which layer is left to the readout optimizer: the last one executed, also where VCL could not train it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gramscope as gs
from gramscope.errors import InputError, LayerError


def mlp() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))


class Tied(nn.Module):
    """Tokens in, tokens out, with one weight for both; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            self.head = nn.Linear(8, 11, bias=False)
            self.embedding = nn.Embedding(11, 8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embedding(x)
        logits: Tensor = self.head(h + self.down(torch.tanh(self.up(h))))
        return logits.flatten(0, 1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(8, 20, generator=g)), torch.arange(8) % 4).backward()
    optimizer.step()


def trained(optimizer: gs.VCL) -> list[str]:
    layers: list[str] = optimizer.param_groups[0]["layers"]
    return layers


@pytest.mark.parametrize("head", ["frozen", "computed"])
def test_every_layer_before_a_head_that_cannot_be_trained(head: str) -> None:
    model = mlp()
    if head == "frozen":
        model[4].requires_grad_(False)
    else:
        weight_norm(model[4])
    optimizer = gs.VCL(model, gamma=0.1)
    assert trained(optimizer) == ["0", "2"]
    step(model, optimizer)
    assert trained(optimizer) == ["0", "2"]
    assert set(optimizer.diagnostics()) == {"0", "2"}


def test_a_head_with_the_weight_of_an_embedding() -> None:
    model = Tied()
    optimizer = gs.VCL(model, gamma=0.1, reduction=24.0)
    x = torch.arange(24).reshape(4, 6) % 11
    assert trained(optimizer) == ["up"]  # taken for the last one, being registered last, until the first forward
    F.cross_entropy(model(x), x.flatten()).backward()
    optimizer.step()
    assert trained(optimizer) == ["up", "down"]
    assert "head.weight  11 × 8  SGD (readout)" in optimizer.summary()

    again = Tied()
    again.load_state_dict(model.state_dict())
    resumed = gs.VCL(again, gamma=0.1, reduction=24.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, its in ((model, optimizer), (again, resumed)):
        its.zero_grad()
        F.cross_entropy(net(x), x.flatten()).backward()
        its.step()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_warm_up_trains_the_true_head() -> None:
    model = mlp()
    weight_norm(model[4])
    optimizer = gs.VCL(model, gamma=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(0))
    optimizer.warm_up([(x, torch.arange(32) % 4)], F.cross_entropy)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.startswith("4.")}
    model[4].requires_grad_(False)
    with pytest.raises(InputError, match="the last layer executed, '4', is frozen"):
        optimizer.warm_up([(x, torch.arange(32) % 4)], F.cross_entropy)


def test_a_state_from_before_the_first_step_leaves_the_head_open() -> None:
    """Also for an optimizer that has found it out meanwhile."""
    model = Tied()
    optimizer = gs.VCL(model, gamma=0.1, reduction=24.0)
    start = copy.deepcopy(optimizer.state_dict())
    x = torch.arange(24).reshape(4, 6) % 11
    for _ in range(2):
        F.cross_entropy(model(x), x.flatten()).backward()
        optimizer.step()
        assert trained(optimizer) == ["up", "down"]
        optimizer.load_state_dict(start)
        assert trained(optimizer) == ["up"]
        optimizer.zero_grad()


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(LayerError, match="layer '0' is lazy: run one forward pass"):
        gs.VCL(nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.Linear(12, 4)))


@pytest.mark.parametrize(
    ("dtype", "factor", "times"),
    [(torch.float32, 1 - 1e-5, 100), (torch.float32, 1.5, 1), (torch.bfloat16, 0.7, 1), (torch.float16, 1.05, 1)],
)
def test_weights_changed_from_outside_are_taken_up(dtype: torch.dtype, factor: float, times: int) -> None:
    """As the exact solver does, which keeps no weights of its own."""
    norms = []
    for solver in ("recursive", "exact"):
        model = mlp().to(dtype)
        optimizer = gs.VCL(model, gamma=1e-3, alpha=0.5, second_order=False, solver=solver)
        for seed in range(3 + times):
            if seed >= 3:
                with torch.no_grad():
                    model[0].weight.mul_(factor)
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.zero_grad()
            F.cross_entropy(model(x).float(), torch.arange(16) % 4).backward()
            optimizer.step()
        norms.append(float(model[0].weight.detach().double().norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4 if dtype == torch.float32 else 0.01)


def test_asked_for_all_directions_no_step_is_approximate() -> None:
    """Beyond the first steps, which are full for everyone."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 40, 150, generator=g), torch.randint(4, (48, 40), generator=g)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        first = nn.Sequential(nn.Linear(150, 140, bias=False), nn.Tanh(), nn.Linear(140, 4))
    nets = [first, copy.deepcopy(first)]
    nets[1].double()
    optimizers = [
        gs.VCL(nets[0], gamma=0.01, solver="recursive", rank=150),
        gs.VCL(nets[1], gamma=0.01, solver="exact"),
    ]
    for inputs, labels in zip(x, y, strict=True):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs.to(net[0].weight.dtype)), labels).backward()
            optimizer.step()
    W, exact = (net[0].weight.detach().double() for net in nets)
    assert (W - exact).norm() < 1e-4 * exact.norm()


def test_a_state_of_another_power_or_of_nothing_is_refused() -> None:
    model = mlp()
    state = gs.VCL(model, gamma=0.1).state_dict()
    with pytest.raises(InputError, match=r"alpha=0\.1, not 0\.5"):
        gs.VCL(mlp(), gamma=0.1, alpha=0.5).load_state_dict(state)
    with pytest.raises(InputError, match="trains the layers None"):
        gs.VCL(mlp(), gamma=0.1).load_state_dict({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers= takes names, globs and module types, not 3"),
        ({"floor": "a"}, "floor='a'"),
        ({"cutoff": "a"}, "cutoff='a'"),
        ({"momentum": "a"}, "momentum='a'"),
    ],
)
def test_arguments_of_another_kind(options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, LayerError), match=message):
        gs.VCL(mlp(), **options)  # type: ignore[arg-type]
