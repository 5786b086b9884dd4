"""Columns from later work on feature learning, beside those of the three papers; shown when named or with ``"all"``.

:mod:`gramscope.measures.columns` adds them to its table. Functions raise :class:`InputError` where there is no answer.
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
from gramscope.linalg.moments import Moments
from gramscope.linalg.stochastic import is_large, probe_count, probes
from gramscope.measures.ansatz_power import FittedPower, fitted_power, power_alignment
from gramscope.measures.canonical_representation import Pair, Side, canonical_alignment
from gramscope.measures.column import NO_KERNEL, Column, Context, Entry
from gramscope.measures.estimate import Estimate
from gramscope.measures.fact import fact_alignment, fact_residual
from gramscope.measures.feature_columns import features_of
from gramscope.measures.kernel_target import kernel_target_alignment
from gramscope.measures.power_law import weight_exponent
from gramscope.measures.probed_products import probed_fact, probed_pair
from gramscope.measures.regression_collapse import nrc1, nrc2, nrc3
from gramscope.measures.representation_rank import alpha_req, rankme
from gramscope.measures.spectral_scale import log_alignment_ratio, nuclear_rank, spectral_ratio, stable_rank_of_gram
from gramscope.statistics.feature_statistics import keeps_gram, without_rows
from gramscope.statistics.layer import LayerStatistics

# --- what the columns read --------------------------------------------------------------------------------------------


def _moments(context: Context, layer: LayerStatistics) -> Moments:
    part = features_of(layer)
    if part.rows is not None and not keeps_gram(part.rows.shape[-1], context.memory):
        raise InputError(
            f"HᵀH of d = {part.rows.shape[-1]} does not fit memory=; raise it to {24 * part.rows.shape[-1] ** 2:,}"
        )
    joint = without_rows(part, gram=True).joint
    if joint.C_hh is None:
        raise InputError(f"HᵀH was not collected: d = {joint.mean_h.shape[-1]} is large; ask with gram=True")
    return joint


def _spectral_gram(context: Context, layer: LayerStatistics, center: bool) -> Tensor:
    """A matrix with the eigenvalues of ``HᵀH`` that are not zero: of the kept rows ``HHᵀ``, which is smaller."""
    rows = features_of(layer).rows
    if rows is None:
        moments = _moments(context, layer)
        return moments.require_gram() if center else moments.HtH
    h = to_double(rows)
    h = h - h.mean(0) if center else h
    return h @ h.mT


def _input_gram(context: Context, layer: LayerStatistics) -> Tensor:
    """``HᵀH [d, d]``, and for grouped layers its diagonal blocks ``[groups, d, d]``."""
    if features_of(layer).of_outputs:
        raise InputError("its inputs are one-hot vectors, whose HᵀH is not collected")
    gram = _moments(context, layer).HtH
    if layer.weight.dim() < 3:
        return gram
    groups, d = layer.weight.shape[0], layer.weight.shape[-1]
    return gram.reshape(groups, d, groups, d).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _weight_change(context: Context, layer: LayerStatistics) -> Tensor:
    if layer.name not in context.reference_weights:
        raise InputError("no reference network was given")
    weight = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32))
    return weight - context.reference_weights[layer.name].to(weight.device)


# --- weights and gradients --------------------------------------------------------------------------------------------


def _fact_residual(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
    if context.weight_decay is None:
        raise InputError("pass weight_decay=, the λ that training used")
    if is_large(layer.weight.shape, context.memory):
        return probed_fact(layer.weight, layer.gradient, context.memory, context.weight_decay * layer.loss_terms)
    return fact_residual(layer.weight, layer.gradient.double() / layer.loss_terms, context.weight_decay)


def _fact(context: Context, layer: LayerStatistics) -> Tensor | Estimate:
    if is_large(layer.weight.shape, context.memory):
        return probed_fact(layer.weight, layer.gradient, context.memory)
    return fact_alignment(layer.weight, layer.gradient)


def _canonical(side: Side, pair: Pair) -> Column:
    def compute(context: Context, layer: LayerStatistics) -> Tensor | float | Estimate:
        wide = layer.features is not None and layer.features.rows is not None
        wide = wide and not keeps_gram(layer.weight[..., 0, :].numel(), context.memory)
        if layer.covariance_probes is not None or is_large(layer.weight.shape, context.memory) or wide:
            return _probed_canonical(context, layer, side, pair)
        C = _input_gram(context, layer) if "representations" in pair else None
        Sigma = layer.covariance if "gradients" in pair else None
        return canonical_alignment(layer.weight, side, pair, C, Sigma, context.center)

    return compute


def _probed_canonical(context: Context, layer: LayerStatistics, side: Side, pair: Pair) -> Estimate:
    """The alignment from products of both matrices with random probes of the inputs or of the outputs."""
    if context.center:
        raise InputError("the matrices do not fit memory=, and random probes give cosines only: leave out center=True")
    W = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32))
    length = W.shape[-1 if side == "inputs" else -2]
    omega = probes(length, probe_count(length, context.memory), W)
    found = []
    if "gradients" in pair:
        if side == "outputs" or layer.covariance_probes is None:
            raise InputError("Σ does not fit memory=; of it only ΣWΩ is kept, which tells of the layer's inputs")
        omega = probes(length, layer.covariance_probes.shape[-1], W)
        found.append(W.mT @ layer.covariance_probes.to(W.dtype))
    inner = omega if side == "inputs" else W.mT @ omega
    if "representations" in pair:
        found.append(_input_gram_times(context, layer, inner))
    if "weights" in pair:
        found.append(inner if side == "outputs" else W.mT @ (W @ omega))
    if side == "outputs":
        found = [W @ x.to(W.dtype) for x in found]
    return probed_pair(*found).cosine()


def _input_gram_times(context: Context, layer: LayerStatistics, thin: Tensor) -> Tensor:
    """``HᵀH X`` for ``X [..., d, r]``, from the rows where they are kept."""
    part = features_of(layer)
    if part.rows is None or part.of_outputs:
        return _input_gram(context, layer).to(thin.dtype) @ thin
    rows = part.rows.to(thin.dtype)
    if layer.weight.dim() > 2:
        rows = rows.reshape(len(rows), layer.weight.shape[0], -1).movedim(1, 0)
    return rows.mT @ (rows @ thin)


def _spectral(context: Context, layer: LayerStatistics, what: str, matrix: Callable[[], Tensor]) -> float | Estimate:
    """``‖X‖₂ / √(k/d)`` of the weight or its change."""
    large = context.large_spectrum(layer, what, matrix)
    if large is None:
        return spectral_ratio(to_double(matrix()))
    k, d = layer.weight.shape[-2:]
    value, error = (float(x[0]) / math.sqrt(k / d) for x in (large.values, large.errors))
    return Estimate(value, error, "by a random range finder; the error bounds the distance to a singular value")


def _nuclear_rank(context: Context, layer: LayerStatistics) -> float | Estimate:
    large = context.large_spectrum(layer, "D", lambda: layer.gradient)
    return nuclear_rank(layer.gradient) if large is None else large.nuclear_rank


def _weight_exponent(context: Context, layer: LayerStatistics) -> float:
    side = min(layer.weight.shape[-2:])
    if layer.weight.dim() == 2 and 24 * side**2 > context.memory:
        raise InputError(f"it needs all singular values, whose decomposition takes {24 * side**2:,} bytes of memory=")
    return weight_exponent(layer.weight)


def _kernel(layer: LayerStatistics) -> Tensor:
    if layer.kernel_probes is not None:
        raise InputError(NO_KERNEL)
    return layer.K


def _nfa_depth(context: Context, layer: LayerStatistics) -> Tensor | float:
    names = list(context.statistics.layers)
    return power_alignment(layer.weight, _kernel(layer), 1 / (len(names) - names.index(layer.name)))


def _fitted_power(context: Context, layer: LayerStatistics) -> FittedPower:
    return context.once(layer, "fitted power", lambda: fitted_power(layer.weight, _kernel(layer)))


# --- features and targets ---------------------------------------------------------------------------------------------


def _alpha_req(context: Context, layer: LayerStatistics) -> Tensor | float:
    return alpha_req(_spectral_gram(context, layer, center=True), features_of(layer).eps)


def _kernel_target(context: Context, layer: LayerStatistics) -> Tensor | float:
    joint, part = _moments(context, layer), features_of(layer)
    if joint.C_hy.shape[-1] == 0:
        raise InputError("the loader gave no targets")
    if part.labels:
        raise InputError("it needs all labels, and they are too many; targets= gives targets of your own")
    return kernel_target_alignment(joint, labels=part.classes is not None)


def _regression(layer: LayerStatistics) -> Moments:
    joint = features_of(layer).joint
    if features_of(layer).labelled:
        raise InputError("it is defined for targets to regress on; the columns nc1 to nc4 are for labels")
    if joint.C_hy.shape[-1] == 0:
        raise InputError("the loader gave no targets")
    return joint


def _nrc1(context: Context, layer: LayerStatistics) -> Tensor | float:
    joint = _regression(layer)
    return nrc1(_spectral_gram(context, layer, center=True), joint.C_hy.shape[-1])


def _nrc2(context: Context, layer: LayerStatistics) -> Tensor | float:
    _regression(layer)
    if features_of(layer).of_outputs or layer.weight.dim() == 3 or layer.weight.shape[-2] >= layer.weight.shape[-1]:
        raise InputError("it is 0 for any features: the layer has as many outputs as inputs, or groups")
    return nrc2(_moments(context, layer).require_gram(), layer.weight)


def _nrc3(context: Context, layer: LayerStatistics) -> Tensor | float:
    joint = _regression(layer)
    if layer.name != context.last:
        raise InputError("it is defined only at the readout, the layer executed last")
    return nrc3(layer.weight, joint.C_yy)


RG: Pair = "representations and gradients"
RW: Pair = "representations and weights"
GW: Pair = "gradients and weights"

FURTHER: dict[str, Entry] = {
    "fact": (_fact, "loss", "ρ(WᵀW, −WᵀD)"),
    "fact_residual": (_fact_residual, "loss", "‖WᵀW + WᵀD/(nλ)‖ / ‖WᵀW‖"),
    "crh_inputs_rg": (_canonical("inputs", RG), "loss covariance features gram", "ρ(HᵀH, WᵀΣW)"),
    "crh_inputs_rw": (_canonical("inputs", RW), "features gram", "ρ(HᵀH, WᵀW)"),
    "crh_inputs_gw": (_canonical("inputs", GW), "loss covariance", "ρ(WᵀΣW, WᵀW)"),
    "crh_outputs_rg": (_canonical("outputs", RG), "loss covariance features gram", "ρ(WHᵀHWᵀ, Σ)"),
    "crh_outputs_rw": (_canonical("outputs", RW), "features gram", "ρ(WHᵀHWᵀ, WWᵀ)"),
    "crh_outputs_gw": (_canonical("outputs", GW), "loss covariance", "ρ(Σ, WWᵀ)"),
    "log_alignment": (
        lambda context, layer: log_alignment_ratio(layer.weight, _input_gram(context, layer)),
        "features gram", "1 + ½ log_d[tr(WCWᵀ) / (‖W‖_F² tr C)], C = HᵀH/n",
    ),
    "spectral_weight": (
        lambda context, layer: _spectral(context, layer, "W", lambda: layer.weight), "", "‖W‖₂ / √(k/d)"
    ),
    "spectral_change": (
        lambda context, layer: _spectral(context, layer, "W − W₀", partial(_weight_change, context, layer)),
        "reference", "‖W − W₀‖₂ / √(k/d)",
    ),
    "gradient_nuclear_rank": (_nuclear_rank, "loss", "‖D‖_*² / ‖D‖_F²"),
    "input_stable_rank": (
        lambda context, layer: stable_rank_of_gram(_spectral_gram(context, layer, center=False)),
        "features gram", "‖H‖_F² / ‖H‖₂²",
    ),
    "nfa_depth": (_nfa_depth, "jacobians", "ρ(WᵀW, (WᵀKW)^(1/L)), L layers from this one to the output"),
    "nfa_fitted": (
        lambda context, layer: _fitted_power(context, layer).alignment, "jacobians", "max_p ρ(WᵀW, (WᵀKW)^p)"
    ),
    "nfa_power": (lambda context, layer: _fitted_power(context, layer).power, "jacobians", "the p of nfa_fitted"),
    "rankme": (
        lambda context, layer: rankme(_spectral_gram(context, layer, center=False), features_of(layer).n),
        "features gram", "exp(−Σ p log p), p = s/Σs + 1e-7 over the singular values of H",
    ),
    "alpha_req": (_alpha_req, "features gram", "α of λ_i ∝ i^(−α), eigenvalues of the centred features' covariance"),
    "weight_exponent": (
        _weight_exponent, "", "α of the density λ^(−α) in the tail of WᵀW's eigenvalues"
    ),
    "kernel_target_alignment": (_kernel_target, "features targets gram", "⟨HHᵀ, YYᵀ⟩ / (‖HHᵀ‖ ‖YYᵀ‖), uncentred"),
    "nrc1": (_nrc1, "features targets gram", "share of H's variance outside its c leading principal directions"),
    "nrc2": (_nrc2, "features targets gram", "share of H's variance outside the row space of W"),
    "nrc3": (_nrc3, "features targets gram", "min_γ ‖WWᵀ/‖WWᵀ‖ − A/‖A‖‖², A = Σ_Y^½ − γ^½ I, at the readout"),
}  # fmt: skip

#: those of features alone, which the output of any module has
FURTHER_OF_FEATURES = frozenset({"input_stable_rank", "rankme", "alpha_req", "kernel_target_alignment", "nrc1"})
