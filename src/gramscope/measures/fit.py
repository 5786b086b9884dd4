"""Linear fits from features to targets that can be applied to data they have not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, check_range
from gramscope.linalg.moments import Moments
from gramscope.linalg.ridge import check_ridge, reduce_rows
from gramscope.linalg.ridge_moments import reduce_moments
from gramscope.linalg.row_blocks import OneHotRows, Rows, check_pair, scale_of, scaled, spans
from gramscope.measures.targets import as_labels, label_rows, target_rows
from gramscope.statistics.feature_statistics import FeatureStatistics, projected_classes, widen, without_rows


@dataclass(frozen=True)
class LinearFit:
    """A linear map from features to targets, ``Ŷ = Hβ + b``.

    Args:
        beta: ``[d, c]``.
        intercept: ``b [c]``, zero without an intercept.
        ridge: the λ it was fitted with.
        rank: numerical rank of the training features (plus one for the intercept).
        tolerance: singular values up to this counted as zero.
        classes: label values of the columns, when fitted to labels.
        shift: frequency of each class in training, which the one-hot targets had subtracted.
    """

    beta: Tensor
    intercept: Tensor
    ridge: float
    rank: int
    tolerance: float
    classes: Tensor | None = None
    shift: Tensor | None = None

    def predict(self, H: Array) -> Tensor:
        """``Hβ + b``, ``[n, c]`` in float64."""
        return torch.cat([self.predict_block(block) for block in self.features(H).blocks(self.beta.shape[1])])

    def predict_block(self, block: Tensor) -> Tensor:
        """Predictions for float64 rows ``[m, d]``."""
        return block @ self.beta + self.intercept

    def features(self, H: Array) -> Rows:
        """``H`` as rows of the width this fit expects."""
        rows = Rows(H, "H")
        if rows.width != self.beta.shape[0]:
            raise InputError(f"H has {rows.width} features, the fit was made on {self.beta.shape[0]}")
        return rows

    def targets(self, Y: Array, n: int) -> Rows:
        """Targets coded as in training: labels with the training classes and frequencies."""
        if self.classes is None or self.shift is None:
            rows = target_rows(Y, n)
            if isinstance(rows, OneHotRows) or rows.width != self.beta.shape[1]:
                raise InputError(f"Y must have the {self.beta.shape[1]} float targets the fit was made on")
            return rows
        labels = label_rows(Y, self.classes)
        if labels.n != n:
            raise InputError(f"Y has {labels.n} labels but there are {n} samples")
        return OneHotRows(labels.data, labels.classes, self.shift)


def fit_linear(
    H: Array, Y: Array, ridge: float = 0.0, intercept: bool = False, *, rtol: float | None = None
) -> LinearFit:
    """The ridge fit behind :func:`target_linearity`, for held-out data; same arguments.

    >>> H = torch.tensor([[0.0], [1.0], [2.0]])
    >>> fit = fit_linear(H, torch.tensor([1.0, 3.0, 5.0]), intercept=True)
    >>> [round(x, 12) for x in (fit.beta.item(), fit.intercept.item())]
    [2.0, 1.0]
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    ridge = check_ridge(ridge)
    problem = reduce_rows(features, targets, intercept, rtol, equilibrate=ridge == 0.0 and rtol is None)
    beta = problem.coefficients(features, ridge)
    constant = torch.zeros_like(problem.mean_y)
    if problem.mean_h is not None:
        constant = problem.mean_y - problem.mean_h @ beta
    check_range(beta, "the coefficients of the fit")
    fit = LinearFit(beta, constant, ridge, problem.rank, problem.tolerance)
    return replace(fit, classes=targets.classes, shift=targets.shift) if isinstance(targets, OneHotRows) else fit


def held_out_target_linearity(fit: LinearFit, H: Array, Y: Array) -> Tensor:
    """TL of data the fit has not seen: ``1 − ‖Y − Hβ − b‖² / ‖Y − ȳ‖²`` with ȳ the mean of these samples.

    >>> H = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> fit = fit_linear(H, 2 * H)
    >>> round(held_out_target_linearity(fit, H + 1, 2 * H + 2).item(), 12)
    1.0
    """
    features = fit.features(H)
    targets = fit.targets(Y, features.n)
    check_pair(features, targets)
    exponent = scale_of(targets)
    mean = scaled(targets.mean(), -exponent)
    residual, total = torch.zeros_like(mean), torch.zeros_like(mean)
    for start, stop in spans(features.n, features.width + targets.width):
        y = scaled(targets.block(start, stop), -exponent)
        predicted = scaled(fit.predict_block(features.block(start, stop)), -exponent)
        residual += (y - predicted).square().sum(0)
        total += (y - mean).square().sum(0)
    if not float(total.sum()) > 0:
        raise InputError(f"the held-out targets are constant over the {features.n} samples")
    return check_range(1.0 - residual.sum() / total.sum(), "the residual divided by the spread of the targets")


def probe_accuracy(fit: LinearFit, H: Array, labels: Array) -> Tensor:
    """Share of samples whose label has the largest prediction, for a fit made on labels.

    >>> H = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    >>> y = torch.tensor([0, 0, 1, 1])
    >>> probe_accuracy(fit_linear(H, y), H, y).item()
    1.0
    """
    if fit.classes is None or fit.shift is None:
        raise InputError("probe_accuracy needs a fit made on integer labels")
    features = fit.features(H)
    targets = OneHotRows(as_labels(labels), fit.classes, fit.shift, "labels")
    check_pair(features, targets)
    right = torch.zeros((), dtype=torch.int64, device=fit.beta.device)
    for start, stop in spans(features.n, features.width + targets.width):
        predicted = (fit.predict_block(features.block(start, stop)) + fit.shift).argmax(1)
        right += (predicted == targets.index(start, stop).to(predicted.device)).sum()
    return right.double() / features.n


def held_out_from_moments(train: Moments, test: Moments, ridge: float = 0.0, intercept: bool = False) -> float:
    """``1 − ‖Y − Hβ − b‖² / ‖Y − ȳ‖²`` on ``test`` with β and b fitted on ``train``; both coded alike.

    >>> from gramscope.linalg.moments import moments
    >>> H = torch.tensor([[1.0], [2.0], [4.0]])
    >>> round(held_out_from_moments(moments(H, 3 * H), moments(H + 1, 3 * H + 3)), 12)
    1.0
    """
    problem = reduce_moments(train, intercept)
    beta = problem.coefficients(Rows(torch.zeros(1, train.mean_h.shape[-1]), "H"), check_ridge(ridge))
    return held_out_of_fit(beta, train, test, intercept, (beta * (test.require_gram() @ beta)).sum())


def held_out_of_fit(beta: Tensor, train: Moments, test: Moments, intercept: bool, spread: Tensor) -> float:
    """:func:`held_out_from_moments` of a given fit.

    Args:
        beta: ``[d, c]`` as fitted on ``train``.
        train, test: moments, coded alike; HᵀH is not needed.
        intercept: whether the fit has one.
        spread: ``‖Hβ‖²`` of the centred features of ``test``.
    """
    total = float(test.C_yy.diagonal().sum())
    if total <= 0:
        raise InputError(f"the held-out targets are constant over the {test.n} samples")
    constant = train.mean_y - train.mean_h @ beta if intercept else torch.zeros_like(train.mean_y)
    offset = test.mean_y - test.mean_h @ beta - constant
    within = test.C_yy.diagonal().sum() - 2 * (beta * test.C_hy).sum() + spread
    return float(1 - (within + test.n * offset.square().sum()) / total)


def coded_alike(train: FeatureStatistics, test: FeatureStatistics, gram: bool = True) -> tuple[Moments, Moments]:
    """Moments of both samples with the same target columns: labels one-hot minus the training frequencies."""
    train, test = (without_rows(part, gram) for part in (train, test))
    if train.labels or test.labels:  # both projected, with the frequencies of the training data subtracted
        left, right = (projected_classes(part).joint for part in (train, test))
        shift = left.mean_y
        return replace(left, mean_y=left.mean_y - shift), replace(right, mean_y=right.mean_y - shift)
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


def _columns(m: Moments, keep: Tensor, shift: Tensor) -> Moments:
    return Moments(m.n, m.mean_h, (m.mean_y - shift)[keep], m.C_hh, m.C_hy[:, keep], m.C_yy[keep][:, keep])
