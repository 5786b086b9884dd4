from __future__ import annotations

import pytest
import torch

from cases import normal
from gramscope.linalg.moments import moments
from gramscope.measures.kernel_target import kernel_target_alignment


def dense(K: torch.Tensor, ideal: torch.Tensor) -> float:
    return float((K * ideal).sum() / (K.norm() * ideal.norm()))


def test_two_classes_as_plus_and_minus_one() -> None:
    H, labels = normal(30, 4) + 0.3, (torch.arange(30) % 3 == 0).long()  # unbalanced
    sign = 2.0 * labels.double() - 1
    one_hot = torch.nn.functional.one_hot(labels).double()
    expected = dense(H @ H.T, torch.outer(sign, sign))
    assert float(kernel_target_alignment(moments(H, one_hot), labels=True)) == pytest.approx(expected)


def test_more_classes_and_real_targets() -> None:
    H, labels, Y = normal(30, 4) + 0.3, torch.arange(30) % 3, normal(30, 2, seed=1) + 1
    same = labels[:, None] == labels
    ideal = torch.where(same, 1.0, -0.5).double()  # −1/(C − 1) for other classes
    one_hot = torch.nn.functional.one_hot(labels).double()
    assert float(kernel_target_alignment(moments(H, one_hot), True)) == pytest.approx(dense(H @ H.T, ideal))
    assert float(kernel_target_alignment(moments(H, Y), False)) == pytest.approx(dense(H @ H.T, Y @ Y.T))
