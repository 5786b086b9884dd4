"""Moments merge exactly: any split, any order, also with large means."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import normal, randoms, refused
from gramscope.errors import InputError
from gramscope.linalg.arrays import OneHotRows
from gramscope.linalg.moments import Moments, block_moments, is_constant, moments


def same(a: Moments, b: Moments, scale: float = 1.0) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
    return all(
        torch.allclose(x, y, rtol=1e-10, atol=1e-10 * scale) if isinstance(x, Tensor) else x == y for x, y in pairs
    )


def coded(labels: Tensor, classes: int) -> OneHotRows:
    return OneHotRows(labels, torch.arange(classes), torch.zeros(classes, dtype=torch.float64))


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[Tensor]]:
    """A number of samples and a partition of them in random order."""
    n = draw(st.integers(1, 12))
    order = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    parts = [torch.tensor(order[i:j], dtype=torch.int64) for i, j in zip([0, *cuts], [*cuts, n], strict=True) if i < j]
    return n, parts


@given(splits(), st.booleans(), st.sampled_from([0.0, 1e4]), st.integers(0, 3))
def test_merge_equals_one_pass(split: tuple[int, list[Tensor]], gram: bool, offset: float, seed: int) -> None:
    n, parts = split
    H, Y = randoms((n, 3), (n, 2), seed=seed)
    H, Y = H + offset, Y - offset
    merged = reduce(Moments.merge, (moments(H[part], Y[part], gram) for part in parts))
    assert same(merged, moments(H, Y, gram), 1 + offset)


@given(splits(), st.integers(0, 3))
def test_class_merge_equals_one_pass(split: tuple[int, list[Tensor]], seed: int) -> None:
    n, parts = split
    generator = torch.Generator().manual_seed(seed)
    H, labels = normal(n, 3, seed=seed), torch.randint(4, (n,), generator=generator)
    merged = reduce(Moments.merge, (moments(H[part], coded(labels[part], 4)) for part in parts))
    assert same(merged, moments(H, coded(labels, 4)))


def test_uncentred_forms_come_back() -> None:
    H, Y = normal(30, 4) + 2, normal(30, 2, seed=1) - 1
    m = moments(H, Y)
    assert torch.allclose(m.HtH, H.T @ H)
    assert torch.allclose(m.HtY, H.T @ Y)
    assert torch.allclose(m.YtY, Y.T @ Y)
    centred = m.with_centred_targets()
    assert torch.allclose(centred.HtY, H.T @ (Y - Y.mean(0)))
    assert torch.allclose(centred.YtY, (Y - Y.mean(0)).T @ (Y - Y.mean(0)))


@pytest.mark.parametrize("entries", [8, 2**17])
def test_labels_have_the_moments_of_their_one_hot_rows(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.linalg.moments.CACHED_ENTRIES", entries)
    H, labels = normal(30, 4) + 2, torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    found = moments(H, coded(labels, 3))
    assert same(found, moments(H, one_hot))
    h = H - H.mean(0)
    assert torch.allclose(found.require_gram(), h.T @ h)
    counts, means = found.class_means()
    assert counts.tolist() == one_hot.sum(0).tolist()
    assert torch.allclose(means, torch.stack([H[labels == c].mean(0) for c in range(3)]))


def test_groups_have_moments_of_their_own() -> None:
    h, y = randoms((2, 9, 3), (9, 2))
    stacked = block_moments(h[:, :4], y[:4]).merge(block_moments(h[:, 4:], y[4:]))
    for group in range(2):
        alone = moments(h[group], y)
        assert torch.allclose(stacked.HtY[group], alone.HtY)
        assert torch.allclose(stacked.HtH[group], alone.HtH)


def test_kinds_that_do_not_fit_are_refused() -> None:
    H, labels = torch.ones(3, 2), torch.arange(3)
    refused(moments(H, H).merge, moments(H, H, gram=False), match="different kinds")
    refused(moments(H, coded(labels, 3)).merge, moments(H, coded(labels, 4)), match="different kinds")
    with pytest.raises(InputError, match="gram=True"):
        _ = moments(H, H, gram=False).HtH


def test_a_constant_is_known_by_its_rounding() -> None:
    H = torch.full((1000, 1), 0.1, dtype=torch.float64)
    m = moments(H, H)
    assert is_constant(m.n, m.mean_h, m.C_yy.trace())
    H[0] += 1e-9
    m = moments(H, H)
    assert not is_constant(m.n, m.mean_h, m.C_yy.trace())
