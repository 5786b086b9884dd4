"""Rotations by conjugate gradients: orthogonal whatever they are used for, and honest about what they leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from gramscope.optim.rotation import Figures, coarse, coarse_product, precise_product, rotation, rounding


def weights(kind: str, generator: torch.Generator) -> Tensor:
    if kind == "wide":
        return torch.randn(96, 600, generator=generator) / 600**0.5
    if kind == "square":
        return torch.randn(160, 160, generator=generator) / 160**0.5
    U, V = (torch.linalg.qr(torch.randn(128, 128, generator=generator))[0] for _ in range(2))
    return (U * torch.logspace(0, -3, 128)) @ V.mT


@given(k=st.integers(1, 12), size=st.floats(0, 0.4), iterations=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_rotations_are_orthogonal(k: int, size: float, iterations: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    W, D = torch.randn(1, k, 15, generator=generator), torch.randn(1, k, 15, generator=generator)
    E, (one,) = rotation(W, size * D * W.norm() / D.norm(), 0.0, iterations)
    Q = torch.eye(k, dtype=torch.float64) + E[0].double()
    if one.angle <= 0.5:
        assert one.orthogonal
        assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(k, dtype=torch.float64)) < 1e-6
    K = 0.5 * (Q - Q.mT)  # sin of the angles
    assert torch.linalg.matrix_norm(K, 2) <= one.angle * 1.01 + 1e-6


def test_no_change_is_no_rotation(generator: torch.Generator) -> None:
    W = torch.randn(2, 5, 9, generator=generator)
    W[1, :3] = 0
    E, found = rotation(W, torch.zeros_like(W), 0.0, 4)
    assert torch.equal(E, torch.zeros(2, 5, 5))
    assert [one.excess() for one in found] == [0.0, 0.0]


def test_gains_are_what_the_iteration_gains(generator: torch.Generator) -> None:
    """``‖D − K W‖²`` falls by the gains, down to its least value."""
    W, D = torch.randn(1, 8, 20, generator=generator), 1e-4 * torch.randn(1, 8, 20, generator=generator)
    for iterations in (1, 3, 8, 28):
        E, (one,) = rotation(W, D, 0.0, iterations)
        K = 0.5 * (E[0] - E[0].mT)
        assert one.step - one.gained[-1] == pytest.approx(float((D[0] - K @ W[0]).square().sum()), rel=1e-3)
    least = (reference.nearest_with_gram(W[0] + D[0], W[0]) - W[0] - D[0]).square().sum()
    assert one.step - one.gained[-1] == pytest.approx(float(least), rel=1e-3)


@pytest.mark.parametrize("change", [5e-4, 2e-2])
@pytest.mark.parametrize("kind", ["wide", "square", "decades"])
def test_the_estimate_follows_the_excess(kind: str, change: float, generator: torch.Generator) -> None:
    """The estimate is of the right size, and the iteration never ends too early."""
    W = weights(kind, generator)
    D = torch.randn(W.shape, generator=generator)
    D *= change * W.norm() / D.norm()
    least = float((reference.nearest_with_gram(W + D, W) - W - D).norm())
    for iterations in (2, 3, 4, 5, 6, 8, 12, 16, 24):
        E, (one,) = rotation(W[None], D[None], 0.0, iterations)
        excess = float((W + E[0] @ W - W - D).norm()) / least - 1
        if iterations >= 6:
            assert one.excess() > 0.4 * excess - 1e-4
        if iterations >= (24 if kind == "decades" else 12):
            assert one.excess() < 6 * excess + 1e-4
        for tolerance in (0.1, 0.02, 0.005):
            if one.enough(tolerance):
                assert excess <= 1.1 * tolerance


def test_the_estimate_of_known_series() -> None:
    def estimate(left: list[float]) -> float:
        return Figures(step=2.0, weights=1.0, gained=[1 - x for x in left]).excess()

    for n in (8, 16, 32):
        power, geometric = [1 / (i + 1) ** 2 for i in range(n + 1)], [0.75**i for i in range(n + 1)]
        assert 1 <= estimate(power) / ((1 + power[-1]) ** 0.5 - 1) < 2
        assert estimate(geometric) > 0.9 * ((1 + geometric[-1]) ** 0.5 - 1)
    assert estimate(geometric) < 1e-3
    assert estimate([1.0, 0.5]) == float("inf")
    assert Figures(step=0.0, weights=1.0, gained=[0.0] * 3).excess() == 0.0


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_as_precise_as_they_say(device: str, generator: torch.Generator) -> None:
    A, B = (torch.randn(2, 40, 40, generator=generator).to(device) for _ in range(2))
    exact = A.double() @ B.double()
    assert (precise_product(A, B) - exact).norm() < 5e-6 * exact.norm()
    found = coarse_product(coarse(A), coarse(B))
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 2 * rounding(A) * exact.norm()
