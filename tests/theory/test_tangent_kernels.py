from __future__ import annotations

import pytest
import torch
from scipy.stats import multivariate_normal, norm

from gramscope.theory.montecarlo import RandomMLP, estimate
from gramscope.theory.tangent_kernels import (
    ACTIVATIONS,
    one_hidden_layer_kernel_moments,
    tangent_kernel_at_infinite_width,
)
from reference import gaussian_average
from refusals import assert_refused

NAMES = tuple(ACTIVATIONS)


def inputs(n: int = 4, d: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_one_hidden_layer_is_exact_at_a_small_width(name: str) -> None:
    x = inputs(4)
    net = RandomMLP(3, (3,), name)
    kernels = torch.cat([j @ j.mT for j, _, _ in net.draws(x, 40_000, torch.Generator().manual_seed(2))])
    moments = estimate(kernels), estimate(kernels @ kernels)
    for found, exact in zip(moments, one_hidden_layer_kernel_moments(x, name, 3), strict=True):
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
        draws = net.draws(x, 30, torch.Generator().manual_seed(layer), layer)
        found = estimate(torch.cat([j @ j.mT for j, _, _ in draws]))
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


# -- Gaussian averages -----------------------------------------------------------------------------------------------
def covariance(n: int = 3) -> torch.Tensor:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x @ x.mT / 12  # small enough for the quadrature of erf's slope


def average(name: str, c: torch.Tensor, powers: tuple[int, ...], slope: bool) -> float:
    """E[Π φ(u_i)^p_i] or of φ', by quadrature; orthant probabilities for ReLU's slope, one integral for ReLU."""
    act = ACTIVATIONS[name]
    if name == "relu" and slope:
        return float(multivariate_normal(cov=c.numpy(), allow_singular=True).cdf([0.0] * len(powers)))
    if name == "relu":
        u = torch.linspace(0, 12, 200_001, dtype=torch.float64) * c[0, 0].sqrt()
        density = torch.from_numpy(norm.pdf(u.numpy(), scale=float(c[0, 0].sqrt())))
        mean, spread = c[0, 1] / c[0, 0] * u, (c[1, 1] - c[0, 1] ** 2 / c[0, 0]).sqrt()
        ratio = (mean / spread).numpy()
        inner = mean * torch.from_numpy(norm.cdf(ratio)) + spread * torch.from_numpy(norm.pdf(ratio))
        return float(torch.trapezoid(u * density * inner, u))
    function = act.slope if slope else act.phi
    return gaussian_average(lambda u: torch.stack([function(u[:, i]) ** p for i, p in enumerate(powers)]).prod(0), c)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_averages(name: str) -> None:
    c = covariance()
    act = ACTIVATIONS[name]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        pair = c[[i, j]][:, [i, j]]
        assert float(act.phi_kernel(c)[i, j]) == pytest.approx(average(name, pair, (1, 1), slope=False), rel=1e-5)
        assert float(act.slope_kernel(c)[i, j]) == pytest.approx(average(name, pair, (1, 1), slope=True), rel=1e-5)
    for i, j in ((0, 1), (1, 2), (1, 1)):
        expected = 0.0
        for m in range(3):
            index = sorted({i, j, m})
            powers = tuple((i == a) + (j == a) + 2 * (m == a) for a in index)
            expected += average(name, c[index][:, index], powers, slope=True)
        assert float(act.slope_fourth(c)[i, j]) == pytest.approx(expected, rel=1e-4)
