"""What a rotation found in a basis is judged by."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from gramscope.linalg import processor, turning
from gramscope.linalg.kept_basis import few, in_basis, new_basis
from gramscope.linalg.turning import EPS, needed_iterations, turned_in_basis

GOOD = {
    "residual": 1e-6,
    "turned": 2.0,
    "lost": 0.0,
    "less": 1.0,
    "bent": 0.0,
    "tied": 0.0,
    "total": 1.0,
    "size": 1.0,
    "step": 1e-3,
    "angle": 0.1,
    "second": 1e-6,
    "distance": 0.1,
    "first effect": 1e-3,
    "second effect": 1e-6,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 0),
        ({"tied": 2.2e-7}, 1),
        ({"bent": 2.2e-7}, 1),
        ({"tied": 3e-7}, None),
        ({"bent": 3e-7}, None),
        ({"bent": float("nan")}, None),
        ({"tied": float("nan")}, None),
        ({"lost": 3e-7}, None),
        ({"lost": 3e-7, "turned": 0.5}, 0),
        ({"lost": 1e-6, "turned": 0.5}, None),
        ({"less": 1e3}, None),
        ({"less": 1e3, "turned": 1e-4}, 0),
        ({"lost": float("inf"), "turned": 0.0}, 0),
        ({"lost": float("nan")}, None),
        ({"turned": float("nan"), "lost": 1e-9}, None),
        ({"residual": 0.1}, None),
        ({"distance": 0.82}, None),
        ({"distance": float("nan")}, None),
        ({"second": 3e-4, "angle": 0.01}, 0),
        ({"second": 3.2e-4, "angle": 0.01}, None),
        ({"angle": 2.0}, None),
        ({"step": 0.1}, None),
        ({"size": 1e-9}, None),
        ({"second effect": 1e-5}, None),
        ({"first effect": 2.6e-7, "second effect": 2.2e-7}, None),
        ({"first effect": 1e-6, "second effect": 2.2e-7}, 0),
        ({"second effect": float("nan")}, None),
        ({"first effect": 0.0, "second effect": 0.0}, 0),
    ],
)
def test_what_is_relied_on(changes: dict[str, float], wanted: int | None) -> None:
    figures = torch.tensor(list((GOOD | changes).values()))
    assert needed_iterations({"figures": figures, "nearest": torch.zeros(1)}) == wanted


def turned(size: float, k: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A source, what a rotation by about ``size`` makes of it, and the rotation's logarithm, in float64."""
    source = torch.randn(k, d, generator=generator, dtype=torch.float64)
    A = torch.randn(k, k, generator=generator, dtype=torch.float64)
    A = size * (A - A.mT) / (A - A.mT).norm()
    return source, torch.linalg.matrix_exp(A) @ source, A


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("off", [0.0, 0.03])
def test_what_is_measured(host: bool, off: float, generator: torch.Generator) -> None:
    """Of a rotation that is known, in a basis that is off by a known angle."""
    source, target, A = turned(0.01, 30, 80, generator)
    V = new_basis(source.float())
    B = torch.randn(30, 30, generator=generator)
    B = off * (B - B.mT) / (B - B.mT).norm()
    V = V @ torch.linalg.matrix_exp(B)
    with mock.patch.object(processor, "on_host", return_value=host):
        found = turned_in_basis({"target": target.float(), "source": source.float(), "vectors": V})
    figures = dict(zip(GOOD, found["figures"].tolist(), strict=False))
    assert figures["size"] == pytest.approx(float(source.norm()), rel=1e-4)
    assert figures["step"] == pytest.approx(float((target - source).norm()), rel=1e-3)
    M = V.mT.double() @ target @ source.mT @ V.double()
    assert figures["total"] == pytest.approx(float(M.diagonal().norm()), rel=1e-3)
    f = few(30)
    K = V.mT.double() @ A @ V.double()
    K[:f, :f] = 0
    assert figures["angle"] == pytest.approx(float(K.norm()), rel=0.05)
    assert figures["second"] == pytest.approx(float((K @ K @ V.mT.double() @ source).norm()), rel=0.1)
    G = V.mT.double() @ source @ source.mT @ V.double()
    E = G[f:, f:] / (G.diagonal()[f:].sqrt() * G.diagonal()[f:].sqrt().unsqueeze(-1)) - torch.eye(30 - f)
    square = float((E @ E).norm())
    assert square > 1e-5 if off else square < 1e-8
    if off and not host:  # on the CPU a bound will do
        assert figures["distance"] == pytest.approx(square, rel=0.3)
    assert figures["distance"] >= 0.7 * square


@pytest.mark.parametrize("host", [True, False])
def test_the_gram_of_large_rotations(host: bool, generator: torch.Generator) -> None:
    """Just before the second order is not enough, coarse products would show."""
    source, target, _ = turned(0.08, 96, 96, generator)
    source, target = source.float(), target.float()
    with mock.patch.object(processor, "on_host", return_value=host):
        found = turned_in_basis({"target": target, "source": source, "vectors": new_basis(source)})
    figures = dict(zip(GOOD, found["figures"].tolist(), strict=False))
    assert turning._COARSE < turning._excess(figures["second"]) / (EPS * figures["total"]) < turning._PRECISE
    X, gram = found["nearest"].double(), source.double().mT @ source.double()
    assert (X.mT @ X - gram).norm() < 8e-8 * gram.norm()


@pytest.mark.parametrize("host", [True, False])
def test_small_rows_keep_their_digits(host: bool, generator: torch.Generator) -> None:
    U, V = (torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    W = ((U * torch.logspace(-5, 0, 40, dtype=torch.float64)) @ V.mT).float()
    basis = U.float()
    with mock.patch.object(processor, "on_host", return_value=host):
        (X,) = in_basis(basis, W)
    wanted = (basis.double().mT @ W.double())[: few(40)]
    assert ((X[: few(40)] - wanted).norm(dim=1) < 1e-6 * wanted.norm(dim=1)).all()
