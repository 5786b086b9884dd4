"""Every measure of a layer that follows from collected statistics, by name: the columns of :func:`gramscope.measure`.

A measure states what must have been collected and computes one number from a :class:`Context` and a layer's statistics.
To add one, write a function and enter it in ``MEASURES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.moments import Moments
from gramscope.linalg.row_blocks import row_norm, row_product
from gramscope.measures.alignment import corrupted, double_centered_ratio, nfa
from gramscope.measures.estimate import Estimate, jackknife, ratio
from gramscope.measures.fit import coded_alike, held_out_from_moments
from gramscope.measures.further_columns import FURTHER, FURTHER_OF_FEATURES
from gramscope.measures.gram import fle_residual
from gramscope.measures.kernel_alignment import KernelAlignment, kernel_alignment
from gramscope.measures.large_spectrum import large_weight_spectrum
from gramscope.measures.linearity import (
    IterativeResult,
    explained_by_iteration,
    explained_from_moments,
    explained_from_rows,
    surrogate,
    surrogate_from_moments,
)
from gramscope.measures.neural_collapse import neural_collapse_from_moments, neural_collapse_from_rows
from gramscope.measures.probed import ProbedAlignment, ProbedShifts, probed_alignment, probed_shifts
from gramscope.measures.spectrum import feature_spectrum_from_moments, spectrum_of_few_rows, weight_spectrum
from gramscope.measures.step_shifts import StepShifts, step_shifts
from gramscope.statistics.feature_statistics import PROJECTION, FeatureStatistics, projected
from gramscope.statistics.layer import LayerStatistics
from gramscope.statistics.result import Statistics

Part = TypeVar("Part")


class Missing(Exception):
    """The measure has no answer for this layer; the message says why."""


@dataclass(frozen=True)
class Context:
    """What measures may need beside the layer's own statistics."""

    statistics: Statistics
    gamma: float = 0.05
    ridge: float = 0.0
    intercept: bool = False
    center: bool = False
    reference_weights: dict[str, Tensor] = field(default_factory=dict)
    held_out: Statistics | None = None
    corruption_seed: int = 0
    nearest_mean: Callable[[LayerStatistics], float] | None = None
    weight_decay: float | None = None
    #: the fits of all layers with neither rows nor HᵀH, by name
    iterative_fits: Callable[[], dict[str, IterativeResult]] | None = None
    #: bytes that matrices of a measure may take
    memory: int = 256 * 2**20

    #: intermediate results of the layer that is being measured
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, layer: LayerStatistics, what: str, make: Callable[[], Part]) -> Part:
        """``make()``, computed once for all measures of this layer."""
        if self.cache.get("layer") is not layer:
            self.cache.clear()
            self.cache["layer"] = layer
        if what not in self.cache:
            self.cache[what] = make()
        found: Part = self.cache[what]
        return found

    @cached_property
    def last(self) -> str:
        """The layer executed last."""
        return list(self.statistics.layers)[-1]


@dataclass(frozen=True)
class Measure:
    """A named column: what it needs (``loss``, ``features``, ``gram``, ``jacobians``, ``reference``, …) and its formula."""

    compute: Callable[[Context, LayerStatistics], Estimate]
    needs: frozenset[str]
    formula: str


# --- weights ----------------------------------------------------------------------------------------------------------


def _weight(layer: LayerStatistics) -> Tensor:
    return to_double(layer.weight)


def _ranks(what: str) -> Callable[[Context, LayerStatistics], float | Estimate]:
    def compute(context: Context, layer: LayerStatistics) -> float | Estimate:
        side = min(layer.weight.shape[-2:])
        if (
            layer.weight.dim() > 2 or 24 * side**2 <= context.memory
        ):  # the decomposition needs three matrices in float64
            found: float = getattr(weight_spectrum(layer.weight), what)
            return found
        spectrum = context.once(layer, "spectrum", lambda: large_weight_spectrum(layer.weight, min(16, side)))
        estimate: Estimate = getattr(spectrum, what)
        return estimate

    return compute


def _weight_change(context: Context, layer: LayerStatistics) -> Tensor | float:
    W0 = _reference_weight(context, layer)
    return row_norm(layer.weight, W0) / row_norm(W0)


# --- gradients and virtual covariance ---------------------------------------------------------------------------------


def _shifts(context: Context, layer: LayerStatistics) -> tuple[StepShifts | ProbedShifts, float]:
    """The products behind a step's shifts, and γ on the summed loss.

    ``gamma`` is the rate of a step on the mean loss; on the summed loss the same step has rate ``gamma / n``, n the terms of
    the mean: samples, or labelled positions.
    """

    def products() -> StepShifts | ProbedShifts:
        if layer.covariance_probes is not None:
            return probed_shifts(layer.weight, layer.gradient, layer.covariance_probes)
        at_inputs = None if layer.input_covariance is None else layer.input_covariance.double()
        Sigma = layer.covariance.double() if at_inputs is None else None
        return step_shifts(_weight(layer), layer.gradient.double(), Sigma, at_inputs)

    return context.once(layer, "shifts", products), context.gamma / layer.loss_terms


def _vcs(what: str) -> Callable[[Context, LayerStatistics], Tensor | float | Estimate]:
    def compute(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
        shifts, gamma = _shifts(context, layer)
        if isinstance(shifts, ProbedShifts):
            return shifts.value(what, gamma)
        value: Tensor = getattr(shifts, what)(gamma)
        return value

    return compute


def _fle(context: Context, layer: LayerStatistics) -> Tensor | float:
    if layer.autograd is None or layer.shared:
        raise Missing(
            "its weight is not a trainable parameter of this layer alone: it is computed, frozen or shared with another module"
        )
    W = _weight(layer)
    if W.shape[-1] > 32_768:
        raise Missing(f"it needs two matrices of {W.shape[-1]} × {W.shape[-1]}")
    return fle_residual(W, layer.autograd.double(), W.mT @ layer.gradient.double())


# --- alignment --------------------------------------------------------------------------------------------------------


#: where the null of an alignment reaches this, its value says little
TRIVIAL = 0.9


def _alignment(context: Context, layer: LayerStatistics) -> KernelAlignment:
    return context.once(layer, "alignment", lambda: kernel_alignment(_weight(layer), layer.kernel, layer.at_inputs))


def _probed_alignment(
    context: Context, layer: LayerStatistics, kind: Literal["ansatz", "centered", "double", "ptk"] = "ansatz"
) -> ProbedAlignment | None:
    """The alignment of W, W − W₀ or W₀ with K or K̄ from probes, where only those are kept."""
    products = layer.kernel_probes if kind in ("ansatz", "centered") else layer.centered_probes
    if products is None:
        return None
    sides = 1 if layer.centered_probes is None else 2
    chosen = products.chunk(sides, -1)[kind in ("centered", "ptk")] / layer.n

    def make() -> ProbedAlignment:
        W = layer.weight
        if kind != "ansatz":
            W0 = _reference_weight(context, layer)
            W = W0 if kind == "ptk" else W - W0
        return probed_alignment(W, chosen)

    return context.once(layer, f"probed {kind}", make)


def _nfa(context: Context, layer: LayerStatistics) -> Estimate:
    return _beside_null(_probed_alignment(context, layer) or _alignment(context, layer), context.center)


def _beside_null(alignment: KernelAlignment | ProbedAlignment, center: bool) -> Estimate:
    """The alignment, with a remark where random eigenvectors of the kernel would give almost as much."""
    value, null = alignment.value(center), float(alignment.null(center))
    if null < TRIVIAL:
        return value
    remark = f"trivial: random eigenvectors of K would give ρ ≥ {TRIVIAL} too"
    return value._replace(remark=f"{remark}; {value.remark}" if value.remark else remark)


def _nfa_moved(kind: Literal["centered", "double", "ptk"]) -> Callable[[Context, LayerStatistics], Estimate]:
    def compute(context: Context, layer: LayerStatistics) -> Estimate:
        W0 = _reference_weight(context, layer)
        if kind != "ptk" and torch.equal(layer.weight, W0):
            raise Missing("the weight has not moved from the reference")
        if kind != "centered" and layer.centered_probes is not None and not layer.centered_probes.any():
            raise Missing("the Jacobians have not moved from the reference")
        probed = _probed_alignment(context, layer, kind)
        if probed is not None:
            return _beside_null(probed, context.center)
        K = layer.K if kind == "centered" else layer.K_centered
        if kind != "centered" and not K.any():
            raise Missing("the Jacobians have not moved from the reference")
        side = to_double(W0) if kind == "ptk" else _weight(layer) - W0
        return _beside_null(kernel_alignment(side, K.unsqueeze(0), at_inputs=False), context.center)

    return compute


def _double_ratio(context: Context, layer: LayerStatistics) -> Tensor | float:
    W, W0 = _weight(layer), to_double(_reference_weight(context, layer))
    if torch.equal(W, W0):
        raise Missing("the weight has not moved from the reference")
    return double_centered_ratio(W, layer.K.double(), W0, layer.K_centered.double())


def _nfa_corrupted(context: Context, layer: LayerStatistics) -> Tensor | float:
    generator = torch.Generator().manual_seed(context.corruption_seed)
    Q = corrupted(layer.K.double().cpu(), generator)
    return nfa(_weight(layer).cpu(), Q, center=context.center)


def _nfa_null(context: Context, layer: LayerStatistics) -> float | Estimate:
    return (_probed_alignment(context, layer) or _alignment(context, layer)).null(context.center)


def _agop_trace(context: Context, layer: LayerStatistics) -> Estimate:
    probed = _probed_alignment(context, layer)
    if probed is not None:
        return probed.trace()
    parts = layer.kernel.double()
    if layer.at_inputs:
        traces = parts.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)
    else:
        W = _weight(layer)
        traces = ((parts @ W) * W).flatten(1).sum(1)
    return jackknife(traces.numel(), lambda kept: float(traces[kept].mean()) * traces.numel())


def _kernel_spread(context: Context, layer: LayerStatistics) -> Tensor | float:
    values = torch.linalg.eigvalsh(layer.K.double()).flatten()
    return float(values.std(correction=0) / values.mean())


def _reference_weight(context: Context, layer: LayerStatistics) -> Tensor:
    if layer.name not in context.reference_weights:
        raise Missing("no reference network was given")
    return context.reference_weights[layer.name].to(layer.weight.device)


# --- features and targets ---------------------------------------------------------------------------------------------


def _features(layer: LayerStatistics) -> FeatureStatistics:
    if layer.features is None:
        raise Missing("no feature rows could be paired with targets here")
    return layer.features


def _joint(layer: LayerStatistics, gram: bool) -> Moments:
    part = _features(layer)
    joint = part.joint
    if joint.C_hy.shape[-1] == 0:
        raise Missing("the loader gave no targets")
    if gram and joint.C_hh is None and part.rows is None:
        raise _no_gram(joint)
    return joint.with_centred_targets() if part.labelled else joint


def _no_gram(joint: Moments) -> Missing:
    d = joint.mean_h.shape[-1]
    return Missing(f"HᵀH was not collected: d = {d} is large; take fewer samples, raise memory=, or ask with gram=True")


def _projection(part: FeatureStatistics) -> str:
    """A remark on targets that are random projections of labels."""
    if not part.labels:
        return ""
    return (
        f"against {PROJECTION} random combinations of the {part.labels:,} labels, with a fixed seed; targets=lambda x, y: … "
        "gives targets of your own"
    )


def _target_linearity(context: Context, layer: LayerStatistics) -> Estimate:
    joint, part = _joint(layer, gram=False), _features(layer)
    fit = None
    if part.rows is not None and part.row_targets is not None:
        Y = projected(part.row_targets) - joint.mean_y if part.labels else part.row_targets
        found = explained_from_rows(part.rows, Y, context.ridge, context.intercept)
    elif joint.C_hh is not None:
        found = explained_from_moments(joint, context.ridge, context.intercept, part.eps)
    else:
        fit = context.iterative_fits().get(layer.name) if context.iterative_fits is not None else None
        if fit is None:
            raise _no_gram(joint)
        found = explained_by_iteration(joint, fit, context.ridge)
    if part.labels:
        estimate = ratio(found.totals - found.residuals, found.totals)._replace(remark=_projection(part))
    else:
        estimate = Estimate(float(found.total()))
    return estimate if fit is None else _stopped(estimate, fit, float(found.totals.sum()))


def _stopped(estimate: Estimate, fit: IterativeResult, total: float) -> Estimate:
    """With what more passes would add, as an error."""
    more = fit.remaining / total
    remark = (
        f"from {fit.passes} passes of conjugate gradients over the data, because neither rows nor HᵀH fit memory=: a lower "
        f"bound, to which more passes would add about {more:.1g}"
    )
    remark = f"{estimate.remark}; {remark}" if estimate.remark else remark
    return Estimate(estimate.value, math.hypot(estimate.error or 0.0, more), remark)


def _held_out(context: Context, layer: LayerStatistics) -> Tensor | float:
    if context.held_out is None:
        raise Missing("no held-out data were given; pass held_out=<loader>")
    _joint(layer, gram=True)
    if layer.name not in context.held_out.layers:
        raise Missing("the held-out data do not reach it")
    other = _features(context.held_out[layer.name])
    return held_out_from_moments(*coded_alike(_features(layer), other), context.ridge, context.intercept)


def _surrogate_linearized(context: Context, layer: LayerStatistics) -> Estimate:
    W, cross = layer.weight, _joint(layer, gram=False).HtY
    if _features(layer).of_outputs:  # they are W h already
        return _sum_over_targets(cross, _features(layer))
    if W.dim() == 3:
        cross = cross.reshape(W.shape[0], W.shape[-1], -1)
    return _sum_over_targets(row_product(W, cross), _features(layer))


def _surrogate(context: Context, layer: LayerStatistics) -> Estimate:
    return _sum_over_targets(_joint(layer, gram=False).HtY, _features(layer))


def _sum_over_targets(cross: Tensor, part: FeatureStatistics) -> Estimate:
    """``‖cross‖_F²``, with the standard error where its columns are random projections of labels."""
    squares = cross.square().sum(-2)
    squares = squares.reshape(-1, squares.shape[-1]).sum(0)
    total = float(squares.sum())
    if not part.labels:
        return Estimate(total)
    return Estimate(total, float(squares.std() * squares.numel() ** 0.5), _projection(part))


def _surrogate_normalized(context: Context, layer: LayerStatistics) -> Tensor | float:
    joint, part = _joint(layer, gram=True), _features(layer)
    if part.labels:
        raise Missing("it needs all labels, and they are too many; targets= gives targets of your own")
    if part.rows is not None and part.row_targets is not None:
        return surrogate(part.rows, part.row_targets, normalized=True, center=True)
    return surrogate_from_moments(joint, normalized=True, center=True)


def _feature_rank(context: Context, layer: LayerStatistics) -> Tensor | float:
    joint, rows = _features(layer).joint, _features(layer).rows
    if rows is not None and joint.n > 1:
        return spectrum_of_few_rows(rows).effective_rank
    if joint.C_hh is None:
        raise _no_gram(joint)
    if joint.n < 2:
        raise Missing("one row of features is zero once centred")
    return feature_spectrum_from_moments(joint).effective_rank


def _collapse(what: str) -> Callable[[Context, LayerStatistics], Tensor | float | Estimate]:
    def compute(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
        part = _features(layer)
        classes = part.classes
        if part.labels:
            return _frequent_collapse(what, part)
        if classes is None:
            raise Missing("neural collapse needs class labels")
        if classes.within is None and part.rows is None:
            raise Missing("the scatter within classes was not collected; ask with gram=True")
        if classes.n > 2 and int((classes.counts > 0).sum()) == classes.n:
            raise Missing(
                f"each of the {classes.n} rows has a class of its own; numbers to regress on are floating-point"
            )
        readout = layer.weight if what == "nc3" else None
        if what in ("nc3", "nc4") and (layer.name != context.last or layer.weight.shape[-2] < classes.counts.shape[0]):
            raise Missing("it is defined only at the readout, the layer executed last")
        if what == "nc4":
            if context.nearest_mean is None:
                raise Missing("NC4 needs the samples a second time")
            return context.nearest_mean(layer)
        if part.rows is not None and part.row_targets is not None:
            found = neural_collapse_from_rows(part.rows, part.row_targets, readout, normalized_surrogate=False)
        else:
            found = neural_collapse_from_moments(classes, readout, normalized_surrogate=False)
        return float(getattr(found, what))

    return compute


def _frequent_collapse(what: str, part: FeatureStatistics) -> Estimate:
    """Neural collapse of the rows of the most frequent labels, where labels are too many for a mean each."""
    if what in ("nc3", "nc4"):
        raise Missing(f"it compares a readout with the means of all {part.labels:,} labels, which are too many")
    if part.frequent is None or part.frequent_labels is None:
        raise Missing("no rows of frequent labels were kept: the first batch had few labels")
    labels, counts = torch.unique(part.frequent_labels, return_counts=True)
    labels = labels[counts > 1]  # a single row has no scatter
    if labels.numel() < 2:
        raise Missing("fewer than two labels occur twice; take more data")
    kept = torch.isin(part.frequent_labels, labels)
    rows = part.frequent[kept.to(part.frequent.device)]
    found = neural_collapse_from_rows(rows, part.frequent_labels[kept], normalized_surrogate=False)
    remark = f"of the {labels.numel()} most frequent of {part.labels:,} labels, {int(kept.sum()):,} rows of them"
    return Estimate(float(getattr(found, what)), remark=f"{remark}; targets= gives labels of your own")


# --- dynamics of the surrogate ([Gram] Theorem 3) ------------------------------------------------------------------------


def _surrogate_change(context: Context, layer: LayerStatistics) -> Tensor | float:
    part = _features(layer)
    if part.HtE is None or part.of_outputs:
        raise Missing("the change of the surrogate is defined where a sample has one site")
    cross, gamma = _joint(layer, gram=False).HtY, context.gamma / layer.loss_terms
    moved = layer.gradient.double() @ cross
    return -2 * gamma * ((_weight(layer) @ cross) * moved).sum() + gamma**2 * moved.square().sum()


def _surrogate_change_predicted(context: Context, layer: LayerStatistics) -> Tensor | float:
    part, output = _features(layer), context.statistics.network.output
    if part.HtE is None or part.of_outputs or output is None:
        raise Missing("the prediction is defined where a sample has one site and the network one output row")
    cross = _joint(layer, gram=False).HtY
    final = output.joint.with_centred_targets() if output.labelled else output.joint
    predicted = final.HtY.mT * (cross.mT @ part.HtE)  # (Yᵀf) ∘ (Yᵀ H HᵀE)
    return 2 * context.gamma / layer.loss_terms * predicted.sum()


def _measure(
    compute: Callable[[Context, LayerStatistics], Tensor | float | Estimate], needs: str, formula: str
) -> Measure:
    def estimate(context: Context, layer: LayerStatistics) -> Estimate:
        value = compute(context, layer)
        return value if isinstance(value, Estimate) else Estimate(float(value))

    return Measure(estimate, frozenset(needs.split()), formula)


MEASURES: dict[str, Measure] = {
    "weight_norm": _measure(lambda _, layer: row_norm(layer.weight), "", "‖W‖_F"),
    "effective_rank": _measure(_ranks("effective_rank"), "", "exp(−Σ p log p), p = s/Σs over the singular values of W"),
    "stable_rank": _measure(_ranks("stable_rank"), "", "‖W‖_F² / ‖W‖₂²"),
    "gradient_norm": _measure(lambda _, layer: row_norm(layer.gradient) / layer.loss_terms, "loss", "‖D‖_F / n"),
    "fle_residual": _measure(_fle, "loss autograd", "‖Wᵀ∇_W L − Σ g hᵀ‖ / ‖Σ g hᵀ‖ with the parameter's own gradient"),
    "vcs_cosine": _measure(_vcs("cosine"), "loss covariance", "ρ(v, Gram shift of a GD step)"),
    "vcs_residual": _measure(_vcs("residual"), "loss covariance", "‖γ²(DᵀD − WᵀΣW)‖ / ‖Gram shift‖"),
    "vcs_gram_cosine": _measure(_vcs("gram_cosine"), "loss covariance", "ρ(v, WᵀW)"),
    "vcs_null": _measure(_vcs("null"), "loss covariance", "tr v tr s / (d ‖v‖ ‖s‖): vcs_cosine of unrelated eigenvectors"),
    "nfa": _measure(_nfa, "jacobians", "ρ(WᵀW, WᵀKW)"),
    "nfa_null": _measure(
        _nfa_null, "jacobians", "nfa when K keeps its eigenvalues and has random eigenvectors, in expectation",
    ),
    "nfa_corrupted": _measure(_nfa_corrupted, "jacobians", "ρ(WᵀW, WᵀQW), Q with K's spectrum and random eigenvectors"),
    "agop_trace": _measure(_agop_trace, "jacobians", "tr(WᵀKW)"),
    "kernel_spread": _measure(_kernel_spread, "jacobians", "standard deviation of K's eigenvalues over their mean"),
    "weight_change": _measure(_weight_change, "reference", "‖W − W₀‖ / ‖W₀‖"),
    "nfa_centered": _measure(_nfa_moved("centered"), "jacobians reference", "ρ(W̄ᵀW̄, W̄ᵀKW̄), W̄ = W − W₀"),
    "nfa_double": _measure(_nfa_moved("double"), "jacobians reference_jacobians reference", "ρ(W̄ᵀW̄, W̄ᵀK̄W̄)"),
    "nfa_ptk": _measure(_nfa_moved("ptk"), "jacobians reference_jacobians reference", "ρ(W₀ᵀW₀, W₀ᵀK̄W₀)"),
    "double_ratio": _measure(_double_ratio, "jacobians reference_jacobians reference", "tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)"),
    "target_linearity": _measure(_target_linearity, "features targets gram", "1 − ‖Y − Hβ‖² / ‖Y − ȳ‖²"),
    "target_linearity_held_out": _measure(_held_out, "features targets gram held_out", "the same on data not fitted"),
    "surrogate": _measure(_surrogate, "features targets", "‖HᵀY‖_F²"),
    "surrogate_linearized": _measure(_surrogate_linearized, "features targets", "‖W HᵀY‖_F²"),
    "surrogate_normalized": _measure(
        _surrogate_normalized, "features targets gram", "⟨G, YYᵀ⟩ / (‖G‖ ‖YYᵀ‖), centred features"
    ),
    "feature_rank": _measure(_feature_rank, "features gram", "effective rank of the centred features"),
    "nc1": _measure(_collapse("nc1"), "features labels gram", "tr(Σ_W Σ_B⁺) / C"),
    "nc2_equinorm": _measure(_collapse("nc2_equinorm"), "features labels gram", "std ‖μ_c − μ‖ / mean"),
    "nc2_equiangular": _measure(_collapse("nc2_equiangular"), "features labels gram", "std of cosines between class means"),
    "nc3": _measure(_collapse("nc3"), "features labels gram", "‖W/‖W‖ − M/‖M‖‖² of readout and class means"),
    "nc4": _measure(_collapse("nc4"), "features labels gram", "share of samples where readout and nearest class mean agree"),
    "surrogate_change": _measure(_surrogate_change, "loss features targets residuals", "S⁺ − S of a GD step, exact"),
    "surrogate_change_predicted": _measure(
        _surrogate_change_predicted, "loss features targets residuals", "2γ ⟨Yᵀf, YᵀH HᵀE⟩ ([Gram] Theorem 3)"
    ),
    **{name: _measure(*entry) for name, entry in FURTHER.items()},
}  # fmt: skip

#: measures that can do with WᵀΣW and WᵀKW in place of Σ and K
AT_INPUTS = frozenset({
    "vcs_cosine", "vcs_residual", "vcs_gram_cosine", "vcs_null", "nfa", "nfa_null", "agop_trace",
})  # fmt: skip

#: measures of features alone, which the output of any module has
OF_FEATURES = frozenset({
    "target_linearity", "surrogate", "surrogate_normalized", "feature_rank", "nc1", "nc2_equinorm", "nc2_equiangular",
    *FURTHER_OF_FEATURES,
})  # fmt: skip

#: cheap, and defined for any supervised network; used when no measures are named
DEFAULT = (
    "weight_norm", "effective_rank", "gradient_norm", "vcs_cosine", "vcs_null", "vcs_residual", "nfa", "nfa_null",
    "weight_change", "nfa_centered", "nfa_double", "nfa_ptk", "target_linearity", "target_linearity_held_out", "surrogate",
    "surrogate_linearized", "feature_rank", "nc1",
)  # fmt: skip
