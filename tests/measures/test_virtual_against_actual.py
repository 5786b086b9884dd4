"""Virtual against actual updates: a gradient step on each sample by autograd, and Lipschitz constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import randoms, refused
from gramscope.errors import InputError
from gramscope.measures.virtual import lipschitz_constant, virtual_against_actual


@pytest.mark.parametrize(
    ("activation", "value"),
    [("relu", 1.0), ("leaky_relu", 1.0), ("tanh", 1.0), ("softplus", 1.0), ("sigmoid", 0.25), ("hardswish", 1.5)],
)
def test_lipschitz_constants(activation: str, value: float) -> None:
    assert lipschitz_constant(activation) == pytest.approx(value, rel=1e-6)


def test_lipschitz_constant_of_gelu_is_at_root_two() -> None:
    # Φ(z) + zφ(z) is largest where (2 − z²)φ(z) = 0.
    expected = (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)
    assert lipschitz_constant(F.gelu) == pytest.approx(expected, rel=1e-12)
    assert lipschitz_constant(lambda z: 3 * torch.tanh(z)) == pytest.approx(3.0)


def test_an_activation_without_a_constant_is_refused() -> None:
    refused(lipschitz_constant, torch.square, match="grows without bound")
    refused(lipschitz_constant, "rellu", match="no activation 'rellu'")
    refused(lipschitz_constant, lambda z: z.sum(), match="entry by entry")


@pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.tanh, F.leaky_relu, F.silu])
def test_actual_updates_are_those_of_a_gradient_step(activation: Callable[[Tensor], Tensor]) -> None:
    W, h, readout = randoms((6, 4), (9, 4), (6,))
    gamma, bound, sign, ratios = 0.05, 0, 0, []
    constant = lipschitz_constant(activation)
    g = torch.empty(9, 6, dtype=torch.float64)
    for i in range(9):
        weight = W.clone().requires_grad_()
        out = activation(weight @ h[i])
        out.retain_grad()
        ((readout * out).sum() - 1).square().backward()
        assert weight.grad is not None
        assert out.grad is not None
        g[i] = out.grad
        actual = activation((W - gamma * weight.grad) @ h[i]) - out.detach()
        virtual = -gamma * out.grad
        limit = constant**2 * h[i].square().sum() * virtual.abs()
        ratios.append(float((actual.abs() / limit).max()))
        bound += int((actual.abs() <= limit * (1 + 1e-12)).sum())
        sign += int((actual * virtual >= 0).sum())
    result = virtual_against_actual(h, h @ W.T, g, gamma, activation)
    assert result.bound == bound / 54 == 1.0  # the theorem
    assert result.sign == sign / 54
    assert result.largest_ratio == pytest.approx(max(ratios), rel=1e-9)
    assert result.coordinates == 54
    if activation in (F.relu, torch.tanh, F.leaky_relu):
        assert result.sign == 1.0  # non-decreasing


def test_gelu_breaks_the_bound_with_constant_one() -> None:
    h, z, g = randoms((200, 5), (200, 8), (200, 8))
    h = F.normalize(h)
    assert virtual_against_actual(h, z + 1.4, g, 1e-3, "gelu").bound == 1.0
    assert virtual_against_actual(h, z + 1.4, g, 1e-3, "gelu", lipschitz=1.0).bound < 0.7


def test_bad_input_is_named() -> None:
    refused(virtual_against_actual, torch.ones(2, 1), torch.ones(3, 2), torch.ones(3, 2), 0.1, "relu", match="must fit")
    with pytest.raises(InputError, match="gamma must be positive"):
        virtual_against_actual(torch.ones(2, 1), torch.ones(2, 2), torch.ones(2, 2), 0.0, "relu")
