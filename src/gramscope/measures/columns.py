"""Every measure of a layer that follows from collected statistics, by name: the columns of :func:`gramscope.measure`.

A column says what must have been collected and computes one number from a :class:`~gramscope.measures.column.LayerView`.
To add one, write its function and add a :class:`~gramscope.measures.column.Column` to a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gramscope.linalg.arrays import to_double
from gramscope.linalg.measured import Measured, jackknife
from gramscope.linalg.row_blocks import row_norm
from gramscope.linalg.stochastic import is_large
from gramscope.measures.alignment import corrupted, double_centered_ratio, nfa
from gramscope.measures.column import NO_KERNEL, Column, LayerView, Missing, Value
from gramscope.measures.feature_columns import FEATURE_COLUMNS
from gramscope.measures.further_columns import LATER_COLUMNS
from gramscope.measures.gram import fle_residual
from gramscope.measures.kernel_alignment import KernelAlignment, kernel_alignment
from gramscope.measures.probed import ProbedAlignment, ProbedShifts, probed_alignment, probed_shifts
from gramscope.measures.probed_products import probed_fle_residual
from gramscope.measures.spectrum import weight_spectrum
from gramscope.measures.step_shifts import StepShifts, step_shifts
from gramscope.statistics.result import LayerStatistics

# --- weights ----------------------------------------------------------------------------------------------------------


def _ranks(what: str) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Value:
        spectrum = view.large_spectrum("W", lambda: view.layer.weight)
        found: float | Measured = getattr(weight_spectrum(view.layer.weight) if spectrum is None else spectrum, what)
        return found

    return compute


def _weight_change(view: LayerView) -> Tensor | float:
    W0 = view.reference_weight
    return row_norm(view.layer.weight, W0) / row_norm(W0)


# --- gradients and virtual covariance ---------------------------------------------------------------------------------


def _shifts(view: LayerView) -> tuple[StepShifts | ProbedShifts, float]:
    """The products behind a step's shifts, and γ on the summed loss.

    ``gamma`` is the rate of a step on the mean loss; on the summed loss the same step has rate ``gamma / n``, n the terms of
    the mean: samples, or labelled positions.
    """

    def products() -> StepShifts | ProbedShifts:
        if view.layer.covariance_probes is not None:
            return probed_shifts(view.layer.weight, view.layer.gradient, view.layer.covariance_probes)
        at_inputs = None if view.layer.input_covariance is None else view.layer.input_covariance.double()
        Sigma = view.layer.covariance.double() if at_inputs is None else None
        return step_shifts(view.weight, view.layer.gradient.double(), Sigma, at_inputs)

    return view.once("shifts", products), view.context.gamma / view.layer.loss_terms


def _vcs(what: str) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Value:
        shifts, gamma = _shifts(view)
        if isinstance(shifts, ProbedShifts):
            return shifts.value(what, gamma)
        value: Tensor = getattr(shifts, what)(gamma)
        return value

    return compute


def _fle(view: LayerView) -> Value:
    if view.layer.autograd is None or view.layer.tied:
        raise Missing(
            "its weight is not a trainable parameter of this layer alone: it is computed, frozen or shared with another module"
        )
    if is_large(view.layer.weight.shape, view.context.memory):
        return probed_fle_residual(view.layer.weight, view.layer.autograd, view.layer.gradient, view.context.memory)
    W = view.weight
    return fle_residual(W, view.layer.autograd.double(), W.mT @ view.layer.gradient.double())


# --- alignment --------------------------------------------------------------------------------------------------------


#: where the null of an alignment reaches this, its value says little
TRIVIAL = 0.9


def _alignment(view: LayerView) -> KernelAlignment:
    return view.once("alignment", lambda: kernel_alignment(view.weight, view.layer.kernel, view.layer.at_inputs))


def _probed_alignment(
    view: LayerView, kind: Literal["ansatz", "centered", "double", "ptk"] = "ansatz"
) -> ProbedAlignment | None:
    """The alignment of W, W − W₀ or W₀ with K or K̄ from probes, where only those are kept."""
    products = view.layer.kernel_probes if kind in ("ansatz", "centered") else view.layer.centered_probes
    if products is None:
        return None
    sides = 1 if view.layer.centered_probes is None else 2
    chosen = products.chunk(sides, -1)[kind in ("centered", "ptk")] / view.layer.n

    def make() -> ProbedAlignment:
        W = view.layer.weight
        if kind != "ansatz":
            W0 = view.reference_weight
            W = W0 if kind == "ptk" else W - W0
        return probed_alignment(W, chosen)

    return view.once(f"probed {kind}", make)


def _nfa(view: LayerView) -> Measured:
    return _beside_null(_probed_alignment(view) or _alignment(view), view.context.center)


def _beside_null(alignment: KernelAlignment | ProbedAlignment, center: bool) -> Measured:
    """The alignment, with a remark where random eigenvectors of the kernel would give almost as much."""
    value, null = alignment.value(center), float(alignment.null(center))
    remarks = [value.remark] if value.remark else []
    if value.value > 1 and value.error:
        remarks.insert(0, "above 1 by chance: it estimates a number that is at most 1")
    if null >= TRIVIAL:
        remarks.insert(0, f"trivial: random eigenvectors of K would give ρ ≥ {TRIVIAL} too")
    return value.with_remark("; ".join(remarks))


def _nfa_moved(kind: Literal["centered", "double", "ptk"]) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Value:
        W0 = view.reference_weight
        if kind != "ptk" and torch.equal(view.layer.weight, W0):
            raise Missing("the weight has not moved from the reference")
        if kind != "centered" and view.layer.centered_probes is not None and not view.layer.centered_probes.any():
            raise Missing("the Jacobians have not moved from the reference")
        probed = _probed_alignment(view, kind)
        if probed is not None:
            return _beside_null(probed, view.context.center)
        kernel = view.layer.kernel if kind == "centered" else view.layer.kernel_centered
        if kind != "centered" and not kernel.any():
            raise Missing("the Jacobians have not moved from the reference")
        side = to_double(W0) if kind == "ptk" else view.weight - W0
        return _beside_null(kernel_alignment(side, kernel, at_inputs=False), view.context.center)

    return compute


def _double_ratio(view: LayerView) -> Value:
    W0 = view.reference_weight
    if torch.equal(view.layer.weight, W0):
        raise Missing("the weight has not moved from the reference")
    moved, whole = (_probed_alignment(view, kind) for kind in ("double", "centered"))
    if moved is not None and whole is not None:
        return moved.inner_over(whole)
    return double_centered_ratio(view.weight, view.layer.K.double(), to_double(W0), view.layer.K_centered.double())


def _nfa_corrupted(view: LayerView) -> Measured:
    if view.layer.kernel_probes is not None:
        raise Missing(f"{NO_KERNEL}; nfa_null has its expectation")
    generator = torch.Generator().manual_seed(view.context.corruption_seed)
    Q = corrupted(view.layer.K.double().cpu(), generator)
    return _of_spectrum(view.layer, nfa(view.weight.cpu(), Q, center=view.context.center))


def _of_spectrum(layer: LayerStatistics, value: Tensor | float) -> Measured:
    """A function of K's eigenvalues, with a remark where K is a sketch."""
    sketched = layer.kernel_parts is not None and layer.kernel_parts.shape[0] > 1
    remark = "from a sketch of K, whose eigenvalues are spread wider than those of K; jacobians=True takes every output"
    return Measured(float(value), remark=remark if sketched else "")


def _nfa_null(view: LayerView) -> float | Measured:
    return (_probed_alignment(view) or _alignment(view)).null(view.context.center)


def _agop_trace(view: LayerView) -> Measured:
    probed = _probed_alignment(view)
    if probed is not None:
        return probed.trace()
    parts = view.layer.kernel.double()
    if view.layer.at_inputs:
        traces = parts.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)
    else:
        W = view.weight
        traces = ((parts @ W) * W).flatten(1).sum(1)
    return jackknife("parts", traces.numel(), lambda kept: float(traces[kept].mean()) * traces.numel())


def _kernel_spread(view: LayerView) -> Measured:
    probed = _probed_alignment(view)
    if probed is not None and view.layer.weight.shape[-2] > view.layer.weight.shape[-1]:
        raise Missing(f"{NO_KERNEL}; probes of more outputs than inputs tell of the part of K in the column space of W")
    if probed is not None:
        return probed.spread()
    values = torch.linalg.eigvalsh(view.layer.K.double()).flatten()
    return _of_spectrum(view.layer, values.std(correction=0) / values.mean())


OWN_COLUMNS = [
    Column("weight_norm", "weights", "how large the weights are", "‖W‖_F", lambda view: row_norm(view.layer.weight)),
    Column(
        "effective_rank", "spectra",
        "how many directions the weight uses, by the entropy of its singular values",
        "exp(−Σ p log p), p = s/Σs over the singular values of W",
        _ranks("effective_rank"),
    ),
    Column(
        "stable_rank", "spectra",
        "how many directions the weight uses, by its largest singular value",
        "‖W‖_F² / ‖W‖₂²",
        _ranks("stable_rank"),
    ),
    Column(
        "gradient_norm", "gradient",
        "how large the gradient of the mean loss is",
        "‖D‖_F / n",
        lambda view: row_norm(view.layer.gradient) / view.layer.loss_terms, {"loss"},
    ),
    Column(
        "fle_residual", "gradient",
        "whether the Feature Learning Equation holds: 0 up to rounding",
        "‖Wᵀ∇_W L − Σ g hᵀ‖ / ‖Σ g hᵀ‖ with the parameter's own gradient",
        _fle, {"loss", "autograd"},
    ),
    Column(
        "vcs_cosine", "virtual",
        "cosine of the virtual covariance shift and the change of the weight Gram in a gradient step",
        "ρ(v, Gram shift of a GD step)",
        _vcs("cosine"), {"loss", "covariance"}, null="vcs_null", at_inputs=True,
    ),
    Column(
        "vcs_residual", "virtual",
        "how much of the weight Gram's change the virtual covariance shift misses",
        "‖γ²(DᵀD − WᵀΣW)‖ / ‖Gram shift‖",
        _vcs("residual"), {"loss", "covariance"}, at_inputs=True,
    ),
    Column(
        "vcs_gram_cosine", "virtual",
        "whether the virtual covariance shift scales the weight Gram or turns it",
        "ρ(v, WᵀW)",
        _vcs("gram_cosine"), {"loss", "covariance"}, at_inputs=True,
    ),
    Column(
        "vcs_null", "virtual",
        "the vcs_cosine of two shifts with the same eigenvalues and unrelated eigenvectors",
        "tr v tr s / (d ‖v‖ ‖s‖): vcs_cosine of unrelated eigenvectors",
        _vcs("null"), {"loss", "covariance"}, at_inputs=True,
    ),
    Column(
        "nfa", "alignment",
        "cosine of the weight Gram and the average gradient outer product at the layer's inputs",
        "ρ(WᵀW, WᵀKW)",
        _nfa, {"jacobians"}, null="nfa_null", at_inputs=True,
    ),
    Column(
        "nfa_null", "alignment",
        "the nfa to expect without feature learning",
        "nfa when K keeps its eigenvalues and has random eigenvectors, in expectation",
        _nfa_null, {"jacobians"}, at_inputs=True,
    ),
    Column(
        "nfa_corrupted", "alignment",
        "the nfa with one draw of random eigenvectors of K",
        "ρ(WᵀW, WᵀQW), Q with K's spectrum and random eigenvectors",
        _nfa_corrupted, {"jacobians"},
    ),
    Column(
        "agop_trace", "alignment",
        "how strongly the output depends on the layer's inputs",
        "tr(WᵀKW)",
        _agop_trace, {"jacobians"}, at_inputs=True,
    ),
    Column(
        "kernel_spread", "alignment",
        "how unequal the eigenvalues of K are; where it is 0 the ansatz holds for any weight",
        "standard deviation of K's eigenvalues over their mean",
        _kernel_spread, {"jacobians"},
    ),
    Column(
        "weight_change", "weights",
        "how far the weight has moved from the reference",
        "‖W − W₀‖ / ‖W₀‖",
        _weight_change, {"reference"},
    ),
    Column(
        "nfa_centered", "alignment",
        "the ansatz for the change of the weight",
        "ρ(W̄ᵀW̄, W̄ᵀKW̄), W̄ = W − W₀",
        _nfa_moved("centered"), {"jacobians", "reference"},
    ),
    Column(
        "nfa_double", "alignment",
        "the ansatz for the changes of weight and Jacobians",
        "ρ(W̄ᵀW̄, W̄ᵀK̄W̄)",
        _nfa_moved("double"), {"jacobians", "reference_jacobians", "reference"},
    ),
    Column(
        "nfa_ptk", "alignment",
        "the ansatz for the initial weight and the change of the Jacobians",
        "ρ(W₀ᵀW₀, W₀ᵀK̄W₀)",
        _nfa_moved("ptk"), {"jacobians", "reference_jacobians", "reference"},
    ),
    Column(
        "double_ratio", "alignment",
        "the share of the centred alignment that needs weight and Jacobians to have moved together",
        "tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)",
        _double_ratio, {"jacobians", "reference_jacobians", "reference"},
    ),
]  # fmt: skip

#: every column by name, in the order in which tables show them
COLUMNS: dict[str, Column] = {column.name: column for column in (*OWN_COLUMNS, *FEATURE_COLUMNS, *LATER_COLUMNS)}

#: cheap, and defined for any supervised network; used when no measures are named
DEFAULT = (
    "weight_norm", "effective_rank", "gradient_norm", "vcs_cosine", "vcs_null", "vcs_residual", "nfa", "nfa_null",
    "weight_change", "nfa_centered", "nfa_double", "nfa_ptk", "target_linearity", "target_linearity_held_out", "surrogate",
    "surrogate_linearized", "feature_rank", "nc1",
)  # fmt: skip
