"""Every measure of a layer that follows from collected statistics, by name: the columns of :func:`gramscope.measure`.

A column says what must have been collected and computes one number from a :class:`~gramscope.measures.column.LayerView`.
To add one, write its formula and add a :class:`~gramscope.measures.column.Column` to a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError, no_such
from gramscope.linalg.arrays import row_norm, to_double
from gramscope.linalg.gram import Dense, Factor, Gram, cosine
from gramscope.linalg.measured import Measured
from gramscope.measures.alignment import corrupted, nfa
from gramscope.measures.column import GROUPS, NO_KERNEL, Ansatz, Column, LayerView, Missing, Value, grams_of, sketched
from gramscope.measures.feature_columns import FEATURE_COLUMNS
from gramscope.measures.later_columns import LATER_COLUMNS
from gramscope.measures.spectrum import Spectrum
from gramscope.statistics.matrix_sums import CenteredKernel, Kernel

# --- weights ----------------------------------------------------------------------------------------------------------


def _spectrum(view: LayerView) -> Spectrum:
    return view.spectrum("W", lambda: view.layer.weight)


def _weight_change(view: LayerView) -> Tensor | float:
    W, W0 = view.both_weights
    return row_norm(W, W0) / row_norm(W0)


# --- gradients and virtual covariance ---------------------------------------------------------------------------------


def _step(view: LayerView) -> tuple[Gram, Gram]:
    """The virtual covariance shift and the change of ``WᵀW`` in a step.

    ``gamma`` is the rate of a step on the mean loss; on the summed loss the same step has rate ``gamma / n``, n the terms of
    the mean: samples, or labelled positions.
    """
    return view.once("step", lambda: grams_of(view).step(view.context.gamma / view.layer.loss_terms))


def _vcs_cosine(view: LayerView) -> Measured:
    return cosine(*_step(view))


def _vcs_residual(view: LayerView) -> Measured:
    grams, rate = grams_of(view), view.context.gamma / view.layer.loss_terms
    return (grams.gradient_gram - grams.covariance).norm() * rate**2 / _step(view)[1].norm()


def _vcs_null(view: LayerView) -> Measured:
    virtual, actual = _step(view)
    columns = virtual.shape[:-1].numel()
    return virtual.trace() * actual.trace() / (virtual.norm() * actual.norm() * columns)


def _fle(view: LayerView) -> Value:
    layer, grams = view.layer, grams_of(view)
    if layer.autograd is None or layer.tied:
        raise Missing(
            "its weight is not a trainable parameter of this layer alone: it is computed, frozen or shared with another module"
        )
    difference = layer.autograd - layer.gradient
    if not bool(difference.any()):
        return 0.0
    return grams.of(grams.factor, Factor(difference)).norm() / grams.of(grams.factor, grams.gradient).norm()


# --- alignment --------------------------------------------------------------------------------------------------------


#: where the null of an alignment reaches this, its value says little
TRIVIAL = 0.9


def _nfa(view: LayerView) -> Measured:
    return view.once("nfa", lambda: _beside_null(grams_of(view).ansatz, _nfa_null(view), view.context.center))


def _beside_null(ansatz: Ansatz, null: float, center: bool) -> Measured:
    """The alignment, with a remark where random eigenvectors of the kernel would give almost as much."""
    value, remarks = ansatz.value(center), []
    if null >= TRIVIAL:
        remarks.append(f"trivial: random eigenvectors of K would give ρ ≥ {TRIVIAL} too")
    if value > 1 and value.error:
        remarks.append("above 1 by chance: it estimates a number that is at most 1")
    return value.with_remark(*remarks)


def _nfa_null(view: LayerView) -> Measured:
    return view.once("nfa_null", lambda: grams_of(view).ansatz.null(view.context.center))


def _nfa_above(view: LayerView) -> Measured:
    return _nfa(view) - _nfa_null(view)


def _moved(view: LayerView, kind: Literal["centered", "double", "ptk"]) -> Ansatz:
    W0, layer = view.reference_weight, view.layer
    if kind != "ptk" and torch.equal(layer.weight, W0):
        raise Missing("the weight has not moved from the reference")
    if kind != "centered" and not layer[CenteredKernel].any():
        raise Missing("the Jacobians have not moved from the reference")
    return view.once(f"ansatz {kind}", lambda: grams_of(view).moved_ansatz(W0, kind))


def _nfa_moved(kind: Literal["centered", "double", "ptk"]) -> Callable[[LayerView], Value]:
    def compute(view: LayerView) -> Measured:
        ansatz, center = _moved(view, kind), view.context.center
        return _beside_null(ansatz, ansatz.null(center), center)

    return compute


def _double_ratio(view: LayerView) -> Measured:
    whole = _moved(view, "centered")
    moved = view.once("ansatz double", lambda: grams_of(view).moved_ansatz(view.reference_weight, "double"))
    return moved.weight.inner(moved.agop) / whole.weight.inner(whole.agop)


def _nfa_corrupted(view: LayerView) -> Measured:
    if view.layer[Kernel].estimated:
        raise Missing(f"{NO_KERNEL}; nfa_null has its expectation")
    generator = torch.Generator(device="cpu").manual_seed(view.context.corruption_seed)
    W = to_double(view.layer.weight).cpu()
    return nfa(W, corrupted(to_double(view.layer.K).cpu(), generator), center=view.context.center).with_remark(
        sketched(view.layer)
    )


def _agop_trace(view: LayerView) -> Measured:
    return grams_of(view).ansatz.agop.trace()


def _kernel_spread(view: LayerView) -> Measured:
    layer = view.layer
    if not layer[Kernel].estimated:
        kernel: Gram = Dense(layer[Kernel].parts)
    elif layer.weight.shape[-2] > layer.weight.shape[-1]:
        raise Missing(f"{NO_KERNEL}; probes of more outputs than inputs tell of the part of K in the column space of W")
    else:
        kernel = grams_of(view).ansatz.kernel
    rows = kernel.shape[:-1].numel()
    return (kernel.inner(kernel) * rows / kernel.trace() ** 2 - 1).at_least(0.0) ** 0.5


OWN_COLUMNS = [
    Column("weight_norm", "weights", "how large the weights are", "‖W‖_F", lambda view: row_norm(view.layer.weight)),
    Column("effective_rank", "spectra", "how many directions the weight uses, by the entropy of its singular values",
           "exp(−Σ p log p), p = s/Σs over the singular values of W", lambda view: _spectrum(view).effective_rank),
    Column("stable_rank", "spectra", "how many directions the weight uses, by its largest singular value",
           "‖W‖_F² / ‖W‖₂²", lambda view: _spectrum(view).stable_rank),
    Column("gradient_norm", "gradient", "how large the gradient of the mean loss is",
           "‖D‖_F / n", lambda view: row_norm(view.layer.gradient) / view.layer.loss_terms, {"loss"}),
    Column("fle_residual", "gradient", "whether the Feature Learning Equation holds: 0 up to rounding",
           "‖Wᵀ∇_W L − Σ g hᵀ‖ / ‖Σ g hᵀ‖ with the parameter's own gradient", _fle, {"loss", "autograd"}),
    Column("vcs_cosine", "virtual", "cosine of the virtual covariance shift and a step's change of WᵀW",
           "ρ(v, Gram shift of a GD step)", _vcs_cosine, {"loss", "covariance"}, null="vcs_null", at_inputs=True),
    Column("vcs_residual", "virtual", "how much of a step's change of WᵀW the virtual shift misses",
           "‖γ²(DᵀD − WᵀΣW)‖ / ‖Gram shift‖", _vcs_residual, {"loss", "covariance"}, at_inputs=True),
    Column("vcs_gram_cosine", "virtual", "whether the virtual covariance shift scales WᵀW or turns it",
           "ρ(v, WᵀW)", lambda view: cosine(_step(view)[0], grams_of(view).weight), {"loss", "covariance"}, at_inputs=True),
    Column("vcs_null", "virtual", "the vcs_cosine to expect of unrelated eigenvectors",
           "tr v tr s / (d ‖v‖ ‖s‖): vcs_cosine of unrelated eigenvectors", _vcs_null, {"loss", "covariance"}, at_inputs=True),
    Column("nfa", "alignment", "cosine of WᵀW and the average gradient outer product (AGOP)",
           "ρ(WᵀW, WᵀKW)", _nfa, {"jacobians"}, null="nfa_null", at_inputs=True),
    Column("nfa_null", "alignment", "the nfa to expect without feature learning",
           "nfa when K keeps its eigenvalues and has random eigenvectors, in expectation",
           _nfa_null, {"jacobians"}, at_inputs=True),
    Column("nfa_above", "alignment", "how far the nfa is above what random eigenvectors of K would give",
           "nfa − nfa_null", _nfa_above, {"jacobians"}, at_inputs=True),
    Column("nfa_corrupted", "alignment", "the nfa with one draw of random eigenvectors of K",
           "ρ(WᵀW, WᵀQW), Q with K's spectrum and random eigenvectors", _nfa_corrupted, {"jacobians"}),
    Column("agop_trace", "alignment", "how strongly the output depends on the layer's inputs",
           "tr(WᵀKW)", _agop_trace, {"jacobians"}, at_inputs=True),
    Column("kernel_spread", "alignment", "how unequal the eigenvalues of K are: at 0 any weight has nfa 1",
           "standard deviation of K's eigenvalues over their mean", _kernel_spread, {"jacobians"}),
    Column("weight_change", "weights", "how far the weight has moved from the reference",
           "‖W − W₀‖ / ‖W₀‖", _weight_change, {"reference"}),
    Column("nfa_centered", "alignment", "the ansatz for the change of the weight",
           "ρ(W̄ᵀW̄, W̄ᵀKW̄), W̄ = W − W₀", _nfa_moved("centered"), {"jacobians", "reference"}),
    Column("nfa_double", "alignment", "the ansatz for the changes of weight and Jacobians",
           "ρ(W̄ᵀW̄, W̄ᵀK̄W̄)", _nfa_moved("double"), {"jacobians", "reference_jacobians", "reference"}),
    Column("nfa_ptk", "alignment", "the ansatz for the initial weight and the change of the Jacobians",
           "ρ(W₀ᵀW₀, W₀ᵀK̄W₀)", _nfa_moved("ptk"), {"jacobians", "reference_jacobians", "reference"}),
    Column("double_ratio", "alignment", "the share of nfa_centered that needs both to have moved",
           "tr(W̄ᵀW̄ W̄ᵀK̄W̄) / tr(W̄ᵀW̄ W̄ᵀKW̄)", _double_ratio, {"jacobians", "reference_jacobians", "reference"}),
]  # fmt: skip

#: every column by name, in the order in which tables show them
COLUMNS: dict[str, Column] = {column.name: column for column in (*OWN_COLUMNS, *FEATURE_COLUMNS, *LATER_COLUMNS)}

#: what a layer has learned, for any supervised network; used when no measures are named and the data allow them
DEFAULT = (
    "gradient_norm", "effective_rank", "feature_rank", "nfa", "nfa_null", "nfa_above", "target_linearity",
    "target_linearity_null", "target_linearity_held_out", "nc1", "weight_change",
)  # fmt: skip
#: the argument of ``gs.measure`` that gives what a column needs, where it is not there with every model and its data
ARGUMENTS = {
    "loss": "loss", "covariance": "loss", "autograd": "loss", "residuals": "loss", "reference": "reference",
    "reference_jacobians": "reference", "held_out": "held_out",
}  # fmt: skip


def columns_of(measures: str | Column | Iterable[str | Column] | None, given: AbstractSet[str]) -> list[Column]:
    """The columns to compute: those named; of a group, of all, or of the usual ones, those that ``given`` allows.

    >>> [column.name for column in columns_of(["nfa", "weights"], {"jacobians"})]
    ['nfa', 'weight_norm', 'spectral_weight']
    """
    usual = measures is None
    chosen = DEFAULT if measures is None else [measures] if isinstance(measures, str | Column) else list(measures)
    found: dict[str, Column] = {}
    for one in chosen:
        column = one if isinstance(one, Column) else COLUMNS.get(one)
        group = [column] if column else [c for c in COLUMNS.values() if one in (c.group, "all")]
        if not group:
            raise InputError(no_such("measure", str(one), [*COLUMNS, *GROUPS, "all"]))
        allowed = [c for c in group if c.needs <= given]
        if not allowed and not usual:
            raise InputError(f"measure {group[0].name!r} needs {' and '.join(_arguments(group[0].needs - given))}")
        found |= {c.name: c for c in allowed}
    if not found:
        raise InputError("measures=[] names nothing to measure")
    return list(found.values())


def _arguments(needs: AbstractSet[str]) -> list[str]:
    return list(dict.fromkeys(f"{ARGUMENTS.get(need, need)}=" for need in sorted(needs)))


class Listing(tuple[Column, ...]):
    """Columns, with one line each as text."""

    def __str__(self) -> str:
        lines = []
        for group, summary in GROUPS.items():
            columns = [column for column in self if column.group == group]
            size = max((len(column.name) for column in columns), default=0)
            lines += [f"{group}: {summary}"] if columns else []
            for column in columns:
                needs = ", ".join(_arguments({need for need in column.needs if need in ARGUMENTS}))
                star = "*" if column.name in DEFAULT else " "
                lines.append(f" {star}{column.name.ljust(size)}  {column.summary}{f' ({needs})' if needs else ''}")
        return "\n".join([*lines, "* shown unless measures= names others, by name or group"])

    __repr__ = __str__


def measures(*names: str) -> Listing:
    """The columns that ``gs.measure`` can show, by group; all, or those of some groups or names.

    >>> print(measures("weights"))
    weights: Size of the weights and how far they have moved
      weight_norm      how large the weights are
     *weight_change    how far the weight has moved from the reference (reference=)
      spectral_weight  largest singular value of the weight, on a scale free of the width
      spectral_change  largest singular value of the weight's change, on that scale (reference=)
    * shown unless measures= names others, by name or group
    """
    return Listing(columns_of(names or "all", frozenset().union(*(column.needs for column in COLUMNS.values()))))
