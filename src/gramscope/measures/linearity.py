"""Target linearity: how much of the targets a linear map of the features explains (Cha & Lee, weight Gram, §4).

Integer labels become centred one-hot columns, float targets stay as they are (:func:`target_rows`).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import InputError, RescueWarning, ResultWarning
from gramscope.linalg.arrays import (
    Array,
    MappedRows,
    OneHotRows,
    Rows,
    as_float_tensor,
    as_tensor,
    check_pair,
    check_range,
    check_same_device,
    spans,
    to_double,
)
from gramscope.linalg.moments import Moments, is_constant, moments
from gramscope.linalg.ridge import RidgeFit, check_ridge, fit_moments, fit_rows


def target_linearity(H: Array, Y: Array, ridge: float = 0.0, intercept: bool = False) -> Tensor:
    """``TL = 1 − ‖Y − Hβ‖² / ‖Y − ȳ‖²``, ``β = (HᵀH + λI)⁻¹HᵀY`` ([Gram] Definition 2): the R² of ridge regression.

    Norms are Frobenius norms over all targets and ȳ is the mean over samples, so it is scikit-learn's variance-weighted
    R². Without an intercept TL may be negative for targets that are not centred. With λ = 0 and dependent features the
    fit is the one of minimum norm. Only blocks of rows and ``min(n, d)²`` numbers are held in float64.

    Args:
        H: features ``[n, d]``.
        Y: integer labels ``[n]`` (they become centred one-hot) or float targets ``[n]`` or ``[n, c]``.
        ridge: λ ≥ 0, on the scale of ``HᵀH`` (a sum over samples).
        intercept: fit a constant as well, unpenalised.

    Returns:
        A float64 number (0-dimensional tensor). Where H can fit any target (n ≤ rank) a :class:`ResultWarning` says so, and
        where 0.001 of it or more rests on directions little longer than rounding a :class:`RescueWarning` with the size (of
        float64 features already where it may be off by more than 1e-6).

    >>> H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    >>> target_linearity(H, H @ torch.tensor([2.0, -1.0])).item()
    1.0
    """
    return checked(fit_linear(H, Y, ridge, intercept)).explained()


def checked(fit: RidgeFit) -> RidgeFit:
    """The fit, with a warning where it fits any target or rests on rounding; an error where targets are constant."""
    total, residual = float(fit.totals.sum()), float(fit.residuals.sum())
    if is_constant(fit.n, fit.mean_y, fit.totals.sum()):
        raise InputError(f"Y is constant over the {fit.n} samples: no variance is left to explain")
    if fit.rank >= fit.n and fit.hat_trace >= 0.99 * fit.n:
        warnings.warn(
            f"target linearity is near 1 for any target: {fit.n} samples, features of rank {fit.rank}; "
            "take more samples, a ridge, or held-out data",
            ResultWarning,
            stacklevel=3,
        )
    elif fit.uncertain > fit.limit * max(total, residual):
        warnings.warn(
            f"target linearity may be off by up to {fit.uncertain / total:.2g}: it rests on directions of the features, or on "
            "digits of the numbers, that are little longer than rounding; a ridge leaves such directions out, and features in "
            "float64, by gs.target_linearity of the features themselves, tell them from rounding",
            RescueWarning,
            stacklevel=3,
        )
    return fit


def fit_linear(H: Array, Y: Array, ridge: float = 0.0, intercept: bool = False) -> RidgeFit:
    """The ridge fit behind :func:`target_linearity`, for held-out data; same arguments.

    >>> H = torch.tensor([[0.0], [1.0], [2.0]])
    >>> fit = fit_linear(H, torch.tensor([1.0, 3.0, 5.0]), intercept=True)
    >>> [round(x, 12) for x in (fit.beta.item(), fit.intercept.item())]
    [2.0, 1.0]
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    fit = fit_rows(features, targets, ridge, intercept)
    return replace(fit, classes=targets.classes, shift=targets.shift) if isinstance(targets, OneHotRows) else fit


def held_out_target_linearity(fit: RidgeFit, H: Array, Y: Array) -> Tensor:
    """TL of data the fit has not seen: ``1 − ‖Y − Hβ − b‖² / ‖Y − ȳ‖²`` with ȳ the mean of these samples.

    >>> H = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> fit = fit_linear(H, 2 * H)
    >>> round(held_out_target_linearity(fit, H + 1, 2 * H + 2).item(), 12)
    1.0
    """
    features = fit.features(H)
    targets = _coded(fit, Y, features.n)
    check_pair(features, targets)
    mean = targets.mean()
    residual, total = torch.zeros_like(mean), torch.zeros_like(mean)
    for start, stop in spans(features.n, features.width + targets.width):
        y = targets.block(start, stop)
        residual += (y - fit.predict_block(features.block(start, stop))).square().sum(0)
        total += (y - mean).square().sum(0)
    if not float(total.sum()) > 0:
        raise InputError(f"the held-out targets are constant over the {features.n} samples")
    return check_range(1.0 - residual.sum() / total.sum(), "the residual divided by the spread of the targets")


def _coded(fit: RidgeFit, Y: Array, n: int) -> Rows:
    """Targets coded as in training: labels with the training classes and frequencies."""
    if fit.classes is None or fit.shift is None:
        rows = target_rows(Y, n)
        if isinstance(rows, OneHotRows) or rows.width != fit.beta.shape[1]:
            raise InputError(f"Y must have the {fit.beta.shape[1]} float targets the fit was made on")
        return rows
    labels = label_rows(Y, fit.classes)
    if labels.n != n:
        raise InputError(f"Y has {labels.n} labels but there are {n} samples")
    return OneHotRows(labels.data, labels.classes, fit.shift)


def held_out_from_moments(train: Moments, test: Moments, ridge: float = 0.0, intercept: bool = False) -> float:
    """``1 − ‖Y − Hβ − b‖² / ‖Y − ȳ‖²`` on ``test`` with β and b fitted on ``train``; both coded alike.

    >>> from gramscope.linalg.moments import moments
    >>> H = torch.tensor([[1.0], [2.0], [4.0]])
    >>> round(held_out_from_moments(moments(H, 3 * H), moments(H + 1, 3 * H + 3)), 12)
    1.0
    """
    fit = fit_moments(train, ridge, intercept)
    beta, total = fit.beta, float(test.C_yy.trace())
    if total <= 0:
        raise InputError(f"the held-out targets are constant over the {test.n} samples")
    offset = test.mean_y - test.mean_h @ beta - fit.intercept
    within = test.C_yy.trace() - 2 * (beta * test.C_hy).sum() + (beta * (test.require_gram() @ beta)).sum()
    return float(1 - (within + test.n * offset.square().sum()) / total)


def surrogate(H: Array, Y: Array, W: Array | None = None, normalized: bool = False, center: bool = False) -> Tensor:
    """``S = tr(Yᵀ G Y)``, the surrogate of target linearity ([Gram] §4.1), as ``‖W HᵀY‖_F²``: no n×n matrix is formed.

    ``G = HHᵀ``, or with a weight ``G = H WᵀW Hᵀ`` (the linearised Gram of the layer above, H being the weight's input).
    It is the sum over targets; some published code takes the mean, which is c times smaller.

    Args:
        H: features ``[n, d]``.
        Y: labels or float targets, as in :func:`target_linearity`.
        W: weight ``[k, d]``.
        normalized: ``⟨G, YYᵀ⟩ / (‖G‖_F ‖YYᵀ‖_F)`` of [Gram] Proposition 2, between 0 and 1, through d×d and c×c matrices.
        center: subtract the mean of H over samples first, as Proposition 2 assumes.

    >>> surrogate(torch.eye(2), torch.tensor([3.0, 4.0])).item()
    25.0
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    check_pair(features, targets)
    weight = _weight(W, features)
    if weight is not None and normalized:  # does not depend on its scale
        weight = weight / weight.norm()
    if center:
        features = MappedRows(features, shift=features.mean())
    if not normalized:
        cross = cross_product(features, targets)
        return check_range((cross if weight is None else weight @ cross).square().sum(), "the surrogate")
    features = features if weight is None else MappedRows(features, weight)
    sizes = square_inner(features, features).sqrt() * square_inner(targets, targets).sqrt()
    return square_inner(features, targets) / sizes


def surrogate_from_moments(m: Moments, normalized: bool = False, center: bool = False) -> Tensor:
    """:func:`surrogate` from collected moments (for labels take those ``with_centred_targets()``).

    >>> from gramscope.linalg.moments import moments
    >>> surrogate_from_moments(moments(torch.eye(2), torch.tensor([[3.0], [4.0]]))).item()
    25.0
    """
    cross = (m.C_hy if center else m.HtY).norm()
    if not normalized:
        return check_range(cross.square(), "the surrogate")
    gram = m.require_gram() if center else m.HtH
    if center and is_constant(m.n, m.mean_h, gram.trace()):
        return gram.new_full((), float("nan"))  # only rounding varies
    cosine: Tensor = (cross / gram.norm()) * (cross / m.YtY.norm())
    return cosine


def gram_induced_error(H: Array, Y: Array, ridge: float, W: Array | None = None) -> Tensor:
    """``E(G) = λ² tr Yᵀ(G + λI)⁻²Y``, the squared residual of the ridge fit ([Gram] §4.1), without the n×n matrix G.

    Args:
        H: features ``[n, d]``, ``G = HHᵀ``.
        Y: labels or float targets.
        ridge: λ > 0.
        W: weight ``[k, d]`` for the linearised ``G = H WᵀW Hᵀ``.

    >>> round(gram_induced_error(torch.eye(2), torch.tensor([2.0, 4.0]), ridge=1.0).item(), 12)
    5.0
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    if check_ridge(ridge) == 0.0:
        raise InputError("the Gram-induced error needs ridge > 0; with ridge = 0 it is 0 times an inverse")
    weight = _weight(W, features)
    if weight is not None:
        features = MappedRows(features, weight)
    return fit_rows(features, targets, ridge).residuals.sum()


def cross_product(features: Rows, targets: Rows) -> Tensor:
    """``HᵀY [d, c]``; for labels one addition per feature instead of c products."""
    if isinstance(targets, OneHotRows):
        return moments(features, targets, gram=False).C_hy
    cross = torch.zeros(targets.width, features.width, dtype=torch.float64, device=targets.block(0, 1).device)
    for start, stop in spans(features.n, features.width + targets.width):
        cross.addmm_(targets.block(start, stop).mT, features.block(start, stop))
    return cross.mT


def square_inner(first: Rows, second: Rows) -> Tensor:
    """``⟨XXᵀ, YYᵀ⟩ = ‖XᵀY‖_F²``, through d×e or, for n < d, n×n matrices."""
    n = first.n
    if n >= max(first.width, second.width):
        return cross_product(first, second).square().sum()
    x, y = first.block(0, n), second.block(0, n)
    return ((x @ x.mT) * (y @ y.mT)).sum()


def _weight(W: Array | None, features: Rows) -> Tensor | None:
    if W is None:
        return None
    weight = as_float_tensor(W, "W", dim=2)
    check_same_device(W=weight, H=features.data)
    if weight.shape[1] != features.width:
        raise InputError(f"W of shape {tuple(weight.shape)} does not act on H with {features.width} features")
    return to_double(weight)


def target_rows(Y: Array, n: int | None = None, classes: Tensor | int | None = None) -> Rows:
    """Targets ``[n, c]``, read in blocks of float64, so that labels of many classes are never expanded at once.

    A vector of integers (or booleans) holds labels, any values: they become one-hot columns, one per class in sorted
    order, centred over the samples. A float vector becomes one column. A matrix stays as it is, an integer one (such as
    the result of ``torch.nn.functional.one_hot``) as numbers; only labels are centred.

    Args:
        Y: labels ``[n]`` or values ``[n]`` or ``[n, c]``.
        n: number of samples expected.
        classes: all label values, or their number c for labels 0..c−1; default: the values that occur. A class without
            samples (there may be more classes than samples) has a column of zeros, which changes no measure.

    >>> target_rows(torch.tensor([3, 5, 5])).block(0, 3)
    tensor([[ 0.6667, -0.6667],
            [-0.3333,  0.3333],
            [-0.3333,  0.3333]], dtype=torch.float64)
    """
    tensor = as_tensor(Y, "Y")
    if tensor.numel() == 0:
        raise InputError(f"Y is empty: shape {tuple(tensor.shape)}")
    if n is not None and (tensor.dim() == 0 or tensor.shape[0] != n):
        raise InputError(f"Y has shape {tuple(tensor.shape)} but there are {n} samples")
    if not tensor.is_floating_point():
        if tensor.dim() == 1:
            return label_rows(tensor, classes)
        if tensor.dim() == 2 and tensor.shape[1] == 1:
            raise InputError(
                f"integer Y of shape {tuple(tensor.shape)} could be labels or values; pass Y.squeeze(1) for labels or "
                "Y.double() for values"
            )
        tensor = tensor.to(torch.float32 if tensor.dtype in (torch.bool, torch.uint8, torch.int8) else torch.float64)
    if tensor.dim() not in (1, 2):
        raise InputError(f"Y must be a vector or a matrix [samples, targets], got shape {tuple(tensor.shape)}")
    if classes is not None:
        raise InputError(f"classes= goes with integer labels, but Y is {tensor.dtype} of shape {tuple(tensor.shape)}")
    rows = Rows(tensor[:, None] if tensor.dim() == 1 else tensor, "Y")
    if _is_constant(rows):
        raise InputError(f"Y is constant over the {rows.n} samples: no variance is left to explain")
    return rows


def label_rows(labels: Array, classes: Tensor | int | None = None, name: str = "Y") -> OneHotRows:
    """Centred one-hot rows of integer labels ``[n]``; at least two classes must occur."""
    tensor = as_labels(labels, name)
    present, counts = _count(tensor)
    if present.numel() < 2:
        raise InputError(
            f"{name} has one class only (label {present.tolist()[0]} for all {tensor.numel()} samples); "
            "a sample with at least two classes is needed"
        )
    values = present
    if classes is not None:
        given = classes
        if not isinstance(given, Tensor):
            given = torch.arange(given, dtype=torch.int64, device=tensor.device)
        values = torch.unique(given.to(tensor.device, torch.int64))  # sorted
    frequency = to_double(torch.zeros(values.numel(), dtype=torch.float32, device=tensor.device))
    columns = OneHotRows(present, values, frequency, name).index(0, present.numel())
    frequency[columns.to(frequency.device)] = to_double(counts) / tensor.numel()
    return OneHotRows(tensor, values, frequency, name)


def as_labels(labels: Array, name: str = "labels") -> Tensor:
    """Integer labels ``[n]`` as a tensor of their own dtype.

    >>> as_labels([2, 0, 1])
    tensor([2, 0, 1])
    """
    tensor = as_tensor(labels, name)
    if tensor.is_floating_point() or tensor.dim() != 1 or tensor.numel() == 0:
        raise InputError(
            f"{name} must be a vector of integer labels, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor


def _count(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Values that occur and how often, in blocks: sorting all labels at once would copy them several times."""
    values = torch.empty(0, dtype=torch.int64, device=labels.device)
    counts = torch.empty(0, dtype=torch.int64, device=labels.device)
    for start, stop in spans(labels.numel(), 1):
        new, new_counts = torch.unique(labels[start:stop].to(torch.int64), return_counts=True)
        merged, place = torch.unique(torch.cat([values, new]), return_inverse=True)
        counts = torch.zeros_like(merged).index_add_(0, place, torch.cat([counts, new_counts]))
        values = merged
    return values, counts


def _is_constant(rows: Rows) -> bool:
    first = rows.block(0, 1)
    return all(bool((block == first).all()) for block in rows.blocks())
