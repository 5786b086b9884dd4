"""Sums of Gram matrices kept on and above the diagonal, against the whole product."""

from __future__ import annotations

import pytest
import torch

from gramscope.linalg.symmetric_sum import SymmetricSum


@pytest.mark.parametrize("d", [1, 96, 97, 250])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_sum_is_the_whole_product(d: int, stack: tuple[int, ...]) -> None:
    rows = torch.randn(3, *stack, 20, d, dtype=torch.float64)
    total = SymmetricSum(d, stack)
    for part in rows:
        total.add_gram(part)
    torch.testing.assert_close(total.dense(), (rows.mT @ rows).sum(0))
    assert torch.equal(total.dense(), total.dense().mT)


def test_a_half_of_the_numbers_is_kept() -> None:
    total = SymmetricSum(1600)
    assert sum(strip.numel() for strip in total.strips) < 0.54 * 1600**2


def test_parts_are_added_apart_and_split_into_equal_shares() -> None:
    rows = torch.randn(2, 5, 120, dtype=torch.float64)
    total = SymmetricSum(120, (1,))
    total.add_gram(rows[0], 0)
    total = total.split(4)
    total.add_gram(rows[1], 2)
    share = rows[0].mT @ rows[0] / 4
    expected = torch.stack([share, share, share + rows[1].mT @ rows[1], share])
    torch.testing.assert_close(total.dense(), expected)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_float32_rows_of_any_scale(scale: float) -> None:
    rows = scale * torch.randn(10, 100)
    total = SymmetricSum(100)
    total.add_gram(rows)
    torch.testing.assert_close(total.dense(), rows.double().mT @ rows.double(), rtol=1e-4, atol=1e-5 * scale**2)
