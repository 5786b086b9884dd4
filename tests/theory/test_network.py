from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gramscope.theory.network import (
    early_alignment,
    layer_states,
    second_differences,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomise(model: nn.Module, source: torch.Generator) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=source)
    return model.double()


def mlp() -> nn.Module:
    return randomise(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2)), generator()
    )


def convolution() -> nn.Module:
    return randomise(
        nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Softplus(), nn.Flatten(), nn.Linear(16, 3)), generator()
    )


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1), dtype=torch.float64)


def test_states_are_the_gradient_and_the_agop() -> None:
    model, x = mlp(), batch(7, 3)
    y = torch.randint(2, (7,), generator=generator())
    states = layer_states(model, x, y, nn.CrossEntropyLoss())
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    for name in ("0", "2", "4"):
        weight = model.get_submodule(name).weight
        assert torch.allclose(states[name].gradient, torch.autograd.grad(loss, weight, retain_graph=True)[0])
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    agop = torch.einsum("ncd,nce->de", jacobian, jacobian) / 7
    w = states["0"].weight
    assert torch.allclose(w.mT @ states["0"].covariance @ w, agop)


def test_grouped_convolutions_are_stacks() -> None:
    speeds = early_alignment(convolution(), batch(5, 2, 3, 3), batch(5, 3), nn.MSELoss())
    assert speeds["0"].gram.shape == (2, 4, 4)
    assert speeds["0"].correlation.shape == (2,)


@pytest.mark.parametrize(
    ("model", "x", "y", "loss", "layer"),
    [
        (mlp(), batch(7, 3), torch.arange(7) % 2, nn.CrossEntropyLoss(), "0"),
        (mlp(), batch(7, 3), batch(7, 2), nn.MSELoss(reduction="sum"), "2"),
        (convolution(), batch(5, 2, 3, 3), batch(5, 3), nn.HuberLoss(), "0"),
    ],
)
def test_a_real_run_starts_at_the_prediction(
    model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, layer: str
) -> None:
    before = copy.deepcopy(model.state_dict())
    rows = second_differences(model, x, y, loss, layer)
    for name in ("gram_error", "agop_error"):
        errors = [getattr(row, name) for row in rows]
        assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)
        assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)
        assert errors[-1] < 0.01
    gaps = [abs(row.correlation - row.predicted) for row in rows]
    assert gaps[0] > 1.8 * gaps[1] > 3.2 * gaps[2]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
