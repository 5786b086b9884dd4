"""Random probes against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.linalg.budget import GROUPS
from gramscope.linalg.stochastic import gram_times, probes, singular_quadrature


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_products_with_probes_at_any_scale() -> None:
    rows = normal(5, 30)
    omega = probes(30, 64, rows)
    assert set(omega.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(omega, probes(30, 64, rows))
    torch.testing.assert_close(gram_times(rows, omega), rows.mT @ rows @ omega)
    tiny = (1e-30 * rows).float()
    exact = tiny.double().mT @ tiny.double() @ omega
    torch.testing.assert_close(gram_times(tiny, omega), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, 12), d=st.integers(1, 12), seed=st.integers(0, 99))
def test_a_complete_bidiagonalisation_is_exact_for_squares(k: int, d: int, seed: int) -> None:
    W = normal(k, d, seed=seed)
    found = singular_quadrature(W, steps=12)
    omega = probes(min(k, d), GROUPS, W)
    small = W if k >= d else W.mT
    torch.testing.assert_close(found.sums(torch.square), (small @ omega).square().sum(0))
    torch.testing.assert_close(
        found.sums(torch.ones_like), torch.full((GROUPS,), float(min(k, d)), dtype=torch.float64)
    )


def test_known_values_are_left_to_no_chance() -> None:
    U, s, Vt = torch.linalg.svd(normal(40, 20), full_matrices=False)
    s = torch.cat([torch.tensor([100.0, 50.0], dtype=torch.float64), s[2:]])
    W = U @ torch.diag(s) @ Vt
    for matrix, left, right in ((W, U, Vt.mT), (W.mT, Vt.mT, U)):
        plain = singular_quadrature(matrix).sums(torch.square)
        known = singular_quadrature(matrix, (left[:, :2], s[:2], right[:, :2])).sums(torch.square)
        exact = float(s.square().sum())
        assert float(known.std()) < 0.1 * float(plain.std())
        assert float(known.mean()) == pytest.approx(exact, abs=5 * float(known.std()) / GROUPS**0.5)
