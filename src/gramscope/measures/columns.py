"""Every measure of a layer that follows from collected statistics, by name: the columns of :func:`gramscope.measure`.

A measure states what must have been collected and computes one number from a :class:`Context` and a layer's statistics.
To add one, write a function and enter it in ``MEASURES``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.row_blocks import row_norm
from gramscope.linalg.stochastic import is_large
from gramscope.measures.alignment import corrupted, double_centered_ratio, nfa
from gramscope.measures.column import NO_KERNEL, Column, Context, Measure, Missing
from gramscope.measures.estimate import Estimate, jackknife
from gramscope.measures.feature_columns import FEATURES_AND_TARGETS
from gramscope.measures.further_columns import FURTHER, FURTHER_OF_FEATURES
from gramscope.measures.gram import fle_residual
from gramscope.measures.kernel_alignment import KernelAlignment, kernel_alignment
from gramscope.measures.probed import ProbedAlignment, ProbedShifts, probed_alignment, probed_shifts
from gramscope.measures.probed_products import probed_fle_residual
from gramscope.measures.spectrum import weight_spectrum
from gramscope.measures.step_shifts import StepShifts, step_shifts
from gramscope.statistics.layer import LayerStatistics

# --- weights ----------------------------------------------------------------------------------------------------------


def _weight(layer: LayerStatistics) -> Tensor:
    return to_double(layer.weight)


def _ranks(what: str) -> Column:
    def compute(context: Context, layer: LayerStatistics) -> float | Estimate:
        spectrum = context.large_spectrum(layer, "W", lambda: layer.weight)
        found: float | Estimate = getattr(weight_spectrum(layer.weight) if spectrum is None else spectrum, what)
        return found

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


def _vcs(what: str) -> Column:
    def compute(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
        shifts, gamma = _shifts(context, layer)
        if isinstance(shifts, ProbedShifts):
            return shifts.value(what, gamma)
        value: Tensor = getattr(shifts, what)(gamma)
        return value

    return compute


def _fle(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
    if layer.autograd is None or layer.shared:
        raise Missing(
            "its weight is not a trainable parameter of this layer alone: it is computed, frozen or shared with another module"
        )
    if is_large(layer.weight.shape, context.memory):
        return probed_fle_residual(layer.weight, layer.autograd, layer.gradient, context.memory)
    W = _weight(layer)
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
    remarks = [value.remark] if value.remark else []
    if value.value > 1 and value.error:
        remarks.insert(0, "above 1 by chance: it estimates a number that is at most 1")
    if null >= TRIVIAL:
        remarks.insert(0, f"trivial: random eigenvectors of K would give ρ ≥ {TRIVIAL} too")
    return value._replace(remark="; ".join(remarks))


def _nfa_moved(kind: Literal["centered", "double", "ptk"]) -> Column:
    def compute(context: Context, layer: LayerStatistics) -> Estimate:
        W0 = _reference_weight(context, layer)
        if kind != "ptk" and torch.equal(layer.weight, W0):
            raise Missing("the weight has not moved from the reference")
        if kind != "centered" and layer.centered_probes is not None and not layer.centered_probes.any():
            raise Missing("the Jacobians have not moved from the reference")
        probed = _probed_alignment(context, layer, kind)
        if probed is not None:
            return _beside_null(probed, context.center)
        kernel = layer.kernel if kind == "centered" else layer.kernel_centered
        if kind != "centered" and not kernel.any():
            raise Missing("the Jacobians have not moved from the reference")
        side = to_double(W0) if kind == "ptk" else _weight(layer) - W0
        return _beside_null(kernel_alignment(side, kernel, at_inputs=False), context.center)

    return compute


def _double_ratio(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
    W0 = _reference_weight(context, layer)
    if torch.equal(layer.weight, W0):
        raise Missing("the weight has not moved from the reference")
    moved, whole = (_probed_alignment(context, layer, kind) for kind in ("double", "centered"))
    if moved is not None and whole is not None:
        return moved.inner_over(whole)
    return double_centered_ratio(_weight(layer), layer.K.double(), to_double(W0), layer.K_centered.double())


def _nfa_corrupted(context: Context, layer: LayerStatistics) -> Estimate:
    if layer.kernel_probes is not None:
        raise Missing(f"{NO_KERNEL}; nfa_null has its expectation")
    generator = torch.Generator().manual_seed(context.corruption_seed)
    Q = corrupted(layer.K.double().cpu(), generator)
    return _of_spectrum(layer, nfa(_weight(layer).cpu(), Q, center=context.center))


def _of_spectrum(layer: LayerStatistics, value: Tensor | float) -> Estimate:
    """A function of K's eigenvalues, with a remark where K is a sketch."""
    sketched = layer.kernel_parts is not None and layer.kernel_parts.shape[0] > 1
    remark = "from a sketch of K, whose eigenvalues are spread wider than those of K; jacobians=True takes every output"
    return Estimate(float(value), remark=remark if sketched else "")


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


def _kernel_spread(context: Context, layer: LayerStatistics) -> Estimate:
    probed = _probed_alignment(context, layer)
    if probed is not None and layer.weight.shape[-2] > layer.weight.shape[-1]:
        raise Missing(f"{NO_KERNEL}; probes of more outputs than inputs tell of the part of K in the column space of W")
    if probed is not None:
        return probed.spread()
    values = torch.linalg.eigvalsh(layer.K.double()).flatten()
    return _of_spectrum(layer, values.std(correction=0) / values.mean())


def _reference_weight(context: Context, layer: LayerStatistics) -> Tensor:
    if layer.name not in context.reference_weights:
        raise Missing("no reference network was given")
    return context.reference_weights[layer.name].to(layer.weight.device)


def _measure(compute: Column, needs: str, formula: str) -> Measure:
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
    **{name: _measure(*entry) for name, entry in FEATURES_AND_TARGETS.items()},
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
