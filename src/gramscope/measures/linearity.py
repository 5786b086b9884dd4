"""Target linearity: how much of the targets a linear map of the features explains (Cha & Lee, weight Gram, §4)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.errors import InputError, RescueWarning, ResultWarning
from gramscope.linalg.arrays import Array, as_float_tensor, check_range, check_same_device, to_double, unit_scale
from gramscope.linalg.moments import Moments, class_moments, is_constant
from gramscope.linalg.normal_equations import fit_normal_equations
from gramscope.linalg.psd import EPS, add_gram_, frobenius, mirror_
from gramscope.linalg.ridge import UNCERTAIN, Reduced, check_ridge, reduce_rows
from gramscope.linalg.ridge_moments import least_squares_from_moments, reduce_moments
from gramscope.linalg.row_blocks import MappedRows, OneHotRows, Rows, check_pair, spans, unit_rows
from gramscope.linalg.short_directions import hidden_part
from gramscope.measures.targets import target_rows


def target_linearity(
    H: Array, Y: Array, ridge: float = 0.0, intercept: bool = False, *, rtol: float | None = None
) -> Tensor:
    """``TL = 1 − ‖Y − Hβ‖² / ‖Y − ȳ‖²``, ``β = (HᵀH + λI)⁻¹HᵀY`` ([Gram] Definition 2): the R² of ridge regression.

    Norms are Frobenius norms over all targets and ȳ is the mean over samples, so it is scikit-learn's variance-weighted
    R². Without an intercept TL may be negative for targets that are not centred. With λ = 0 and dependent features the
    fit is the one of minimum norm. Only blocks of rows and ``min(n, d)²`` numbers are held in float64.

    Args:
        H: features ``[n, d]``.
        Y: integer labels ``[n]`` (they become centred one-hot) or float targets ``[n]`` or ``[n, c]``.
        ridge: λ ≥ 0, on the scale of ``HᵀH`` (a sum over samples).
        intercept: fit a constant as well, unpenalised.
        rtol: singular values of H up to ``rtol`` times the largest count as zero. By default, without a ridge and with every
            feature scaled to length 1: those up to ``max(n, d)·2.2e-16`` times the largest, and those as short as the
            rounding of float32 features (:func:`gramscope.linalg.ridge.input_noise`).

    Returns:
        A float64 number (0-dimensional tensor). Where H can fit any target (n ≤ rank) a :class:`ResultWarning` says so, and
        where 0.001 of it or more rests on directions little longer than rounding a :class:`RescueWarning` with the size (of
        float64 features already where it may be off by more than 1e-6).

    >>> H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    >>> target_linearity(H, H @ torch.tensor([2.0, -1.0])).item()
    1.0
    """
    return explained_from_rows(H, Y, ridge, intercept, rtol).total()


def target_linearity_from_moments(m: Moments, ridge: float = 0.0, intercept: bool = False, eps: float = EPS) -> Tensor:
    """:func:`target_linearity` from collected moments (for labels take those ``with_centred_targets()``).

    The moments hold ``HᵀH``, whose condition number is squared: directions of the centred features shorter than
    ``√(d·2.2e-16)``, with every feature scaled to length 1, count as absent (a :class:`RescueWarning` where it matters);
    so do those as short as the rounding ``eps`` of the features as they came.

    >>> from gramscope.linalg.moments import moments
    >>> H = torch.tensor([[1.0], [2.0], [4.0]])
    >>> round(target_linearity_from_moments(moments(H, 3 * H)).item(), 12)
    1.0
    """
    return explained_from_moments(m, ridge, intercept, eps).total()


@dataclass(frozen=True)
class Explained:
    """What a fit leaves of every target.

    Args:
        residuals: ``‖y − Hβ‖²`` of every target, ``[c]``.
        totals: ``‖y − ȳ‖²`` of every target, ``[c]``.
        hat_trace: trace of the matrix that maps targets to their fit, with the intercept; NaN where it is not known.
    """

    residuals: Tensor
    totals: Tensor
    hat_trace: float

    def total(self) -> Tensor:
        """Target linearity, over all targets."""
        return 1.0 - self.residuals.sum() / self.totals.sum()


def explained(problem: Reduced, ridge: float, hidden: float = 0.0, limit: float = UNCERTAIN) -> Explained:
    """What the ridge fit of a reduced regression explains.

    Args:
        problem: the regression.
        ridge: λ.
        hidden: the part of the targets along directions that the regression cannot tell from rounding.
        limit: a warning comes where more than this share of it is uncertain.
    """
    freedom, residual = problem.degrees_of_freedom(ridge), problem.residuals(ridge)
    uncertain = problem.uncertain() + hidden if ridge == 0.0 else 0.0
    return _checked(problem.n, problem.mean_y, problem.totals, residual, problem.rank, freedom, uncertain, limit)


def explained_from_rows(H: Array, Y: Array, ridge: float, intercept: bool, rtol: float | None = None) -> Explained:
    """What the fit of :func:`target_linearity` explains; the squares of very large or small targets in other units."""
    features = Rows(H, "H")
    ridge = check_ridge(ridge)
    equilibrate = ridge == 0.0 and rtol is None
    features = features if ridge else unit_rows(features)
    targets = unit_rows(target_rows(Y, features.n))
    check_pair(features, targets)
    fit = fit_normal_equations(features, targets, ridge, intercept) if rtol is None else None
    if fit is None:
        problem = reduce_rows(features, targets, intercept, rtol, equilibrate)
        hidden = hidden_part(features, targets, problem) if equilibrate and features.eps <= EPS else 0.0
        return explained(problem, ridge, hidden, _limit(features.eps))
    return _checked(features.n, fit.mean_y, fit.totals, fit.residuals, fit.rank, fit.freedom)


def explained_from_moments(m: Moments, ridge: float, intercept: bool, eps: float = EPS) -> Explained:
    """:func:`explained` from moments of features that came with relative rounding ``eps``."""
    if check_ridge(ridge) > 0.0:
        return explained(reduce_moments(m, intercept), ridge)
    fit = least_squares_from_moments(m, intercept, eps)
    return _checked(m.n, m.mean_y, m.C_yy.diagonal(), fit.residual, fit.rank, fit.rank, fit.uncertain, _limit(eps))


@dataclass(frozen=True)
class IterativeResult:
    """A fit by conjugate gradients (:mod:`gramscope.linalg.conjugate_gradients`), stopped after some steps.

    Args:
        residuals: ``‖y − Hβ‖²`` of every target, ``[c]``.
        remaining: about how much they would fall together with more steps.
        passes: readings of the data.
        coefficients: β ``[d, c]``, without the constant of an intercept, and the same some steps before.
    """

    residuals: Tensor
    remaining: float
    passes: int
    coefficients: tuple[Tensor, Tensor]


def explained_by_iteration(m: Moments, fit: IterativeResult, ridge: float) -> Explained:
    """What a stopped fit of targets with moments ``m`` explains; a little less than the best one."""
    totals = m.C_yy.diagonal()
    fits_all = float(fit.residuals.sum()) <= UNCERTAIN * float(totals.sum()) and m.n <= m.mean_h.shape[-1]
    rank = m.n if fits_all and ridge == 0.0 else 0
    found = _checked(m.n, m.mean_y, totals, fit.residuals, rank, rank)
    return replace(found, hat_trace=math.nan)


def _limit(eps: float) -> float:
    """Target linearity that may be wrong without a warning, for features with relative rounding ``eps``."""
    return 1e-6 if eps <= EPS else UNCERTAIN


def _checked(
    n: int,
    mean_y: Tensor,
    totals: Tensor,
    residuals: Tensor,
    rank: int,
    freedom: float,
    uncertain: float = 0.0,
    limit: float = UNCERTAIN,
) -> Explained:
    """The one place where target linearity is formed and doubted."""
    total = totals.sum()
    if is_constant(n, mean_y, total):
        raise InputError(f"Y is constant over the {n} samples: no variance is left to explain")
    if rank >= n and freedom >= 0.99 * n:
        warnings.warn(
            f"target linearity is near 1 for any target: {n} samples, features of rank {rank}; "
            "take more samples, a ridge, or held-out data",
            ResultWarning,
            stacklevel=4,
        )
    elif uncertain > limit * max(float(total), float(residuals.sum())):
        warnings.warn(
            f"target linearity may be off by up to {uncertain / float(total):.2g}: it rests on directions of the features, or "
            "on digits of the numbers, that are little longer than rounding; a ridge leaves such directions out",
            RescueWarning,
            stacklevel=4,
        )
    return Explained(residuals, totals, float(freedom))


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
    if normalized:  # does not depend on scales
        features, targets = unit_rows(features), unit_rows(targets)
        weight = None if weight is None else unit_scale(weight)
    if center:
        features = MappedRows(features, shift=features.mean())
    cross = _cross(features, targets)
    cross = cross if weight is None else weight @ cross
    if not normalized:
        return check_range(cross.square().sum(), "the surrogate")
    if weight is not None and weight.shape[0] <= features.width:
        features, weight = MappedRows(features, weight), None
    gram = _small_gram(features, allow_dual=weight is None)
    gram = gram if weight is None else weight @ gram @ weight.mT
    return cross.square().sum() / (frobenius(gram) * frobenius(_small_gram(targets)))


def surrogate_from_moments(m: Moments, normalized: bool = False, center: bool = False) -> Tensor:
    """:func:`surrogate` from collected moments (for labels take those ``with_centred_targets()``).

    >>> from gramscope.linalg.moments import moments
    >>> surrogate_from_moments(moments(torch.eye(2), torch.tensor([[3.0], [4.0]]))).item()
    25.0
    """
    cross = frobenius(m.C_hy if center else m.HtY)
    if not normalized:
        return check_range(cross.square(), "the surrogate")
    gram = m.require_gram() if center else m.HtH
    return (cross / frobenius(gram)) * (cross / frobenius(m.YtY))


def gram_induced_error(H: Array, Y: Array, ridge: float, W: Array | None = None) -> Tensor:
    """``E(G) = λ² tr Yᵀ(G + λI)⁻²Y``, the squared residual of the ridge fit ([Gram] §4.1), without the n×n matrix G.

    Args:
        H: features ``[n, d]``, ``G = HHᵀ``.
        Y: labels or float targets.
        ridge: λ > 0.
        W: weight ``[k, d]`` for the linearised ``G = H WᵀW Hᵀ``.

    >>> gram_induced_error(torch.eye(2), torch.tensor([2.0, 4.0]), ridge=1.0).item()
    5.0
    """
    features = Rows(H, "H")
    targets = target_rows(Y, features.n)
    if check_ridge(ridge) == 0.0:
        raise InputError("the Gram-induced error needs ridge > 0; with ridge = 0 it is 0 times an inverse")
    weight = _weight(W, features)
    if weight is not None:
        features = MappedRows(features, weight)
    return check_range(reduce_rows(features, targets).residual(float(ridge)), "the Gram-induced error")


def _cross(features: Rows, targets: Rows) -> Tensor:
    """``HᵀY [d, c]``; for labels from class means, which costs one addition per feature instead of c products."""
    if isinstance(targets, OneHotRows):
        return class_moments(features, targets, gram=False).to_moments().C_hy
    cross = torch.zeros(targets.width, features.width, dtype=torch.float64, device=targets.block(0, 1).device)
    for start, stop in spans(features.n, features.width + targets.width):
        cross.addmm_(targets.block(start, stop).mT, features.block(start, stop))
    return cross.mT


def _weight(W: Array | None, features: Rows) -> Tensor | None:
    if W is None:
        return None
    weight = as_float_tensor(W, "W", dim=2)
    check_same_device(W=weight, H=features.data)
    if weight.shape[1] != features.width:
        raise InputError(f"W of shape {tuple(weight.shape)} does not act on H with {features.width} features")
    return to_double(weight)


def _small_gram(rows: Rows, allow_dual: bool = True) -> Tensor:
    """``XᵀX`` or, where that is larger, ``XXᵀ``: both have the same Frobenius norm."""
    if allow_dual and rows.n < rows.width:
        block = rows.block(0, rows.n)
        return block @ block.mT
    gram = torch.zeros(rows.width, rows.width, dtype=torch.float64, device=rows.block(0, 1).device)
    for block in rows.blocks():
        add_gram_(gram, block)
    return mirror_(gram)
