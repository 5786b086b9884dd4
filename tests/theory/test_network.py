from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.theory.early_time import speeds_from_gradient
from gramscope.theory.network import early_alignment


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
    expected = early_alignment(model, x, y, loss, layer)[layer]
    rows = [second_differences(model, x, y, loss, layer, step) for step in (1e-4, 5e-5, 2.5e-5)]
    for errors in zip(*rows, strict=True):
        assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)
        assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)
        assert errors[-1] < 0.01
    assert 0 < float(expected.correlation.min()) <= float(expected.correlation.max()) <= 1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def second_differences(
    model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, layer: str, relative: float
) -> tuple[float, float, float]:
    """Relative errors of ``(M₂ − 2M₁ + M₀)/γ²`` of W̄ᵀW̄ and W̄ᵀKW̄ in two steps of descent, and that of the centred NFA."""
    expected, run = early_alignment(model, x, y, loss, layer)[layer], copy.deepcopy(model)
    weight = run.get_submodule(layer).weight
    shape, start, step = expected.gram.shape[:-2], weight.detach().clone(), 0.0
    centred = []
    for _ in range(2):
        total = loss(run(x), y) * (1 if loss.reduction == "sum" else len(x))
        gradients = torch.autograd.grad(total, [weight, *run.parameters()])
        step = step or relative * float(start.norm() / gradients[0].norm())
        with torch.no_grad():
            for parameter, gradient in zip(run.parameters(), gradients[1:], strict=True):
                parameter.sub_(gradient, alpha=step)
        moved = (weight - start).detach().reshape(*shape, -1, expected.gram.shape[-1])
        centred.append(speeds_from_gradient(moved, gs.tangent_kernel(run, x, layer)[layer]))
    first, second = centred
    errors = [
        float(((two - 2 * one) / step**2 - 2 * limit).norm() / (2 * limit).norm())
        for two, one, limit in (
            (second.gram, first.gram, expected.gram),
            (second.agop, first.agop, expected.agop),
        )
    ]
    return errors[0], errors[1], float((second.correlation - expected.correlation).abs().mean())
