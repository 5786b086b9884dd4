from __future__ import annotations

import pytest
import torch

from gramscope.theory.early_time import speeds_from_kernel
from gramscope.theory.montecarlo import RandomMLP, estimate, kernel_moments
from gramscope.theory.tangent_kernels import ACTIVATIONS
from reference import mlp_tangents
from refusals import assert_refused


def stacks(nets: int, chunk: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    j = torch.randn(nets, 5, 3, generator=generator, dtype=torch.float64)
    return list(j.split(chunk))


def test_means_do_not_depend_on_the_stacking() -> None:
    whole, parts = kernel_moments(stacks(50, 50)), kernel_moments(stacks(50, 7))
    single = kernel_moments(j for stack in stacks(50, 50) for j in stack)
    j = torch.cat(stacks(50, 50))
    kernels = j @ j.mT
    for found in (whole, parts, single):
        assert torch.allclose(found.kernels, whole.kernels)
        assert found.nets == 50
    weights = torch.tensor([3.0] * 10 + [2.0] * 10, dtype=torch.float64)[:, None, None] / 50
    assert torch.allclose((weights * whole.kernels).sum(0), kernels.mean(0))
    assert torch.allclose((weights * whole.squares).sum(0), (kernels @ kernels).mean(0))


def test_error_bars_cover_at_the_stated_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 300, generator=generator)  # 300 experiments of 400 draws
    found = estimate(values)
    covered = float((found.mean.abs() < 2 * found.error).float().mean())
    assert 0.91 < covered < 0.99


def test_jackknife_error_matches_the_spread_of_repeated_predictions() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net = RandomMLP(4, (8, 8), "relu")
    generator = torch.Generator().manual_seed(2)
    found = [kernel_moments(j for j, _, _ in net.draws(x, 40, generator)).correlation(x) for _ in range(40)]
    spread = float(torch.stack([f.mean for f in found]).std())
    typical = float(torch.stack([f.error for f in found]).mean())
    assert typical == pytest.approx(spread, rel=0.4)


def test_prediction_is_that_of_the_mean_kernels() -> None:
    moments = kernel_moments(stacks(40, 40))
    p = torch.eye(5, dtype=torch.float64)[:, :4]
    first = speeds_from_kernel(p, moments.kernel.mean).correlation
    second = speeds_from_kernel(p, moments.kernel.mean, moments.square.mean).correlation
    assert float(moments.correlation(p).mean) == pytest.approx(float(first))
    assert float(moments.correlation(p, use_square=True).mean) == pytest.approx(float(second))
    assert float(first) != pytest.approx(float(second))


def test_one_net_has_no_error_bar() -> None:
    assert_refused("at least 2", kernel_moments, stacks(1, 1))
    assert_refused("at least 2", estimate, torch.ones(1))


# -- random nets -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_tangents_by_autograd(name: str, layer: int) -> None:
    net = RandomMLP(3, (5, 4, 6), name, scales=(1.0, 2.0, 0.5, 1.5))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = net.sample(torch.Generator().manual_seed(0), 2)
    j, h, f = net.tangents(weights, x, layer)
    for i in range(2):
        one = [w[i] for w in weights]
        assert torch.allclose(j[i], mlp_tangents(one, x, ACTIVATIONS[name].phi, layer))
    z = x
    for w in weights[:layer]:
        z = ACTIVATIONS[name].phi(z @ w.mT)
    assert torch.equal(h.expand_as(z), z)
    assert f.shape == (2, 4)


def test_draws_are_chunked_by_memory() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    net = RandomMLP(4, (5,), "relu")
    sizes = [len(j) for j, _, _ in net.draws(x, 7, torch.Generator(), chunk_bytes=2000)]
    assert sum(sizes) == 7
    assert len(sizes) > 1
