"""Names, sentences and formulas of the measures. A measure that is not listed appears under its own name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasureText:
    """Label and formula of a measure, and a sentence where that of its group does not describe it."""

    label: str
    formula: str
    sentence: str = ""


@dataclass(frozen=True)
class Group:
    """Measures that share a panel of layer × time maps.

    Args:
        key, title, sentence: of the panel.
        measures: in the order in which the panel offers them.
        log: measures that range over orders of magnitude.
        unit: measures of order one, whose colour scale ends at round tenths.
    """

    key: str
    title: str
    sentence: str
    measures: tuple[str, ...]
    log: frozenset[str] = frozenset()
    unit: frozenset[str] = frozenset()


MEASURES: dict[str, MeasureText] = {
    "target_linearity": MeasureText("Target linearity", "1 − ‖Y − Hβ‖² / ‖Y − ȳ‖²"),
    "target_linearity_null": MeasureText(
        "Target linearity, of noise", "tr(H(HᵀH + λI)⁻¹Hᵀ) / n, the intercept counted"
    ),
    "target_linearity_held_out": MeasureText("Target linearity, held out", "the same on data not fitted"),
    "surrogate": MeasureText("Surrogate", "‖HᵀY‖_F²"),
    "surrogate_linearized": MeasureText("Surrogate, linearised", "‖W HᵀY‖_F²"),
    "surrogate_normalized": MeasureText(
        "Surrogate, normalised",
        "⟨G, YYᵀ⟩ / (‖G‖ ‖YYᵀ‖), centred features",
        "How strongly the centred features point along the targets, free of their size: 1 means that the Gram "
        "matrix of the features is proportional to that of the targets.",
    ),
    "nfa": MeasureText("NFA, uncentred", "ρ(WᵀW, WᵀKW)"),
    "nfa_centered": MeasureText("NFA, centred", "ρ(W̄ᵀW̄, W̄ᵀKW̄), W̄ = W − W₀"),
    "nfa_double": MeasureText("NFA, double-centred", "ρ(W̄ᵀW̄, W̄ᵀK̄W̄)"),
    "nfa_ptk": MeasureText("NFA, tangent-centred", "ρ(W₀ᵀW₀, W₀ᵀK̄W₀)"),
    "nfa_corrupted": MeasureText(
        "NFA, corrupted",
        "ρ(WᵀW, WᵀQW), Q with K's spectrum and random eigenvectors",
        "The ansatz with random eigenvectors in place of those of K: the value to expect without feature learning.",
    ),
    "double_ratio": MeasureText("Double-centred ratio", "tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)"),
    "effective_rank": MeasureText("Effective rank of W", "exp(−Σ p log p), p = s/Σs over the singular values of W"),
    "stable_rank": MeasureText("Stable rank of W", "‖W‖_F² / ‖W‖₂²"),
    "feature_rank": MeasureText("Effective rank of the inputs", "effective rank of the centred features"),
    "vcs_cosine": MeasureText(
        "Virtual against true shift",
        "ρ(v, Gram shift of a GD step)",
        "How closely the virtual covariance shift v, which backpropagation gives for free, follows the true "
        "change of the weight Gram WᵀW in one gradient step: ρ is their cosine, and 1 means proportional.",
    ),
    "vcs_residual": MeasureText(
        "Relative residual",
        "‖γ²(DᵀD − WᵀΣW)‖ / ‖Gram shift‖",
        "How much of the true change of the weight Gram in one gradient step the virtual covariance shift misses: "
        "0 means that it misses nothing.",
    ),
    "vcs_gram_cosine": MeasureText(
        "Virtual shift against WᵀW",
        "ρ(v, WᵀW)",
        "How far the virtual covariance shift v of one gradient step points along the weight Gram WᵀW as it is: ρ "
        "is their cosine. At 1 the step scales the Gram, at 0 it changes the Gram in new directions, below 0 it "
        "shrinks the Gram.",
    ),
    "fle_residual": MeasureText(
        "Error of the Feature Learning Equation",
        "‖Wᵀ∇_W L − Σ g hᵀ‖ / ‖Σ g hᵀ‖ with the parameter's own gradient",
        "Whether the Feature Learning Equation holds in floating point: 0 up to rounding if it does.",
    ),
    "weight_norm": MeasureText("Weight norm", "‖W‖_F"),
    "weight_change": MeasureText("Weight change", "‖W − W₀‖ / ‖W₀‖"),
    "gradient_norm": MeasureText("Gradient norm", "‖D‖_F / n"),
    "agop_trace": MeasureText("Trace of the AGOP", "tr(WᵀKW)"),
    "kernel_spread": MeasureText("Spread of K's eigenvalues", "standard deviation of K's eigenvalues over their mean"),
    "surrogate_change": MeasureText("Change of the surrogate", "S⁺ − S of a GD step, exact"),
    "surrogate_change_predicted": MeasureText(
        "Change of the surrogate, predicted", "2γ ⟨Yᵀf, YᵀH HᵀE⟩ ([Gram] Theorem 3)"
    ),
    "nc1": MeasureText("NC1, scatter within classes", "tr(Σ_W Σ_B⁺) / C"),
    "nc2_equinorm": MeasureText("NC2, unequal norms", "std ‖μ_c − μ‖ / mean"),
    "nc2_equiangular": MeasureText("NC2, unequal angles", "std of cosines between class means"),
    "nc2_simplex": MeasureText("NC2, distance from a simplex", "mean |cos + 1/(C−1)|"),
    "nc3": MeasureText("NC3, readout against class means", "‖W/‖W‖ − M/‖M‖‖² of readout and class means"),
    "nc4": MeasureText("NC4, nearest-mean agreement", "share of samples where readout and nearest class mean agree"),
    "vcs_null": MeasureText(
        "Virtual against true shift, null",
        "tr v tr s / (d ‖v‖ ‖s‖): vcs_cosine of unrelated eigenvectors",
        "The cosine that shifts with the same eigenvalues and unrelated eigenvectors would have.",
    ),
    "nfa_null": MeasureText(
        "NFA, null",
        "nfa when K keeps its eigenvalues and has random eigenvectors, in expectation",
        "The value of the ansatz to expect without feature learning.",
    ),
    "fact": MeasureText("FACT", "ρ(WᵀW, −WᵀD)"),
    "fact_residual": MeasureText("FACT, residual", "‖WᵀW + WᵀD/(nλ)‖ / ‖WᵀW‖"),
    "crh_inputs_rg": MeasureText("Inputs against gradients", "ρ(HᵀH, WᵀΣW)"),
    "crh_inputs_rw": MeasureText("Inputs against weights", "ρ(HᵀH, WᵀW)"),
    "crh_inputs_gw": MeasureText("Gradients against weights, at the inputs", "ρ(WᵀΣW, WᵀW)"),
    "crh_outputs_rg": MeasureText("Outputs against gradients", "ρ(WHᵀHWᵀ, Σ)"),
    "crh_outputs_rw": MeasureText("Outputs against weights", "ρ(WHᵀHWᵀ, WWᵀ)"),
    "crh_outputs_gw": MeasureText("Gradients against weights, at the outputs", "ρ(Σ, WWᵀ)"),
    "log_alignment": MeasureText("Log-alignment ratio", "1 + ½ log_d[tr(WCWᵀ) / (‖W‖_F² tr C)], C = HᵀH/n"),
    "spectral_weight": MeasureText("Spectral size of W", "‖W‖₂ / √(k/d)"),
    "spectral_change": MeasureText("Spectral size of the change", "‖W − W₀‖₂ / √(k/d)"),
    "gradient_nuclear_rank": MeasureText("Nuclear rank of the gradient", "‖D‖_*² / ‖D‖_F²"),
    "input_stable_rank": MeasureText("Stable rank of the inputs", "‖H‖_F² / ‖H‖₂²"),
    "nfa_depth": MeasureText("NFA, power 1/L", "ρ(WᵀW, (WᵀKW)^(1/L)), L layers from this one to the output"),
    "nfa_fitted": MeasureText("NFA, fitted power", "max_p ρ(WᵀW, (WᵀKW)^p)"),
    "nfa_power": MeasureText("Power of the NFA", "the p of nfa_fitted"),
    "rankme": MeasureText("RankMe", "exp(−Σ p log p), p = s/Σs + 1e-7 over the singular values of H"),
    "alpha_req": MeasureText("α-ReQ", "α of λ_i ∝ i^(−α), eigenvalues of the centred features' covariance"),
    "weight_exponent": MeasureText(
        "Power-law exponent of W", "α of the density λ^(−α) in the tail of WᵀW's eigenvalues"
    ),
    "kernel_target_alignment": MeasureText("Kernel–target alignment", "⟨HHᵀ, YYᵀ⟩ / (‖HHᵀ‖ ‖YYᵀ‖), uncentred"),
    "nrc1": MeasureText("NRC1", "share of H's variance outside its c leading principal directions"),
    "nrc2": MeasureText("NRC2", "share of H's variance outside the row space of W"),
    "nrc3": MeasureText("NRC3", "min_γ ‖WWᵀ/‖WWᵀ‖ − A/‖A‖‖², A = Σ_Y^½ − γ^½ I, at the readout"),
}

_ANSATZ = (
    "nfa", "nfa_null", "nfa_corrupted", "nfa_centered", "nfa_double", "nfa_ptk", "nfa_depth", "nfa_fitted",
)  # fmt: skip

GROUPS: tuple[Group, ...] = (
    Group(
        "target-linearity",
        "Target linearity",
        "How well a linear map of the features H that enter a layer gives the target Y: at 1 the layers below have made "
        "the task linear. β is the least-squares fit.",
        ("target_linearity", "target_linearity_null", "target_linearity_held_out"),
        unit=frozenset({"target_linearity", "target_linearity_null", "target_linearity_held_out"}),
    ),
    Group(
        "surrogate",
        "Surrogate of target linearity",
        "How strongly the features H point along the targets Y; unlike target linearity it keeps their size, and grows "
        "with training and usually with depth. The scale is logarithmic.",
        ("surrogate", "surrogate_linearized", "surrogate_normalized"),
        log=frozenset({"surrogate", "surrogate_linearized"}),
        unit=frozenset({"surrogate_normalized"}),
    ),
    Group(
        "nfa",
        "Neural feature ansatz",
        "How far the weight Gram WᵀW of a layer agrees with the average gradient outer product WᵀKW of the net above it: "
        "ρ is their cosine, and 1 means proportional. Compare it with its null (where measured), the value without feature "
        "learning: at a readout with few outputs both are near 1.",
        (*_ANSATZ, "nfa_power", "double_ratio"),
        unit=frozenset(_ANSATZ),
    ),
    Group(
        "rank",
        "Effective rank",
        "How many directions a layer really uses: of its weights, of the features that enter it, or of its gradient.",
        ("effective_rank", "feature_rank", "stable_rank", "input_stable_rank", "gradient_nuclear_rank", "rankme"),
    ),
    Group(
        "virtual-covariance",
        "Virtual covariance",
        "The virtual covariance shift v, which backpropagation gives for free, compared with the weight Gram and its true "
        "change in one gradient step.",
        ("vcs_cosine", "vcs_null", "vcs_residual", "vcs_gram_cosine", "fle_residual"),
        unit=frozenset({"vcs_cosine", "vcs_null", "vcs_gram_cosine"}),
        log=frozenset({"vcs_residual", "fle_residual"}),
    ),
    Group(
        "weights",
        "Weights and gradients",
        "How large the weights are, how far they have moved, how large gradients are, and whatever else was measured.",
        ("weight_change", "weight_norm", "gradient_norm", "agop_trace", "kernel_spread"),
        log=frozenset({"gradient_norm", "agop_trace"}),
    ),
)

#: measures of neural collapse, shown at the readout
COLLAPSE = ("nc1", "nc2_equinorm", "nc2_equiangular", "nc2_simplex", "nc3", "nc4", "surrogate_normalized")

#: parts of the data on which a net is evaluated
PARTS = {
    "test": "Test",
    "validation": "Validation",
    "train": "Training",
    "batch": "Training batches",
    "monitored": "Monitored sample",
}


def measure_text(measure: str) -> MeasureText:
    """Label and formula of a measure.

    >>> measure_text("my_own").label
    'my own'
    """
    return MEASURES.get(measure, MeasureText(measure.replace("_", " "), ""))


def readable(key: str) -> str:
    """An evaluated key as people say it.

    >>> readable("test_accuracy")
    'test accuracy'
    """
    part, _, what = key.rpartition("_")
    return f"{PARTS.get(part, part).lower()} {what}"
