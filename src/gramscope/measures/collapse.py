"""Neural collapse, NC1 to NC4 (Papyan, Han and Donoho 2020), and that of regression, NRC1 to NRC3 (Andriopoulos et al. 2024).

With c targets the features of a regression collapse to c principal directions, which the readout's rows span, and the readout's
Gram follows the targets' covariance. The paper scales every centred feature to length one; here NRC1 and NRC2 are shares of the
total variance instead, which sums over the data give. Deep layers are measured the same way (Rangamani and Unal 2026).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope.linalg.arrays import (
    Array,
    Rows,
    as_float_tensor,
    as_matrices,
    check_same_device,
    spans,
    to_double,
)
from gramscope.linalg.moments import CACHED_ENTRIES, Moments, moments
from gramscope.linalg.psd import EPS, eigh, psd_power, svd
from gramscope.measures.linearity import label_rows


@dataclass(frozen=True)
class NeuralCollapse:
    """How collapsed the features are; all but ``nc4`` fall to 0 at full collapse.

    Args:
        nc1: ``tr(Σ_W Σ_B⁺)/C``, within-class against between-class scatter; None where the scatter was not collected.
        nc2_equinorm: standard deviation of ``‖μ_c − μ‖`` over its mean.
        nc2_equiangular: standard deviation of the cosines between centred class means.
        nc2_simplex: mean ``|cos + 1/(C−1)|``: the angles of a simplex equiangular tight frame.
        nc3: ``‖W/‖W‖_F − M/‖M‖_F‖_F²``, readout against centred class means; None without a readout.
        nc4: share of samples where readout and nearest class mean agree, 1 at collapse; None where it was not measured.
        classes: classes that occur.
        missing: for each measure that is None, why.
    """

    nc1: float | None
    nc2_equinorm: float
    nc2_equiangular: float
    nc2_simplex: float
    nc3: float | None
    nc4: float | None
    classes: int
    missing: dict[str, str]


def neural_collapse_from_rows(
    H: Array, labels: Array, weight: Array | None = None, bias: Array | None = None
) -> NeuralCollapse:
    """NC1–NC4 of penultimate features.

    ``Σ_W`` averages over samples, ``Σ_B`` over classes, both around the mean μ of all samples, as in the original (which
    has balanced classes). A class with one sample adds no scatter within classes. With coinciding class means the
    results are NaN, with a warning; so are the angles of NC2 where one class mean is the mean of all samples, and NC3
    with a readout of zeros.

    Args:
        H: features ``[n, d]``.
        labels: integers ``[n]``; with a readout its row numbers.
        weight: the readout's weight ``[C, d]``, needed for NC3 and NC4.
        bias: the readout's bias ``[C]``.

    >>> H = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    >>> result = neural_collapse_from_rows(H, torch.tensor([0, 0, 1, 1]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    >>> result.nc1, result.nc3, result.nc4
    (0.0, 0.0, 1.0)
    """
    features = Rows(H, "H")
    targets = label_rows(labels, name="labels")
    m = moments(features, targets, gram=False)
    means = m.class_means()[1]

    def scatter(directions: Tensor) -> Tensor:
        total = means.new_zeros(len(directions))
        for start, stop in spans(features.n, features.width, entries=CACHED_ENTRIES):
            centred = features.block(start, stop) - means[targets.index(start, stop).to(means.device)]
            total += (directions @ centred.mT).square().sum(1)
        return total

    result = _measures(m, weight, targets.classes, scatter)
    if weight is None:
        return result
    matrix = _readout_weight(weight, targets.classes, features.width)
    constant = matrix.new_zeros(len(matrix)) if bias is None else as_float_tensor(bias, "bias of the readout", dim=1)
    if constant.shape[0] != matrix.shape[0]:
        raise InputError(f"the bias has {constant.shape[0]} entries but the readout has {matrix.shape[0]} rows")
    agree = 0
    constant = to_double(constant)
    for start, stop in spans(features.n, features.width + matrix.shape[0], entries=CACHED_ENTRIES):
        block = features.block(start, stop)
        chosen = (_scores(block, matrix) + constant).argmax(1)
        agree += int((targets.classes[nearest_class(block, m)] == chosen).sum())
    return replace(result, nc4=agree / features.n, missing={})


def nearest_class(H: Tensor, m: Moments) -> Tensor:
    """For each row of ``H [n, d]`` the class of ``m`` whose mean is nearest, among those with samples, ``[n]``.

    >>> m = moments(torch.tensor([[1.0], [1.0], [-1.0]]), label_rows(torch.tensor([0, 0, 1])))
    >>> nearest_class(torch.tensor([[-3.0], [2.0]], dtype=torch.float64), m)
    tensor([1, 0])
    """
    present, means = _occurring(m)
    return present.nonzero().flatten()[(_scores(H - m.mean_h, means) - means.square().sum(1) / 2).argmax(1)]


def neural_collapse_from_moments(m: Moments, weight: Array | None = None) -> NeuralCollapse:
    """:func:`neural_collapse_from_rows` from moments of features and one-hot labels; NC4 needs the samples and stays None.

    Args:
        m: moments; classes without samples are left out. Without ``C_hh`` NC1 stays None too.
        weight: of the readout; row c belongs to class c of ``m``.

    >>> m = moments(torch.tensor([[1.0], [1.0], [-1.0]]), label_rows(torch.tensor([0, 0, 1])))
    >>> neural_collapse_from_moments(m).missing["nc4"]
    'needs the samples and a readout'
    """
    names = torch.arange(m.mean_y.numel(), dtype=torch.int64, device=m.mean_y.device)
    if m.C_hh is None:
        result = _measures(m, weight, names, lambda directions: directions[:, 0] * math.nan)
        return replace(result, nc1=None, missing={**result.missing, "nc1": "needs HᵀH; collect it with gram=True"})
    counts, means = m.class_means()
    within = torch.addmm(m.C_hh, m.C_hy, (counts[:, None] > 0) * (means - m.mean_h), alpha=-1)
    return _measures(m, weight, names, lambda directions: ((directions @ within) * directions).sum(1))


def _measures(m: Moments, weight: Array | None, names: Tensor, scatter: Callable[[Tensor], Tensor]) -> NeuralCollapse:
    """All but NC4; ``scatter`` is ``Σ_i (v·(h_i − μ_{y_i}))²`` along directions ``[r, d]`` of length 1, ``[r]``.

    ``names`` are the label values of the classes of ``m``.
    """
    present, means = _occurring(m)
    count = len(means)
    missing = {"nc4": "needs the samples and a readout"}
    nc3 = None
    if weight is None:
        missing["nc3"] = "needs a readout"
    else:
        readout = _readout_weight(weight, names[present], means.shape[1])[names[present]]
        if not bool(readout.any()):
            warnings.warn("the readout is zero: NC3 is undefined (NaN)", ResultWarning, stacklevel=2)
        nc3 = float((readout / readout.norm() - means / means.norm()).square().sum())
    _, s, Vt = svd(means)
    scale = math.hypot(float(s[0]), math.sqrt(count) * float(m.mean_h.norm()))
    if float(s[0]) <= max(means.shape) * EPS * scale:
        warnings.warn("the class means coincide: neural collapse is undefined (NaN)", ResultWarning, stacklevel=2)
        nan = math.nan
        return NeuralCollapse(nan, nan, nan, nan, None if nc3 is None else nan, None, count, missing)
    # The centred means span at most C − 1 directions; what lies below is rounding.
    directions = (s > max(means.shape) * EPS * scale) & (
        torch.arange(s.numel(), dtype=torch.int64, device=s.device) < count - 1
    )
    s, Vt = s[directions], Vt[directions]
    within = scatter(Vt) / m.n
    nc1 = float((within / s.square()).sum())  # Σ_B⁺ = C V S⁻² Vᵀ, and C cancels
    norms = means.square().sum(1).sqrt()
    central = (norms <= max(means.shape) * EPS * scale).nonzero().flatten().tolist()
    if central:
        warnings.warn(
            f"the means of classes {[int(names[present][i]) for i in central]} coincide with the mean of all samples: the "
            "angles of NC2 are undefined (NaN)",
            ResultWarning,
            stacklevel=2,
        )
        norms[central] = 0.0
    cosines = (means @ means.mT) / torch.outer(norms, norms)
    off = cosines[~torch.eye(count, dtype=torch.bool, device=cosines.device)]
    return NeuralCollapse(
        nc1,
        float(norms.std(correction=0) / norms.mean()),
        float(off.std(correction=0)),
        float((off + 1 / (count - 1)).abs().mean()),
        nc3,
        None,
        count,
        missing,
    )


def _scores(H: Tensor, W: Tensor) -> Tensor:
    """``H Wᵀ`` of many rows ``[n, d]`` and few ``[c, d]``, which takes half the time as ``W Hᵀ``."""
    return (W @ H.mT).mT.contiguous()


def _occurring(m: Moments) -> tuple[Tensor, Tensor]:
    """Which classes have samples ``[c]``, and their means less that of all; an error unless there are two."""
    counts, means = m.class_means()
    present = counts > 0
    if int(present.sum()) < 2:
        raise InputError(f"neural collapse needs at least two classes with samples, got {int(present.sum())}")
    return present, means[present] - m.mean_h


def _readout_weight(weight: Array, labels: Tensor, d: int) -> Tensor:
    """The readout's weight in float64, checked to have a row for every label."""
    matrix = as_float_tensor(weight, "readout", dim=2)
    check_same_device(readout=matrix, labels=labels)
    if matrix.shape[1] != d:
        raise InputError(f"readout has shape {tuple(matrix.shape)} but the features have width {d}")
    if int(labels.min()) < 0 or int(labels.max()) >= matrix.shape[0]:
        raise InputError(
            f"labels run from {int(labels.min())} to {int(labels.max())} but the readout has rows 0 to "
            f"{matrix.shape[0] - 1}"
        )
    return to_double(matrix)


def nrc1(C_hh: Array, targets: int) -> Tensor:
    """``1 − Σ_{i≤c} λ_i / Σ λ_i``: share of the features' variance outside their c leading principal directions.

    Args:
        C_hh: covariance of the features ``[d, d]``, up to a factor.
        targets: c, the width of the targets.

    Returns:
        A float64 number from 0 (collapse) to 1; ``1 − c/d`` for isotropic features. NaN for constant features.

    >>> nrc1(torch.diag(torch.tensor([3.0, 1.0])), targets=1).item()
    0.25
    """
    values = eigh(to_double(as_matrices(C_hh, "C_hh")))[0].clamp(min=0.0)
    return values[..., : max(values.shape[-1] - targets, 0)].sum() / values.sum()


def nrc2(C_hh: Array, W: Array) -> Tensor:
    """``1 − tr(P C_hh) / tr(C_hh)``, P the projector on the row space of W: share of the features' variance that W ignores.

    Args:
        C_hh: covariance of the features ``[d, d]``, up to a factor.
        W: weight of the layer that reads them ``[k, d]``.

    Returns:
        A float64 number from 0 (collapse) to 1; ``1 − rank(W)/d`` for isotropic features. NaN for constant features.

    >>> nrc2(torch.eye(4), torch.eye(4)[:1]).item()
    0.75
    """
    scatter, weight = to_double(as_matrices(C_hh, "C_hh")), to_double(as_matrices(W, "W"))
    _, s, Vt = svd(weight)
    rows = Vt[s > max(weight.shape) * EPS * s[0]]
    return (1 - ((rows @ scatter) * rows).sum() / scatter.trace()).clamp(min=0.0)


def nrc3(W: Array, C_yy: Array) -> Tensor:
    """``min_γ ‖WWᵀ/‖WWᵀ‖ − A_γ/‖A_γ‖‖_F²`` with ``A_γ = Σ_Y^½ − γ^½ I``, γ from 0 to the smallest eigenvalue of ``Σ_Y``.

    Args:
        W: weight of the readout ``[c, d]``.
        C_yy: covariance of the targets ``[c, c]``, up to a factor.

    Returns:
        A float64 number from 0 (collapse) to 4.

    >>> round(nrc3(torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([16.0, 1.0]))).item(), 9)
    0.0
    """
    weight, covariance = to_double(as_matrices(W, "W")), to_double(as_matrices(C_yy, "C_yy"))
    c = covariance.shape[-1]
    if weight.shape[-2] != c:
        raise InputError(
            f"NRC3 is defined at a readout with one row for each of the {c} targets, not {weight.shape[-2]}"
        )
    if c == 1:
        raise InputError("NRC3 is 0 for any readout of one target")
    gram, root = weight @ weight.mT, psd_power(covariance, 0.5)
    smallest = eigh(root)[0][0].clamp(min=0.0)
    # ⟨WWᵀ, S − tI⟩ / ‖S − tI‖ has one stationary point t; the minimum is there or at an end.
    a, b, p, q = (gram * root).sum(), gram.trace(), root.square().sum(), root.trace()
    turning = (b * p - a * q) / (b * q - a * c)
    best = torch.full_like(a, float("inf"))
    for t in (torch.zeros_like(a), smallest, turning):
        moved = root - t * torch.eye(c, dtype=root.dtype, device=root.device)
        if 0 <= float(t) <= float(smallest) and float(moved.norm()) > c * EPS * float(root.norm()):
            best = torch.minimum(best, (gram / gram.norm() - moved / moved.norm()).square().sum())
    return best
