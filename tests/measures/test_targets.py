"""Labels and values as targets, and everything that cannot be one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import refused
from gramscope.errors import InputError
from gramscope.linalg import row_blocks as rows_module
from gramscope.measures.targets import label_rows, target_rows


def as_targets(Y: object, n: int | None = None, classes: Tensor | int | None = None) -> Tensor:
    rows = target_rows(Y, n, classes)  # type: ignore[arg-type]
    return rows.block(0, rows.n)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int16])
def test_labels_become_centred_one_hot(dtype: torch.dtype) -> None:
    labels = torch.tensor([4, 2, 9, 2, 2], dtype=dtype)
    expected = torch.nn.functional.one_hot(torch.tensor([1, 0, 2, 0, 0])).double()
    assert torch.allclose(as_targets(labels), expected - expected.mean(0))
    assert torch.allclose(as_targets(labels.numpy()), expected - expected.mean(0))


def test_booleans_are_labels_and_integer_matrices_values() -> None:
    assert as_targets(torch.tensor([True, False])).tolist() == [[-0.5, 0.5], [0.5, -0.5]]
    one_hot = torch.nn.functional.one_hot(torch.tensor([0, 1, 1]))
    assert torch.equal(as_targets(one_hot), one_hot.double())


def test_given_classes_are_sorted_and_give_empty_columns() -> None:
    expected = [[-0.5, 0.0, 0.0, 0.5, 0.0], [0.5, 0.0, 0.0, -0.5, 0.0]]
    for classes in (5, torch.tensor([4, 3, 0, 1, 2])):
        assert as_targets(torch.tensor([3, 0]), classes=classes).tolist() == expected


def test_blocks_count_the_same_classes(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    labels = torch.randint(-3, 4, (50,), generator=generator)
    whole = as_targets(labels)
    monkeypatch.setattr(rows_module, "BLOCK_ENTRIES", 7)
    assert torch.allclose(torch.cat(list(target_rows(labels).blocks())), whole, atol=1e-15)


BAD: list[tuple[object, str]] = [
    (torch.zeros(4, dtype=torch.int64), "one class only"),
    (torch.ones(4), "constant over the 4 samples"),
    (torch.ones(4, 2), "constant over the 4 samples"),
    (torch.tensor([1.0, float("nan"), 2.0, 0.0]), "1 NaN or infinite entries"),
    (torch.tensor([1.0, float("inf"), 2.0, 0.0]), "1 NaN or infinite entries"),
    (torch.empty(0), "empty"),
    (torch.empty(0, dtype=torch.int64), "empty"),
    (torch.tensor([1j, 2, 3, 4]), "complex"),
    (torch.tensor([[1], [2], [3], [4]]), r"squeeze\(1\) for labels"),
    (torch.zeros(4, 2, 2), "vector or a matrix"),
    (torch.tensor(1.0), "vector or a matrix"),
    (["cat", "dog"], "pass numbers"),
    (torch.tensor([0.0, 1.0]).to_sparse(), "sparse"),
]


@pytest.mark.parametrize(("Y", "message"), BAD)
def test_bad_targets_are_named(Y: Tensor, message: str) -> None:
    refused(as_targets, Y, match=message)


def test_lengths_and_classes_must_fit() -> None:
    refused(as_targets, torch.tensor([0, 1, 2]), n=5, match="there are 5 samples")
    with pytest.raises(InputError, match=r"labels \[7\] that are not among the classes \[0, 1, 2\]"):
        as_targets(torch.tensor([0, 1, 7]), classes=3)
    refused(as_targets, torch.tensor([0.0, 1.0]), classes=2, match="goes with integer labels")
    refused(label_rows, torch.tensor([0.5, 1.0]), match="vector of integer labels")


def test_floats_of_any_layout_stay() -> None:
    y = np.arange(5.0)
    y.flags.writeable = False
    expected = torch.arange(5.0).double()[:, None]
    layouts = [y, y[::-1].copy()[::-1], y.astype(">f4"), y.astype(np.longdouble), y.astype(np.float32)[:, None]]
    for same in (*layouts, y.tolist(), torch.arange(5.0)):
        assert torch.equal(as_targets(same), expected)
