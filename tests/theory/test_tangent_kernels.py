from __future__ import annotations

import pytest
import torch

from gramscope.theory.activations import ACTIVATIONS
from gramscope.theory.montecarlo import kernel_moments
from gramscope.theory.random_mlp import RandomMLP
from gramscope.theory.tangent_kernels import one_hidden_layer_kernel_moments, tangent_kernel_at_infinite_width
from refusals import assert_refused

NAMES = tuple(ACTIVATIONS)


def inputs(n: int = 4, d: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_one_hidden_layer_is_exact_at_a_small_width(name: str) -> None:
    x = inputs(4)
    net = RandomMLP(3, (3,), name)
    moments = kernel_moments((j for j, _, _ in net.draws(x, 20_000, torch.Generator().manual_seed(2))), groups=100)
    for found, exact in zip((moments.kernel, moments.square), one_hidden_layer_kernel_moments(x, name, 3), strict=True):
        assert ((found.mean - exact).abs() < 4 * found.error).all()
        assert (found.error.diagonal() < 0.06 * exact.diagonal()).all(), "the test can tell"


def test_proposition_10_with_its_missing_terms() -> None:
    x, k = inputs(5), 7
    kernel, square = one_hidden_layer_kernel_moments(x, "quadratic", k, weight_variance=1 / k, readout_variance=1.0)
    g = x @ x.mT
    assert torch.allclose(kernel, g)
    assert torch.allclose(square, (1 - 1 / k) * g @ g + 3 / k * (x.square().sum() * g + 2 * g @ g))


@pytest.mark.parametrize("name", NAMES)
def test_recursion_is_the_wide_limit_of_one_layer(name: str) -> None:
    x = inputs()
    limit = tangent_kernel_at_infinite_width(x, name)
    kernel, square = one_hidden_layer_kernel_moments(x, name, 10**9)
    assert torch.allclose(kernel, limit)
    assert torch.allclose(square, limit @ limit)


@pytest.mark.parametrize("name", NAMES)
def test_recursion_agrees_with_wide_nets_at_every_layer(name: str) -> None:
    x, scales = inputs(), (1.0, 2.0, 0.5, 1.5)
    net = RandomMLP(3, (400, 400, 400), name, scales)
    for layer in (0, 1, 2):
        stream = (j for j, _, _ in net.draws(x, 30, torch.Generator().manual_seed(layer), layer))
        found = kernel_moments(stream).kernel
        limit = tangent_kernel_at_infinite_width(x, name, 3, layer, scales)
        assert ((found.mean - limit).abs() < 4 * found.error + 0.06 * limit.abs().max()).all()
        wrong = tangent_kernel_at_infinite_width(x, name, 3, layer)
        assert not ((found.mean - wrong).abs() < 4 * found.error + 0.06 * wrong.abs().max()).all()


def test_zero_inputs_are_dead_for_relu() -> None:
    x = torch.cat([inputs(2), torch.zeros(1, 3, dtype=torch.float64)])
    kernel, square = one_hidden_layer_kernel_moments(x, "relu", 5)
    assert kernel[2].tolist() == [0, 0, 0]
    smaller = one_hidden_layer_kernel_moments(x[:2], "relu", 5)
    assert torch.allclose(kernel[:2, :2], smaller[0])
    assert torch.allclose(square[:2, :2], smaller[1])
    assert torch.isfinite(tangent_kernel_at_infinite_width(x, "relu", 3)).all()


def test_bad_nets_are_named() -> None:
    x = inputs()
    assert_refused("gelu", tangent_kernel_at_infinite_width, x, "gelu")
    assert_refused("layer=2", tangent_kernel_at_infinite_width, x, "relu", 2, layer=2)
    assert_refused("scales", RandomMLP, 3, (4,), "relu", (1.0,))
    assert_refused("widths", RandomMLP, 3, (), "relu")
    assert_refused("width=0", one_hidden_layer_kernel_moments, x, "relu", 0)
