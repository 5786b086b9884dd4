"""Target linearity of data that were not fitted, from the moments of both samples."""

from __future__ import annotations

import torch

from gramscope.errors import InputError
from gramscope.linalg.moments import Moments
from gramscope.linalg.ridge import check_ridge, reduce_moments
from gramscope.linalg.row_blocks import Rows
from gramscope.statistics.layer import FeatureStatistics, widen


def held_out_from_moments(train: Moments, test: Moments, ridge: float = 0.0, intercept: bool = False) -> float:
    """``1 − ‖Y − Hβ − b‖² / ‖Y − ȳ‖²`` on ``test`` with β and b fitted on ``train``; both coded alike.

    >>> from gramscope.linalg.moments import moments
    >>> H = torch.tensor([[1.0], [2.0], [4.0]])
    >>> round(held_out_from_moments(moments(H, 3 * H), moments(H + 1, 3 * H + 3)), 12)
    1.0
    """
    total = float(test.C_yy.diagonal().sum())
    if total <= 0:
        raise InputError(f"the held-out targets are constant over the {test.n} samples")
    problem = reduce_moments(train, intercept)
    beta = problem.coefficients(Rows(torch.zeros(1, train.mean_h.shape[-1]), "H"), check_ridge(ridge))
    constant = train.mean_y - train.mean_h @ beta if intercept else torch.zeros_like(train.mean_y)
    offset = test.mean_y - test.mean_h @ beta - constant
    spread = test.C_yy.diagonal().sum() - 2 * (beta * test.C_hy).sum() + (beta * (test.require_gram() @ beta)).sum()
    return float(1 - (spread + test.n * offset.square().sum()) / total)


def coded_alike(train: FeatureStatistics, test: FeatureStatistics) -> tuple[Moments, Moments]:
    """Moments of both samples with the same target columns: labels one-hot minus the training frequencies."""
    if train.classes is None or test.classes is None:
        return train.joint, test.joint
    c = max(train.classes.counts.shape[0], test.classes.counts.shape[0])
    a, b = widen(train.classes, c), widen(test.classes, c)
    unknown = ((a.counts == 0) & (b.counts > 0)).nonzero().flatten().tolist()
    if unknown:
        raise InputError(f"the held-out data have classes {unknown} that the training data lack")
    left, right = a.to_moments(), b.to_moments()
    seen = a.counts > 0
    return _columns(left, seen, left.mean_y), _columns(right, seen, left.mean_y)


def _columns(m: Moments, keep: torch.Tensor, shift: torch.Tensor) -> Moments:
    return Moments(m.n, m.mean_h, (m.mean_y - shift)[keep], m.C_hh, m.C_hy[:, keep], m.C_yy[keep][:, keep])
