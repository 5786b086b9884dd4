"""Columns from later work on feature learning, beside those of the three papers: formulas on Gram matrices and spectra.

Rows of H are feature rows as ``tokens=`` chose them (by default the mean over a sample's sites), while D and Σ sum over
all sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.gram import Factored, cosine
from gramscope.linalg.measured import Measured, combine
from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import eigvalsh
from gramscope.measures.alignment import AgopSpectrum, agop_spectrum
from gramscope.measures.collapse import nrc1, nrc2, nrc3
from gramscope.measures.column import NO_KERNEL, Column, LayerView, Missing, Side, Value, features_of, grams_of
from gramscope.measures.similarity import kernel_target_alignment
from gramscope.measures.spectrum import alpha_req, rankme, weight_exponent
from gramscope.statistics.matrix_sums import Kernel

# --- what the columns read --------------------------------------------------------------------------------------------


def _moments(view: LayerView) -> Moments:
    part = features_of(view.layer)
    if part.rows is not None and not view.context.budget.keeps_gram(part.rows.shape[-1]):
        raise InputError(
            f"HᵀH of d = {part.rows.shape[-1]} does not fit memory=; raise it to {24 * part.rows.shape[-1] ** 2:,}"
        )
    joint = part.without_rows().joint
    if joint.C_hh is None:
        raise InputError(f"HᵀH was not collected: d = {joint.mean_h.shape[-1]} is large; ask with gram=True")
    return joint


def _spectral_gram(view: LayerView, center: bool) -> Tensor:
    """A matrix with the eigenvalues of ``HᵀH`` that are not zero: of the kept rows ``HHᵀ``, which is smaller."""
    rows = features_of(view.layer).rows
    if rows is None:
        moments = _moments(view)
        return moments.require_gram() if center else moments.HtH
    h = to_double(rows)
    h = h - h.mean(0) if center else h
    return h @ h.mT


def _weight_change(view: LayerView) -> Tensor:
    weight = view.layer.weight.to(torch.promote_types(view.layer.weight.dtype, torch.float32))
    return weight - view.reference_weight


# --- weights and gradients --------------------------------------------------------------------------------------------


def _fact(view: LayerView) -> Measured:
    """The Features At Convergence Theorem (Boix-Adsera, Mallinar, Simon and Belkin 2025).

    With the penalty ``½λ‖W‖²`` beside the mean loss, a stationary point has ``D/n = −λW`` and therefore ``WᵀW = −WᵀD/(nλ)``.
    λ is the ``weight_decay`` of ``torch.optim.SGD``; decoupled weight decay (AdamW) has other stationary points.
    """
    grams = grams_of(view)
    return -cosine(grams.weight, grams.of(grams.factor, grams.gradient))


def _fact_residual(view: LayerView) -> Measured:
    decay, grams = view.context.weight_decay, grams_of(view)
    if decay is None:
        raise Missing("pass weight_decay=, the λ that training used")
    if not (math.isfinite(decay) and decay > 0):
        raise InputError(f"weight_decay={decay!r}: give the positive λ that training used")
    moved = grams.of(grams.factor, grams.gradient) * (1 / (decay * view.layer.loss_terms))
    return (grams.weight + moved).norm() / grams.weight.norm()


def _canonical(side: Side, pair: str) -> Callable[[LayerView], Value]:
    """The canonical representation hypothesis (Ziyin, Chuang, Galanti and Poggio 2024): three matrices become proportional.

    They are taken uncentred; the bias does not count as part of the outputs.
    """

    def compute(view: LayerView) -> Value:
        grams = grams_of(view)
        ends = {"r": grams.features, "g": grams.gradients, "w": grams.weights}
        return cosine(ends[pair[0]](side), ends[pair[1]](side), view.context.center)

    return compute


def _log_alignment(view: LayerView) -> Measured:
    """Everett et al. 2024, "Scaling exponents across parameterizations and optimizers".

    The size of the outputs is ``d^(2·ratio − 1)`` times that of a weight with independent entries: at most 1 (one common
    direction), ½ where inputs and weight are independent, −∞ where ``W C Wᵀ`` is zero.
    """
    inner, weight = grams_of(view).exact_features(), Factored.of(grams_of(view).factor)
    width = inner.shape[:-1].numel()
    if width == 1:
        raise Missing("the log-alignment ratio is undefined for one input: its logarithm has base 1")
    share = inner.inner(weight) / (weight.trace() * inner.trace())
    return 1 + 0.5 * combine(torch.log, share) / math.log(width)


def _spectral(view: LayerView, symbol: str, matrix: Callable[[], Tensor]) -> Measured:
    """``‖X‖₂ / √(k/d)``: of weights and of their changes it keeps its order as the width grows under µP.

    (Yang, Simon and Bernstein 2023, "A spectral condition for feature learning".) Of a stack the largest block counts.
    """
    spectrum, (k, d) = view.spectrum(symbol, matrix), view.layer.weight.shape[-2:]
    error = None if spectrum.errors is None else float(spectrum.errors[0])
    remark = "by a random range finder; the error bounds the distance to a singular value" if error is not None else ""
    return Measured(spectrum.values[0], error, remark) / math.sqrt(k / d)


def _nuclear_rank(view: LayerView) -> float:
    def scaled() -> Tensor:  # in the gradient's own precision squares could underflow
        return view.layer.gradient / view.layer.gradient.abs().max()

    return view.spectrum("D", scaled).nuclear_rank


def _input_stable_rank(view: LayerView) -> float:
    values = eigvalsh(_spectral_gram(view, center=False)).clamp(min=0.0)
    return float(values.sum() / values.amax()) if float(values.amax()) > 0 else math.nan


def _weight_exponent(view: LayerView) -> float:
    side = min(view.layer.weight.shape[-2:])
    if view.layer.weight.dim() == 2 and not view.context.budget.decomposes(side):
        raise InputError(f"it needs all singular values, whose decomposition takes {24 * side**2:,} bytes of memory=")
    return weight_exponent(view.layer.weight)


def _kernel(view: LayerView) -> Tensor:
    if view.layer[Kernel].estimated:
        raise InputError(NO_KERNEL)
    return view.layer.K


def _agop_spectrum(view: LayerView) -> AgopSpectrum:
    return view.once("AGOP", lambda: agop_spectrum(view.layer.weight, _kernel(view)))


def _nfa_power(view: LayerView) -> float:
    return view.once("fitted power", lambda: _agop_spectrum(view).best_power())


def _nfa_fitted(view: LayerView) -> Value:
    power = _nfa_power(view)
    return power if math.isnan(power) else _agop_spectrum(view).alignment(power)


# --- features and targets ---------------------------------------------------------------------------------------------


def _rankme(view: LayerView) -> float:
    return rankme(_spectral_gram(view, center=False), features_of(view.layer).n)


def _alpha_req(view: LayerView) -> Tensor | float:
    return alpha_req(_spectral_gram(view, center=True), features_of(view.layer).eps)


def _kernel_target(view: LayerView) -> Tensor | float:
    joint, part = _moments(view), features_of(view.layer)
    if joint.C_hy.shape[-1] == 0:
        raise part.no_targets
    if part.labels:
        raise InputError("it needs all labels, and they are too many; targets= gives targets of your own")
    return kernel_target_alignment(joint, labels=part.classes is not None)


def _regression(view: LayerView) -> Moments:
    joint = features_of(view.layer).joint
    if features_of(view.layer).labelled:
        raise InputError("it is defined for targets to regress on; the columns nc1 to nc4 are for labels")
    if joint.C_hy.shape[-1] == 0:
        raise features_of(view.layer).no_targets
    return joint


def _nrc1(view: LayerView) -> Tensor | float:
    joint = _regression(view)
    return nrc1(_spectral_gram(view, center=True), joint.C_hy.shape[-1])


def _nrc2(view: LayerView) -> Tensor | float:
    _regression(view)
    W = view.layer.weight
    if features_of(view.layer).of_outputs or W.dim() == 3 or W.shape[-2] >= W.shape[-1]:
        raise InputError("it is 0 for any features: the layer has as many outputs as inputs, or groups")
    return nrc2(_moments(view).require_gram(), W)


def _nrc3(view: LayerView) -> Tensor | float:
    joint = _regression(view)
    if not view.is_readout:
        raise InputError("it is defined only at the readout, the layer executed last")
    return nrc3(view.layer.weight, joint.C_yy)


LATER_COLUMNS = [
    Column("fact", "later", "cosine of WᵀW and −WᵀD, which weight decay makes proportional", "ρ(WᵀW, −WᵀD)", _fact, {"loss"}),
    Column("fact_residual", "later", "how far the layer is from the stationary point of weight decay",
           "‖WᵀW + WᵀD/(nλ)‖ / ‖WᵀW‖", _fact_residual, {"loss"}),
    Column("crh_inputs_rg", "later", "cosine of inputs and gradients at the layer's inputs",
           "ρ(HᵀH, WᵀΣW)", _canonical("inputs", "rg"), {"loss", "covariance", "features", "gram"}),
    Column("crh_inputs_rw", "later", "cosine of inputs and weights at the layer's inputs",
           "ρ(HᵀH, WᵀW)", _canonical("inputs", "rw"), {"features", "gram"}),
    Column("crh_inputs_gw", "later", "cosine of gradients and weights at the layer's inputs",
           "ρ(WᵀΣW, WᵀW)", _canonical("inputs", "gw"), {"loss", "covariance"}),
    Column("crh_outputs_rg", "later", "cosine of outputs and gradients at the layer's outputs",
           "ρ(WHᵀHWᵀ, Σ)", _canonical("outputs", "rg"), {"loss", "covariance", "features", "gram"}),
    Column("crh_outputs_rw", "later", "cosine of outputs and weights at the layer's outputs",
           "ρ(WHᵀHWᵀ, WWᵀ)", _canonical("outputs", "rw"), {"features", "gram"}),
    Column("crh_outputs_gw", "later", "cosine of gradients and weights at the layer's outputs",
           "ρ(Σ, WWᵀ)", _canonical("outputs", "gw"), {"loss", "covariance"}),
    Column("log_alignment", "later", "how far the inputs lie along W's leading directions: ½ if independent",
           "1 + ½ log_d[tr(WCWᵀ) / (‖W‖_F² tr C)], C = HᵀH/n", _log_alignment, {"features", "gram"}),
    Column("spectral_weight", "weights", "largest singular value of the weight, on a scale free of the width",
           "‖W‖₂ / √(k/d)", lambda view: _spectral(view, "W", lambda: view.layer.weight)),
    Column("spectral_change", "weights", "largest singular value of the weight's change, on that scale",
           "‖W − W₀‖₂ / √(k/d)", lambda view: _spectral(view, "W − W₀", partial(_weight_change, view)), {"reference"}),
    Column("gradient_nuclear_rank", "spectra", "how many directions the gradient uses, by its nuclear norm",
           "‖D‖_*² / ‖D‖_F²", _nuclear_rank, {"loss"}),
    Column("input_stable_rank", "spectra", "how many directions the inputs use, by their largest singular value",
           "‖H‖_F² / ‖H‖₂²",
           _input_stable_rank, {"features", "gram"}, of_features=True),
    Column("nfa_depth", "alignment", "the ansatz with the power that balanced deep linear nets have",
           "ρ(WᵀW, (WᵀKW)^(1/L)), L layers from this one to the output",
           lambda view: _agop_spectrum(view).alignment(1 / view.depth_above), {"jacobians"}),
    Column("nfa_fitted", "alignment", "the ansatz with the power that fits best",
           "max_p ρ(WᵀW, (WᵀKW)^p)", _nfa_fitted, {"jacobians"}),
    Column("nfa_power", "alignment", "the power of the AGOP that fits WᵀW best",
           "the p of nfa_fitted", _nfa_power, {"jacobians"}),
    Column("rankme", "spectra", "how many directions the inputs use, by the entropy of their singular values",
           "exp(−Σ p log p), p = s/Σs + 1e-7 over the singular values of H",
           _rankme, {"features", "gram"}, of_features=True),
    Column("alpha_req", "spectra", "how fast the eigenvalues of the inputs' covariance decay",
           "α of λ_i ∝ i^(−α), eigenvalues of the centred features' covariance",
           _alpha_req, {"features", "gram"}, of_features=True),
    Column("weight_exponent", "spectra", "how heavy the tail of the weight's spectrum is",
           "α of the density λ^(−α) in the tail of WᵀW's eigenvalues", _weight_exponent),
    Column("kernel_target_alignment", "linearity", "cosine of the uncentred Gram matrices of inputs and targets",
           "⟨HHᵀ, YYᵀ⟩ / (‖HHᵀ‖ ‖YYᵀ‖), uncentred", _kernel_target, {"features", "targets", "gram"}, of_features=True),
    Column("nrc1", "collapse", "how much of the inputs lies outside as many directions as targets",
           "share of H's variance outside its c leading principal directions",
           _nrc1, {"features", "targets", "gram"}, of_features=True),
    Column("nrc2", "collapse", "how much of the inputs the weight does not see",
           "share of H's variance outside the row space of W", _nrc2, {"features", "targets", "gram"}),
    Column("nrc3", "collapse", "how far the readout's WWᵀ is from what the targets predict",
           "min_γ ‖WWᵀ/‖WWᵀ‖ − A/‖A‖‖², A = Σ_Y^½ − γ^½ I, at the readout", _nrc3, {"features", "targets", "gram"}),
]  # fmt: skip
