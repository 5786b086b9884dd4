"""Columns from later work on feature learning, beside those of the three papers; shown when named or with ``"all"``.

:mod:`gramscope.measures.columns` adds ``LATER_COLUMNS`` to its table. Functions raise :class:`InputError` where there is no
answer.
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
from gramscope.linalg.measured import Measured
from gramscope.linalg.moments import Moments
from gramscope.linalg.stochastic import is_large, probe_count, probes
from gramscope.measures.ansatz_power import FittedPower, fitted_power, power_alignment
from gramscope.measures.canonical_representation import Pair, Side, canonical_alignment
from gramscope.measures.column import NO_KERNEL, Column, LayerView, Value
from gramscope.measures.fact import fact_alignment, fact_residual
from gramscope.measures.feature_columns import features_of
from gramscope.measures.kernel_target import kernel_target_alignment
from gramscope.measures.power_law import weight_exponent
from gramscope.measures.probed_products import probed_fact, probed_pair
from gramscope.measures.regression_collapse import nrc1, nrc2, nrc3
from gramscope.measures.representation_rank import alpha_req, rankme
from gramscope.measures.spectral_scale import log_alignment_ratio, nuclear_rank, spectral_ratio, stable_rank_of_gram
from gramscope.statistics.feature_statistics import keeps_gram, without_rows

# --- what the columns read --------------------------------------------------------------------------------------------


def _moments(view: LayerView) -> Moments:
    part = features_of(view.layer)
    if part.rows is not None and not keeps_gram(part.rows.shape[-1], view.context.memory):
        raise InputError(
            f"HᵀH of d = {part.rows.shape[-1]} does not fit memory=; raise it to {24 * part.rows.shape[-1] ** 2:,}"
        )
    joint = without_rows(part, gram=True).joint
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


def _input_gram(view: LayerView) -> Tensor:
    """``HᵀH [d, d]``, and for grouped layers its diagonal blocks ``[groups, d, d]``."""
    if features_of(view.layer).of_outputs:
        raise InputError("its inputs are one-hot vectors, whose HᵀH is not collected")
    gram = _moments(view).HtH
    if view.layer.weight.dim() < 3:
        return gram
    groups, d = view.layer.weight.shape[0], view.layer.weight.shape[-1]
    return gram.reshape(groups, d, groups, d).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _weight_change(view: LayerView) -> Tensor:
    if view.layer.name not in view.context.reference_weights:
        raise InputError("no reference network was given")
    weight = view.layer.weight.to(torch.promote_types(view.layer.weight.dtype, torch.float32))
    return weight - view.context.reference_weights[view.layer.name].to(weight.device)


# --- weights and gradients --------------------------------------------------------------------------------------------


def _fact_residual(view: LayerView) -> Value:
    if view.context.weight_decay is None:
        raise InputError("pass weight_decay=, the λ that training used")
    if is_large(view.layer.weight.shape, view.context.memory):
        return probed_fact(
            view.layer.weight,
            view.layer.gradient,
            view.context.memory,
            view.context.weight_decay * view.layer.loss_terms,
        )
    return fact_residual(
        view.layer.weight, view.layer.gradient.double() / view.layer.loss_terms, view.context.weight_decay
    )


def _fact(view: LayerView) -> Tensor | Measured:
    if is_large(view.layer.weight.shape, view.context.memory):
        return probed_fact(view.layer.weight, view.layer.gradient, view.context.memory)
    return fact_alignment(view.layer.weight, view.layer.gradient)


def _canonical(side: Side, pair: Pair) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Value:
        wide = view.layer.features is not None and view.layer.features.rows is not None
        wide = wide and not keeps_gram(view.layer.weight[..., 0, :].numel(), view.context.memory)
        if view.layer.covariance_probes is not None or is_large(view.layer.weight.shape, view.context.memory) or wide:
            return _probed_canonical(view, side, pair)
        C = _input_gram(view) if "representations" in pair else None
        Sigma = view.layer.covariance if "gradients" in pair else None
        return canonical_alignment(view.layer.weight, side, pair, C, Sigma, view.context.center)

    return compute


def _probed_canonical(view: LayerView, side: Side, pair: Pair) -> Measured:
    """The alignment from products of both matrices with random probes of the inputs or of the outputs."""
    if view.context.center:
        raise InputError("the matrices do not fit memory=, and random probes give cosines only: leave out center=True")
    W = view.layer.weight.to(torch.promote_types(view.layer.weight.dtype, torch.float32))
    length = W.shape[-1 if side == "inputs" else -2]
    omega = probes(length, probe_count(length, view.context.memory), W)
    found = []
    if "gradients" in pair:
        if side == "outputs" or view.layer.covariance_probes is None:
            raise InputError("Σ does not fit memory=; of it only ΣWΩ is kept, which tells of the layer's inputs")
        omega = probes(length, view.layer.covariance_probes.shape[-1], W)
        found.append(W.mT @ view.layer.covariance_probes.to(W.dtype))
    inner = omega if side == "inputs" else W.mT @ omega
    if "representations" in pair:
        found.append(_input_gram_times(view, inner))
    if "weights" in pair:
        found.append(inner if side == "outputs" else W.mT @ (W @ omega))
    if side == "outputs":
        found = [W @ x.to(W.dtype) for x in found]
    return probed_pair(*found).cosine()


def _input_gram_times(view: LayerView, thin: Tensor) -> Tensor:
    """``HᵀH X`` for ``X [..., d, r]``, from the rows where they are kept."""
    part = features_of(view.layer)
    if part.rows is None or part.of_outputs:
        return _input_gram(view).to(thin.dtype) @ thin
    rows = part.rows.to(thin.dtype)
    if view.layer.weight.dim() > 2:
        rows = rows.reshape(len(rows), view.layer.weight.shape[0], -1).movedim(1, 0)
    return rows.mT @ (rows @ thin)


def _spectral(view: LayerView, what: str, matrix: Callable[[], Tensor]) -> float | Measured:
    """``‖X‖₂ / √(k/d)`` of the weight or its change."""
    large = view.large_spectrum(what, matrix)
    if large is None:
        return spectral_ratio(to_double(matrix()))
    k, d = view.layer.weight.shape[-2:]
    value, error = (float(x[0]) / math.sqrt(k / d) for x in (large.values, large.errors))
    return Measured(value, error, "by a random range finder; the error bounds the distance to a singular value")


def _nuclear_rank(view: LayerView) -> float | Measured:
    large = view.large_spectrum("D", lambda: view.layer.gradient)
    return nuclear_rank(view.layer.gradient) if large is None else large.nuclear_rank


def _weight_exponent(view: LayerView) -> float:
    side = min(view.layer.weight.shape[-2:])
    if view.layer.weight.dim() == 2 and 24 * side**2 > view.context.memory:
        raise InputError(f"it needs all singular values, whose decomposition takes {24 * side**2:,} bytes of memory=")
    return weight_exponent(view.layer.weight)


def _kernel(view: LayerView) -> Tensor:
    if view.layer.kernel_probes is not None:
        raise InputError(NO_KERNEL)
    return view.layer.K


def _nfa_depth(view: LayerView) -> Tensor | float:
    return power_alignment(view.layer.weight, _kernel(view), 1 / view.depth_above)


def _fitted_power(view: LayerView) -> FittedPower:
    return view.once("fitted power", lambda: fitted_power(view.layer.weight, _kernel(view)))


# --- features and targets ---------------------------------------------------------------------------------------------


def _alpha_req(view: LayerView) -> Tensor | float:
    return alpha_req(_spectral_gram(view, center=True), features_of(view.layer).eps)


def _kernel_target(view: LayerView) -> Tensor | float:
    joint, part = _moments(view), features_of(view.layer)
    if joint.C_hy.shape[-1] == 0:
        raise InputError("the loader gave no targets")
    if part.labels:
        raise InputError("it needs all labels, and they are too many; targets= gives targets of your own")
    return kernel_target_alignment(joint, labels=part.classes is not None)


def _regression(view: LayerView) -> Moments:
    joint = features_of(view.layer).joint
    if features_of(view.layer).labelled:
        raise InputError("it is defined for targets to regress on; the columns nc1 to nc4 are for labels")
    if joint.C_hy.shape[-1] == 0:
        raise InputError("the loader gave no targets")
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


RG: Pair = "representations and gradients"
RW: Pair = "representations and weights"
GW: Pair = "gradients and weights"

LATER_COLUMNS = [
    Column(
        "fact", "later",
        "cosine of the weight Gram and of −WᵀD, which weight decay makes proportional at convergence",
        "ρ(WᵀW, −WᵀD)",
        _fact, {"loss"},
    ),
    Column(
        "fact_residual", "later",
        "how far the layer is from the stationary point that weight decay gives",
        "‖WᵀW + WᵀD/(nλ)‖ / ‖WᵀW‖",
        _fact_residual, {"loss"},
    ),
    Column(
        "crh_inputs_rg", "later",
        "cosine of inputs and gradients at the layer's inputs",
        "ρ(HᵀH, WᵀΣW)",
        _canonical("inputs", RG), {"loss", "covariance", "features", "gram"},
    ),
    Column(
        "crh_inputs_rw", "later",
        "cosine of inputs and weights at the layer's inputs",
        "ρ(HᵀH, WᵀW)",
        _canonical("inputs", RW), {"features", "gram"},
    ),
    Column(
        "crh_inputs_gw", "later",
        "cosine of gradients and weights at the layer's inputs",
        "ρ(WᵀΣW, WᵀW)",
        _canonical("inputs", GW), {"loss", "covariance"},
    ),
    Column(
        "crh_outputs_rg", "later",
        "cosine of outputs and gradients at the layer's outputs",
        "ρ(WHᵀHWᵀ, Σ)",
        _canonical("outputs", RG), {"loss", "covariance", "features", "gram"},
    ),
    Column(
        "crh_outputs_rw", "later",
        "cosine of outputs and weights at the layer's outputs",
        "ρ(WHᵀHWᵀ, WWᵀ)",
        _canonical("outputs", RW), {"features", "gram"},
    ),
    Column(
        "crh_outputs_gw", "later",
        "cosine of gradients and weights at the layer's outputs",
        "ρ(Σ, WWᵀ)",
        _canonical("outputs", GW), {"loss", "covariance"},
    ),
    Column(
        "log_alignment", "later",
        "how far the inputs lie along the weight's leading directions: ½ where they are independent",
        "1 + ½ log_d[tr(WCWᵀ) / (‖W‖_F² tr C)], C = HᵀH/n",
        lambda view: log_alignment_ratio(view.layer.weight, _input_gram(view)), {"features", "gram"},
    ),
    Column(
        "spectral_weight", "weights",
        "largest singular value of the weight, on the scale that does not depend on the width",
        "‖W‖₂ / √(k/d)",
        lambda view: _spectral(view, "W", lambda: view.layer.weight),
    ),
    Column(
        "spectral_change", "weights",
        "largest singular value of the weight's change, on the same scale",
        "‖W − W₀‖₂ / √(k/d)",
        lambda view: _spectral(view, "W − W₀", partial(_weight_change, view)), {"reference"},
    ),
    Column(
        "gradient_nuclear_rank", "spectra",
        "how many directions the gradient uses, by its nuclear norm",
        "‖D‖_*² / ‖D‖_F²",
        _nuclear_rank, {"loss"},
    ),
    Column(
        "input_stable_rank", "spectra",
        "how many directions the inputs use, by their largest singular value",
        "‖H‖_F² / ‖H‖₂²",
        lambda view: stable_rank_of_gram(_spectral_gram(view, center=False)), {"features", "gram"}, of_features=True,
    ),
    Column(
        "nfa_depth", "alignment",
        "the ansatz with the power that balanced deep linear nets have",
        "ρ(WᵀW, (WᵀKW)^(1/L)), L layers from this one to the output",
        _nfa_depth, {"jacobians"},
    ),
    Column(
        "nfa_fitted", "alignment",
        "the ansatz with the power that fits best",
        "max_p ρ(WᵀW, (WᵀKW)^p)",
        lambda view: _fitted_power(view).alignment, {"jacobians"},
    ),
    Column(
        "nfa_power", "alignment",
        "the power of the average gradient outer product that fits the weight Gram best",
        "the p of nfa_fitted",
        lambda view: _fitted_power(view).power, {"jacobians"},
    ),
    Column(
        "rankme", "spectra",
        "how many directions the inputs use, by the entropy of their singular values",
        "exp(−Σ p log p), p = s/Σs + 1e-7 over the singular values of H",
        lambda view: rankme(_spectral_gram(view, center=False), features_of(view.layer).n),
        {"features", "gram"}, of_features=True,
    ),
    Column(
        "alpha_req", "spectra",
        "how fast the eigenvalues of the inputs' covariance decay",
        "α of λ_i ∝ i^(−α), eigenvalues of the centred features' covariance",
        _alpha_req, {"features", "gram"}, of_features=True,
    ),
    Column(
        "weight_exponent", "spectra",
        "how heavy the tail of the weight's spectrum is",
        "α of the density λ^(−α) in the tail of WᵀW's eigenvalues",
        _weight_exponent,
    ),
    Column(
        "kernel_target_alignment", "linearity",
        "cosine of the uncentred Gram matrices of inputs and targets",
        "⟨HHᵀ, YYᵀ⟩ / (‖HHᵀ‖ ‖YYᵀ‖), uncentred",
        _kernel_target, {"features", "targets", "gram"}, of_features=True,
    ),
    Column(
        "nrc1", "collapse",
        "how much of the inputs lies outside as many directions as there are regression targets",
        "share of H's variance outside its c leading principal directions",
        _nrc1, {"features", "targets", "gram"}, of_features=True,
    ),
    Column(
        "nrc2", "collapse",
        "how much of the inputs the weight does not see",
        "share of H's variance outside the row space of W",
        _nrc2, {"features", "targets", "gram"},
    ),
    Column(
        "nrc3", "collapse",
        "how far the readout's Gram is from the one that the covariance of the targets predicts",
        "min_γ ‖WWᵀ/‖WWᵀ‖ − A/‖A‖‖², A = Σ_Y^½ − γ^½ I, at the readout",
        _nrc3, {"features", "targets", "gram"},
    ),
]  # fmt: skip
