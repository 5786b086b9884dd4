from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramscope_lab.data import DataSet, from_tensors
from refusals import assert_refused


def small(n: int = 20, test: int = 6) -> DataSet:
    """Inputs whose first entry tells which sample they are."""
    x = torch.arange(n + test, dtype=torch.float32)[:, None, None].expand(-1, 2, 3).clone()
    y = torch.arange(n + test) % 4
    return from_tensors("small", x[:n], y[:n], x[n:], y[n:])


def test_what_a_model_needs_to_know() -> None:
    data = small()
    assert (data.input_shape, data.outputs, data.classes, data.task) == ((2, 3), 4, 4, "classification")
    assert data.flat().input_shape == (6,)
    regression = from_tensors("r", torch.rand(4, 2), torch.rand(4), torch.rand(2, 2), torch.rand(2))
    assert (regression.outputs, regression.classes, regression.task) == (1, None, "regression")
    assert regression.y_train.shape == (4, 1)
    assert "20 train, 6 test" in repr(data)


@given(n=st.integers(2, 40), fraction=st.floats(0.03, 0.97), seed=st.integers(0, 5))
def test_validation_split_is_a_partition(n: int, fraction: float, seed: int) -> None:
    data = small(n)
    if not 0 < round(fraction * n) < n:
        assert_refused("fraction", data.split_validation, fraction, seed)
        return
    split = data.split_validation(fraction, seed)
    assert split.x_val is not None
    assert split.y_val is not None
    assert len(split.x_val) == round(fraction * n)
    together = torch.cat([split.x_train, split.x_val])[:, 0, 0]
    assert torch.equal(together.sort().values, torch.arange(n, dtype=torch.float32))
    assert torch.equal(split.y_val, split.x_val[:, 0, 0].long() % 4)
    assert split.x_test is data.x_test
    assert_refused("already", split.split_validation, fraction, seed)


def test_subset_draws_without_replacement_and_by_seed() -> None:
    data = small(30)
    cut = data.subset(10, 1, test=3)
    assert len(cut.x_train.unique(dim=0)) == 10
    assert len(cut.x_test) == 3
    assert torch.equal(cut.y_train, cut.x_train[:, 0, 0].long() % 4)
    assert torch.equal(cut.x_train, data.subset(10, 1).x_train)
    assert not torch.equal(cut.x_train, data.subset(10, 2).x_train)
    assert data.subset(10).classes == 4
    for wrong in (0, 31):
        assert_refused("30 training samples", data.subset, wrong)


def test_label_noise_touches_train_only_by_default() -> None:
    data = small(400, 200)
    noisy = data.with_label_noise(0.5, seed=3)
    changed = (noisy.y_train != data.y_train).float().mean()
    assert 0.3 < float(changed) < 0.45  # half of them redrawn, of which three quarters differ
    assert torch.equal(noisy.y_test, data.y_test)
    assert not torch.equal(data.with_label_noise(0.5, test=True).y_test, data.y_test)
    regression = from_tensors("r", torch.rand(4, 2), torch.rand(4), torch.rand(2, 2), torch.rand(2))
    assert_refused("needs classes", regression.with_label_noise, 0.5)


def test_label_noise_spares_validation_and_is_drawn_by_itself() -> None:
    """The same seed and size split, cut and noise: the samples chosen must not be the same ones."""
    data = small(400)
    noisy = data.with_label_noise(0.2, seed=3)
    split = data.split_validation(0.2, seed=3)
    touched = (noisy.y_train != data.y_train).nonzero().flatten()
    assert split.x_val is not None
    held = split.x_val[:, 0, 0].long()
    assert torch.isin(touched, held).float().mean() < 0.5  # a fifth, not all
    after = split.with_label_noise(0.5, seed=3)
    assert torch.equal(after.y_val, split.y_val)  # type: ignore[arg-type]
    assert not torch.equal(after.y_train, split.y_train)


def test_to_changes_floats_and_leaves_labels_and_tokens() -> None:
    double = small().split_validation(0.25).to("cpu", torch.float64)
    assert double.x_train.dtype == double.x_test.dtype == torch.float64
    assert double.x_val is not None
    assert double.x_val.dtype == torch.float64
    assert double.y_train.dtype == torch.int64
    pair, label = torch.ones(3, 2, dtype=torch.int32), torch.zeros(3).long()
    tokens = from_tensors("tokens", pair, label, pair, label)
    assert tokens.to(dtype=torch.float64).x_train.dtype == torch.int64


def test_nothing_touches_the_global_generator() -> None:
    before = torch.get_rng_state()
    small().split_validation(0.5).subset(4).with_label_noise(0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_bytes_are_pixels_and_classes_can_be_given() -> None:
    x = torch.full((5, 3, 2, 2), 255, dtype=torch.uint8)
    data = from_tensors("bytes", x, torch.zeros(5).long(), x[:1], torch.ones(1).long(), classes=7)
    assert data.outputs == 7
    assert torch.equal(data.x_train, torch.ones(5, 3, 2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": torch.zeros(3).long()}, "do not pair up"),
        ({"x_test": torch.zeros(6, 9)}, "one sample of test"),
        ({"x_train": torch.full((20, 2, 3), torch.nan)}, "x_train contains NaN"),
        ({"x_test": torch.full((6, 2, 3), torch.inf)}, "x_test contains NaN or inf"),
        ({"y_test": torch.full((6,), 4)}, "labels from 4 to 4"),
        ({"y_test": torch.full((6,), -1)}, "labels from -1"),
        ({"y_train": torch.zeros(20, dtype=torch.int32)}, "int64"),
        ({"y_train": torch.zeros(20, 5).long(), "y_test": torch.zeros(6, 5).long()}, r"of tokens \[n, t\]"),
        ({"y_train": torch.full((20, 2), -100), "y_test": torch.zeros(6, 2).long()}, "y_train labels no token"),
        ({"y_train": torch.full((20, 2), -1), "y_test": torch.zeros(6, 2).long()}, "labels from -1"),
        ({"classes": None}, "floats"),
        ({"x_test": torch.zeros(0, 2, 3), "y_test": torch.zeros(0).long()}, r"x_test \(0, 2, 3\) is empty"),
    ],
)
def test_wrong_tensors_are_explained(change: dict[str, Any], message: str) -> None:
    good = small()
    parts: dict[str, Any] = {k: getattr(good, k) for k in ("x_train", "y_train", "x_test", "y_test", "classes")}
    assert_refused(message, DataSet, "bad", **(parts | change))
