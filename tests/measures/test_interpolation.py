"""Proposition 3 for many decoders, and counted linear regions against exact crossings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError, LayerError, ResultWarning
from gramscope.linalg import rows as rows_module
from gramscope.measures.interpolation import interpolation_error, pair_blocks
from gramscope.measures.regions import region_crossings


def codes(n: int = 12, d: int = 3, p: int = 4, seed: int = 0, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    Z, A, E = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((n, d), (d, p), (n, p)))
    return Z, Z @ A + noise * E


def test_equals_the_double_loop() -> None:
    Z, X = codes()
    lam = 0.3

    def decoder(z: Tensor) -> Tensor:
        return torch.tanh(z @ torch.ones(3, 4, dtype=z.dtype))

    W = torch.linalg.pinv(Z) @ X
    error = gap = between = 0.0
    for i in range(12):
        for j in range(12):
            z, x = lam * Z[i] + (1 - lam) * Z[j], lam * X[i] + (1 - lam) * X[j]
            error += float((decoder(z) - x).norm()) / 144
            gap += float((decoder(z) - z @ W).norm()) / 144
            between += float((z @ W - x).norm()) / 144
    result = interpolation_error(decoder, Z, X, lam)
    assert result.error == pytest.approx(error, rel=1e-10)
    assert result.decoder_gap == pytest.approx(gap, rel=1e-10)
    assert result.pair_residual == pytest.approx(between, rel=1e-10)
    assert result.ols_residual == pytest.approx(float((X - Z @ W).norm(dim=1).mean()), rel=1e-10)
    spread = (X - X.mean(0)).square().sum(1).mean()
    linearity = gs.target_linearity(Z, X)
    assert result.bound == pytest.approx(float(((1 - linearity) * spread).sqrt()), rel=1e-10)
    assert result.target_linearity == pytest.approx(float(linearity), rel=1e-12)


@given(st.floats(0.0, 1.0), st.integers(0, 5), st.booleans(), st.sampled_from([None, 7]))
def test_inequalities_hold(lam: float, seed: int, intercept: bool, pairs: int | None) -> None:
    Z, X = codes(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    result = interpolation_error(lambda z: z[:, :1].expand(-1, 4) ** 2, Z, X, lam, pairs, generator, intercept)
    slack = 1e-12
    assert result.error <= result.decoder_gap + result.pair_residual + slack
    if pairs is None:
        assert result.pair_residual <= result.ols_residual + slack
    assert result.ols_residual <= result.bound + slack
    W = torch.linalg.pinv(Z) @ X
    best = interpolation_error(lambda z: z @ W, Z, X, lam, pairs, generator)
    assert best.error == pytest.approx(best.pair_residual)
    assert best.decoder_gap == pytest.approx(0.0, abs=1e-12)


def test_blocks_of_pairs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Z, X = codes()
    whole = interpolation_error(lambda z: z.repeat(1, 2)[:, :4], Z, X)
    crossings = region_crossings(lambda z: [z], Z).per_segment
    monkeypatch.setattr(rows_module, "BLOCK_ENTRIES", 50)
    parts = interpolation_error(lambda z: z.repeat(1, 2)[:, :4], Z, X)
    assert parts.error == pytest.approx(whole.error, rel=1e-12)
    assert parts.pairs == whole.pairs == 144
    assert torch.equal(region_crossings(lambda z: [z], Z).per_segment, crossings)


def test_training_error_alone_bounds_nothing() -> None:
    Z, X = codes(noise=0.05)

    def nearest(z: Tensor) -> Tensor:
        return X[torch.cdist(z, Z).argmin(1)]

    assert torch.equal(nearest(Z), X)
    result = interpolation_error(nearest, Z, X)
    assert result.error > 5 * result.ols_residual
    assert result.error <= result.decoder_gap + result.pair_residual


def test_images_are_flattened_and_codes_keep_their_dtype() -> None:
    Z, X = codes()

    def decoder(z: Tensor) -> Tensor:
        assert z.dtype == torch.float32
        return torch.zeros(z.shape[0], 2, 2)

    result = interpolation_error(decoder, Z.float(), X.float().reshape(12, 2, 2))
    assert result.pairs == 144


def test_bad_input_is_named() -> None:
    Z, X = codes()
    with pytest.raises(InputError, match="between 0 and 1"):
        interpolation_error(lambda z: z, Z, X, lam=1.5)
    with pytest.raises(InputError, match="the decoder gave"):
        interpolation_error(lambda z: z, Z, X)
    with pytest.raises(InputError, match="same samples"):
        interpolation_error(lambda z: z, Z, X[:5])
    with pytest.raises(InputError, match="need a generator"):
        interpolation_error(lambda z: z, Z, X, pairs=3)
    with pytest.warns(ResultWarning, match="fits anything"):
        interpolation_error(lambda z: z[:, :1].expand(-1, 4), Z[:3], X[:3])


def test_random_pairs_are_distinct(generator: torch.Generator) -> None:
    blocks = list(pair_blocks(4, 500, generator, width=10_000))
    assert len(blocks) == 5
    first, second = (torch.cat(index) for index in zip(*blocks, strict=True))
    assert bool((first != second).all())
    counts = torch.bincount(first * 4 + second, minlength=16).reshape(4, 4)
    assert int((counts > 0).sum()) == 12


def network(generator: torch.Generator) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LeakyReLU()).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def test_first_layer_crossings_are_exact(generator: torch.Generator) -> None:
    net = network(generator)
    X = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    z = net[0](X)
    exact = ((z[:, None] > 0) != (z[None] > 0)).sum(2).flatten()
    result = region_crossings(net[:2], X, points=3)
    assert torch.equal(result.per_segment, exact)  # a unit changes at most once on a segment
    by_function = region_crossings(lambda x: [net[0](x)], X, points=3)
    assert torch.equal(by_function.per_segment, exact)


def test_more_points_find_more_crossings(generator: torch.Generator) -> None:
    net = network(generator)
    X = 3 * torch.randn(6, 2, dtype=torch.float64, generator=generator)
    means = [region_crossings(net, X, points=points).mean for points in (2, 9, 129, 1025)]
    assert means == sorted(means)
    result = region_crossings(net, X, points=129)
    assert len(result.per_layer) == 2
    assert sum(result.per_layer) == pytest.approx(result.mean)
    assert region_crossings(net, X, pairs=4, generator=generator).per_segment.shape == (4,)


def test_other_piecewise_linear_units() -> None:
    X = torch.tensor([[-3.0], [9.0]])
    assert region_crossings(nn.Sequential(nn.ReLU6()), X, points=99).per_segment.tolist() == [0, 2, 2, 0]
    assert region_crossings(nn.Sequential(nn.Hardtanh(-1, 2)), X, points=99).per_segment.tolist() == [0, 2, 2, 0]


def test_the_network_is_left_as_it_was(generator: torch.Generator) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout())
    net[1].eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    X = torch.randn(4, 2, generator=generator)
    before = torch.get_rng_state()
    region_crossings(net, X)
    with pytest.raises(RuntimeError):
        region_crossings(net, torch.randn(4, 5, generator=generator))
    assert torch.equal(before, torch.get_rng_state())
    assert [m.training for m in net] == [True, False, True, True]
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_networks_that_hide_their_units_are_named() -> None:
    with pytest.raises(LayerError, match="no ReLU-like module in the network"):
        region_crossings(nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(InputError, match="points"):
        region_crossings(nn.ReLU(), torch.ones(2, 2), points=1)
