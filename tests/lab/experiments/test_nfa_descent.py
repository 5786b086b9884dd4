"""The stacked nets against torch modules and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gramscope.instruments.agop import tangent_kernel
from gramscope_lab.experiments.nfa_descent import (
    apply_mlp,
    chain_monomials,
    covariance,
    descend,
    initial_weights,
)

CPU = torch.device("cpu")
SEEDS, SCALES = (3, 4), (0.1, 1.0, 2.0)


def stack() -> list[torch.Tensor]:
    return [w.double() for w in initial_weights(5, 7, 2, SCALES, SEEDS, CPU)]


def module(weights: list[torch.Tensor], i: int, j: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for w in weights:
        layer = nn.Linear(w.shape[-1], w.shape[-2], bias=False, dtype=torch.float64)
        layer.weight.data.copy_(w[i, j])
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(SEEDS), 11, 6, generator=g, dtype=torch.float64)
    return drawn[..., :5], drawn[..., 5]


@pytest.mark.parametrize(("i", "j"), [(0, 0), (2, 1)])
def test_pass_and_step_agree_with_autograd(i: int, j: int) -> None:
    weights = stack()
    x, y = inputs()
    passed = apply_mlp(weights, x)
    net = module(weights, i, j)
    f = net(x[j]).squeeze(-1)
    torch.testing.assert_close(passed.outputs[i, j], f)
    (0.5 * (f - y[j]).square().mean()).backward()
    for w, layer in zip(descend(weights, passed, y, 0.3), net[::2], strict=True):
        torch.testing.assert_close(w[i, j], layer.weight.detach() - 0.3 * layer.weight.grad)


def test_covariance_is_the_tangent_kernel() -> None:
    weights, other = stack(), stack()
    other[1] = 0.5 * other[1]
    x, _ = inputs()
    passed, first = apply_mlp(weights, x), apply_mlp(other, x)
    found = tangent_kernel(module(weights, 1, 1), x[1], reference=module(other, 1, 1))
    for index, name in enumerate(("0", "2")):
        torch.testing.assert_close(covariance(passed.tangents[index])[1, 1], found[name].K)
        centred = covariance(passed.tangents[index], first.tangents[index])[1, 1]
        torch.testing.assert_close(centred, found[name].K_centered)


def test_scales_share_the_draw_and_set_the_variance() -> None:
    first, second, readout = initial_weights(400, 300, 2, (0.25, 1.0), (0,), CPU)
    torch.testing.assert_close(first[0], 0.5 * first[1])
    torch.testing.assert_close(second[0], second[1])
    assert first[1].var().item() == pytest.approx(1 / 400, rel=0.02)
    assert second[1].var().item() == pytest.approx(1 / 300, rel=0.02)
    assert readout.shape == (2, 1, 1, 300)
    both = initial_weights(400, 300, 2, (0.25, 1.0), (0,), CPU, scaled=2)
    torch.testing.assert_close(both[1][0], 0.5 * both[1][1])


def test_data_of_a_seed_do_not_depend_on_the_others() -> None:
    options = {"n": 50, "n_test": 20, "d": 6, "rank": 3, "alpha": None, "device": CPU}
    both, one = chain_monomials((0, 5), **options), chain_monomials((5,), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(both.x[1], one.x[0])
    torch.testing.assert_close(both.y_test[1], one.y_test[0])
    assert one.y.std().item() == pytest.approx(1, rel=1e-5)
