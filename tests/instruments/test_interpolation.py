"""Proposition 3 of [Gram] for many decoders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
from cases import randoms, refused
from gramscope.errors import ResultWarning
from gramscope.instruments.interpolation import interpolation_error, pair_blocks
from gramscope.instruments.regions import region_crossings
from gramscope.linalg import arrays as rows_module


def codes(n: int = 12, d: int = 3, p: int = 4, seed: int = 0, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    Z, A, E = randoms((n, d), (d, p), (n, p), seed=seed)
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
    crossings = region_crossings(torch.nn.ReLU(), Z).per_segment
    monkeypatch.setattr(rows_module, "BLOCK_ENTRIES", 50)
    parts = interpolation_error(lambda z: z.repeat(1, 2)[:, :4], Z, X)
    assert parts.error == pytest.approx(whole.error, rel=1e-12)
    assert parts.pairs == whole.pairs == 144
    assert torch.equal(region_crossings(torch.nn.ReLU(), Z).per_segment, crossings)


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
    refused(interpolation_error, lambda z: z, Z, X, lam=1.5, match="between 0 and 1")
    refused(interpolation_error, lambda z: z, Z, X, match="the decoder gave")
    refused(interpolation_error, lambda z: z, Z, X[:5], match="same samples")
    refused(interpolation_error, lambda z: z, Z, X, pairs=3, match="need a generator")
    with pytest.warns(ResultWarning, match="fits anything"):
        interpolation_error(lambda z: z[:, :1].expand(-1, 4), Z[:3], X[:3])


def test_random_pairs_are_distinct(generator: torch.Generator) -> None:
    blocks = list(pair_blocks(4, 500, generator, width=10_000))
    assert len(blocks) == 5
    first, second = (torch.cat(index) for index in zip(*blocks, strict=True))
    assert bool((first != second).all())
    counts = torch.bincount(first * 4 + second, minlength=16).reshape(4, 4)
    assert int((counts > 0).sum()) == 12
