"""Columns of features and targets: target linearity, surrogates and their change in a step, neural collapse.

:mod:`gramscope.measures.columns` adds ``FEATURE_COLUMNS`` to its table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import row_product
from gramscope.linalg.measured import Measured, ratio
from gramscope.linalg.moments import Moments
from gramscope.linalg.ridge import RidgeFit, fit_moments
from gramscope.measures.collapse import neural_collapse_from_moments, neural_collapse_from_rows
from gramscope.measures.column import Column, LayerView, Missing, Value, features_of
from gramscope.measures.linearity import checked, fit_linear, held_out_from_moments, surrogate, surrogate_from_moments
from gramscope.measures.spectrum import feature_spectrum_from_moments, spectrum_of_few_rows
from gramscope.statistics.features import PROJECTION, Features, projected
from gramscope.statistics.result import LayerStatistics


def _joint(layer: LayerStatistics, gram: bool) -> Moments:
    part = features_of(layer)
    joint = part.joint
    if joint.C_hy.shape[-1] == 0:
        raise part.no_targets
    if gram and joint.C_hh is None and part.rows is None:
        raise _no_gram(joint)
    return joint.with_centred_targets() if part.centred else joint


def _no_gram(joint: Moments) -> Missing:
    d = joint.mean_h.shape[-1]
    return Missing(f"HᵀH was not collected: d = {d} is large; take fewer samples, raise memory=, or ask with gram=True")


def _projection(part: Features) -> str:
    """A remark on targets that are random projections of labels."""
    if not part.labels:
        return ""
    return (
        f"against {PROJECTION} random combinations of the {part.labels:,} labels, with a fixed seed; targets=lambda x, y: … "
        "gives targets of your own"
    )


def _fit(view: LayerView) -> RidgeFit:
    """The fit of the targets on the layer's inputs."""
    return view.once("fit", lambda: _fit_targets(view.layer, view.context.ridge, view.context.intercept))


def _fit_targets(layer: LayerStatistics, ridge: float, intercept: bool) -> RidgeFit:
    joint, part = _joint(layer, gram=True), features_of(layer)
    if part.rows is None or part.row_targets is None:
        return fit_moments(joint, ridge, intercept, part.eps)
    Y = projected(part.row_targets) if part.labels else part.row_targets
    if part.labels or (part.centred and not part.labelled):
        Y = Y - part.joint.mean_y
    return fit_linear(part.rows, Y, ridge, intercept)


def _target_linearity(view: LayerView) -> Measured:
    found, part = checked(_fit(view)), features_of(view.layer)
    if part.labels:
        return ratio(found.totals - found.residuals, found.totals).with_remark(_projection(part))
    value = Measured(float(found.explained()))
    if value < 0 and not part.centred:
        return value.with_remark("negative: worse than the targets' mean; intercept=True fits a constant too")
    return value


def _target_linearity_null(view: LayerView) -> float:
    fit = _fit(view)
    return fit.hat_trace / fit.n


def _held_out(view: LayerView) -> float:
    if view.context.held_out is None:
        raise Missing("no held-out data were given; pass held_out=<loader>")
    if view.layer.name not in view.context.held_out.layers:
        raise Missing("the held-out data do not reach it")
    held_out = view.context.held_out[view.layer.name]
    for layer in (view.layer, held_out):
        _joint(layer, gram=True)
    train, test = coded_alike(features_of(view.layer), features_of(held_out))
    return held_out_from_moments(train, test, view.context.ridge, view.context.intercept)


def coded_alike(train: Features, test: Features) -> tuple[Moments, Moments]:
    """Moments of both samples with the same target columns: labels less the frequencies of the training data."""
    if train.labelled != test.labelled:
        raise InputError("one of the data sets has labels, the other real targets")
    train, test = train.without_rows().coded_alike(test.without_rows())
    left, right = train.moments, test.moments
    if not train.centred:
        return left, right
    shift = left.mean_y
    left, right = (replace(m, mean_y=m.mean_y - shift) for m in (left, right))
    if train.labels or not train.labelled:
        return left, right
    unknown = ((shift == 0) & (right.mean_y > 0)).nonzero().flatten().tolist()
    if unknown:
        raise InputError(f"the held-out data have classes {unknown} that the training data lack")
    return left.with_targets(shift > 0), right.with_targets(shift > 0)


def _surrogate_linearized(view: LayerView) -> Measured:
    W, cross = view.layer.weight, _joint(view.layer, gram=False).HtY
    if features_of(view.layer).of_outputs:  # they are W h already
        return _sum_over_targets(cross, features_of(view.layer))
    if W.dim() == 3:
        cross = cross.reshape(W.shape[0], W.shape[-1], -1)
    return _sum_over_targets(row_product(W, cross), features_of(view.layer))


def _surrogate(view: LayerView) -> Measured:
    return _sum_over_targets(_joint(view.layer, gram=False).HtY, features_of(view.layer))


def _sum_over_targets(cross: Tensor, part: Features) -> Measured:
    """``‖cross‖_F²``, with the standard error where its columns are random projections of labels."""
    squares = cross.square().sum(-2)
    squares = squares.reshape(-1, squares.shape[-1]).sum(0)
    total = float(squares.sum())
    if not part.labels:
        return Measured(total)
    return Measured(total, float(squares.std() * squares.numel() ** 0.5), _projection(part))


def _surrogate_normalized(view: LayerView) -> Tensor | float:
    joint, part = _joint(view.layer, gram=True), features_of(view.layer)
    if part.labels:
        raise Missing("it needs all labels, and they are too many; targets= gives targets of your own")
    if part.rows is not None and part.row_targets is not None:
        return surrogate(part.rows, part.row_targets, normalized=True, center=True)
    return surrogate_from_moments(joint, normalized=True, center=True)


def _feature_rank(view: LayerView) -> Tensor | float:
    joint, rows = features_of(view.layer).joint, features_of(view.layer).rows
    if rows is not None and joint.n > 1:
        return spectrum_of_few_rows(rows).effective_rank
    if joint.C_hh is None:
        raise _no_gram(joint)
    if joint.n < 2:
        raise Missing("one row of features is zero once centred")
    return feature_spectrum_from_moments(joint).effective_rank


def _collapse(what: str) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Value:
        part = features_of(view.layer)
        classes = part.classes
        if part.labels:
            raise Missing(f"{part.labels:,} labels are too many for a mean each; targets= gives labels of your own")
        if classes is None:
            raise part.no_targets if part.unpaired else Missing("neural collapse needs class labels")
        if classes.n > 2 and int((classes.mean_y > 0).sum()) == classes.n:
            raise Missing(
                f"each of the {classes.n} rows has a class of its own; numbers to regress on are floating-point"
            )
        readout = view.layer.weight if what == "nc3" else None
        if what in ("nc3", "nc4") and (not view.is_readout or view.layer.weight.shape[-2] < len(classes.mean_y)):
            raise Missing("it is defined only at the readout, the layer executed last")
        if what == "nc4":
            if view.context.nearest_mean is None:
                raise Missing("NC4 needs the samples a second time")
            return view.context.nearest_mean(view.layer)
        if part.rows is not None and part.row_targets is not None:
            found = neural_collapse_from_rows(part.rows, part.row_targets, readout)
        else:
            found = neural_collapse_from_moments(classes, readout)
        if what in found.missing:
            raise _no_gram(part.joint)
        return float(getattr(found, what))

    return compute


# --- dynamics of the surrogate ([Gram] Theorem 3) ------------------------------------------------------------------------


def _surrogate_change(view: LayerView) -> Tensor | float:
    part = features_of(view.layer)
    if part.HtE is None or part.of_outputs:
        raise Missing("the change of the surrogate is defined where a sample has one site")
    cross, gamma = _joint(view.layer, gram=False).HtY, view.context.gamma / view.layer.loss_terms
    moved = row_product(view.layer.gradient, cross)
    return -2 * gamma * (row_product(view.layer.weight, cross) * moved).sum() + gamma**2 * moved.square().sum()


def _surrogate_change_predicted(view: LayerView) -> Tensor | float:
    part, output = features_of(view.layer), view.context.statistics.output
    if part.HtE is None or part.of_outputs or output is None:
        raise Missing("the prediction is defined where a sample has one site and the network one output row")
    cross = _joint(view.layer, gram=False).HtY
    final = output.joint.with_centred_targets() if output.centred else output.joint
    predicted = final.HtY.mT.to(cross.device) * (cross.mT @ part.HtE)  # (Yᵀf) ∘ (Yᵀ H HᵀE)
    return 2 * view.context.gamma / view.layer.loss_terms * predicted.sum()


FEATURE_COLUMNS = [
    Column(
        "target_linearity", "linearity",
        "how well a linear map of the layer's inputs gives the targets",
        "1 − ‖Y − Hβ‖² / ‖Y − ȳ‖²",
        _target_linearity, {"features", "targets", "gram"}, null="target_linearity_null", of_features=True,
    ),
    Column(
        "target_linearity_null", "linearity",
        "what a linear map of the inputs gives of targets that are noise",
        "tr(H(HᵀH + λI)⁻¹Hᵀ) / n, the intercept counted",
        _target_linearity_null, {"features", "targets", "gram"}, of_features=True,
    ),
    Column(
        "target_linearity_held_out", "linearity",
        "how well that linear map gives the targets of further data",
        "the same on data not fitted",
        _held_out, {"features", "targets", "gram", "held_out"},
    ),
    Column(
        "surrogate", "linearity",
        "how strongly the layer's inputs point along the targets",
        "‖HᵀY‖_F²",
        _surrogate, {"features", "targets"}, of_features=True,
    ),
    Column(
        "surrogate_linearized", "linearity",
        "how strongly the outputs, before the activation, do",
        "‖W HᵀY‖_F²",
        _surrogate_linearized, {"features", "targets"},
    ),
    Column(
        "surrogate_normalized", "linearity",
        "cosine of the Gram matrices of centred inputs and targets",
        "⟨G, YYᵀ⟩ / (‖G‖ ‖YYᵀ‖), centred features",
        _surrogate_normalized, {"features", "targets", "gram"}, of_features=True,
    ),
    Column(
        "feature_rank", "spectra",
        "how many directions the centred inputs use",
        "effective rank of the centred features",
        _feature_rank, {"features", "gram"}, of_features=True,
    ),
    Column(
        "nc1", "collapse",
        "scatter of the inputs within classes against that between class means",
        "tr(Σ_W Σ_B⁺) / C",
        _collapse("nc1"), {"features", "labels", "gram"}, of_features=True,
    ),
    Column(
        "nc2_equinorm", "collapse",
        "how unequal the lengths of the centred class means are",
        "std ‖μ_c − μ‖ / mean",
        _collapse("nc2_equinorm"), {"features", "labels", "gram"}, of_features=True,
    ),
    Column(
        "nc2_equiangular", "collapse",
        "how unequal the angles between the centred class means are",
        "std of cosines between class means",
        _collapse("nc2_equiangular"), {"features", "labels", "gram"}, of_features=True,
    ),
    Column(
        "nc3", "collapse",
        "distance of the readout's rows from the class means, both normalised",
        "‖W/‖W‖ − M/‖M‖‖² of readout and class means",
        _collapse("nc3"), {"features", "labels", "gram"},
    ),
    Column(
        "nc4", "collapse",
        "how often the readout and the nearest class mean choose the same class",
        "share of samples where readout and nearest class mean agree",
        _collapse("nc4"), {"features", "labels", "gram"},
    ),
    Column(
        "surrogate_change", "linearity",
        "by how much a gradient step on this layer changes it",
        "S⁺ − S of a GD step, exact",
        _surrogate_change, {"loss", "features", "targets", "residuals"},
    ),
    Column(
        "surrogate_change_predicted", "linearity",
        "the same change as the homogeneity of the net predicts it",
        "2γ ⟨Yᵀf, YᵀH HᵀE⟩ ([Gram] Theorem 3)",
        _surrogate_change_predicted, {"loss", "features", "targets", "residuals"},
    ),
]  # fmt: skip
