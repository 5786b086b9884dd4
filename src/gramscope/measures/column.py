"""What a column of a table is, and what its function may read: statistics, spectra, and the matrices of a layer.

Each matrix comes in the representation that its size and its statistics allow (:mod:`gramscope.linalg.gram`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from gramscope.linalg.arrays import common_part, row_norm, to_double
from gramscope.linalg.budget import FEWEST, Budget
from gramscope.linalg.gram import Dense, Estimated, Factor, Factored, Gram, correlation, cosine
from gramscope.linalg.measured import Measured, combine
from gramscope.linalg.psd import psd_power
from gramscope.linalg.ridge import clear_factor
from gramscope.linalg.stochastic import onto_columns, probes
from gramscope.measures.spectrum import Spectrum, large_weight_spectrum, weight_spectrum
from gramscope.statistics.features import Features
from gramscope.statistics.matrix_sums import CenteredKernel, Covariance, Kernel, SquareSum
from gramscope.statistics.result import LayerStatistics, Statistics
from gramscope.statistics.sums import NotCollected, Sum

T = TypeVar("T")
OneSum = TypeVar("OneSum", bound=Sum)


#: why measures of all eigenvalues of K have no answer for a large layer
NO_KERNEL = (
    "K itself does not fit memory=, and products with random probes do not give all of its eigenvalues and eigenvectors"
)


class Missing(Exception):
    """The column has no answer for this layer; the message says why."""


def features_of(layer: LayerStatistics) -> Features:
    """A layer's sums of features."""
    if layer.features is None:
        raise NotCollected("no feature rows could be paired with targets here")
    return layer.features


@dataclass(frozen=True)
class Context:
    """What the columns of a table share: the statistics of all layers, and the arguments of :func:`gramscope.measure`."""

    statistics: Statistics
    gamma: float = 0.05
    ridge: float = 0.0
    intercept: bool = False
    center: bool = False
    reference_weights: dict[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
    held_out: Statistics | None = None
    corruption_seed: int = 0
    nearest_mean: Callable[[LayerStatistics], float] | None = None
    weight_decay: float | None = None
    budget: Budget = field(default_factory=Budget)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All layers that ran, in order of execution, also those that are not measured."""
        return self.statistics.order or tuple(self.statistics.layers)


@dataclass(frozen=True)
class LayerView:
    """One layer as its columns see it.

    Args:
        layer: its statistics.
        context: what all layers share.
    """

    layer: LayerStatistics
    context: Context
    _cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, kind: type[OneSum]) -> OneSum:
        return self.layer[kind]

    def once(self, key: str, make: Callable[[], T]) -> T:
        """``make()``, computed once for all columns of this layer."""
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    @property
    def reference_weight(self) -> Tensor:
        """``W₀``, the weight of the reference network, in its own dtype.

        Rows that the reference lacks (of tokens added since) are those of ``W``: they have not moved.
        """
        W, W0, common = self.layer.weight, *self.once("W₀", self._read_reference)
        if W0.shape == W.shape:
            return W0
        filled = W.to(W0.dtype, copy=True)
        filled[common] = W0[common]
        return filled

    @property
    def both_weights(self) -> tuple[Tensor, Tensor]:
        """``W`` and ``W₀``, the entries that both have."""
        W0, common = self.once("W₀", self._read_reference)
        return self.layer.weight[common], W0[common]

    def _read_reference(self) -> tuple[Tensor, tuple[slice, ...]]:
        source = self.context.reference_weights.get(self.layer.name)
        if source is None:
            given = self.context.reference_weights
            raise Missing(
                "the reference network has no layer of this name" if given else "no reference network was given"
            )
        W = self.layer.weight
        W0 = (source if isinstance(source, Tensor) else source()).to(W.device)
        common = common_part(W, W0)
        if common is None:
            raise Missing(f"the reference network's weight has shape {tuple(W0.shape)} in place of {tuple(W.shape)}")
        return W0, common

    @property
    def is_readout(self) -> bool:
        """Whether this layer is the one executed last."""
        return self.layer.name == self.context.order[-1]

    @property
    def depth_above(self) -> int:
        """How many layers there are from this one to the output."""
        return len(self.context.order) - self.context.order.index(self.layer.name)

    def spectrum(self, symbol: str, make: Callable[[], Tensor]) -> Spectrum:
        """The spectrum of a matrix of the weight's shape, estimated where its decomposition does not fit the budget.

        Args:
            symbol: of the matrix, under which its spectrum is kept for other columns.
            make: gives the matrix.
        """
        side, stacked = min(self.layer.weight.shape[-2:]), self.layer.weight.dim() > 2
        exact = stacked or self.context.budget.decomposes(side)
        return self.once(
            f"spectrum of {symbol}",
            lambda: weight_spectrum(make()) if exact else large_weight_spectrum(make(), min(16, side)),
        )


#: what the function of a column may return
Value: TypeAlias = Measured | Tensor | float


@dataclass(frozen=True)
class Column:
    """One column of a table: everything that tables, reports and documentation say of it.

    Args:
        name: as users write it in ``measures=``.
        group: the family it belongs to, one of ``GROUPS``.
        summary: what it tells, in one plain line.
        formula: how it is computed.
        compute: its value at a layer; raises :class:`Missing` where it has none.
        needs: what must have been collected: ``loss``, ``covariance``, ``features``, ``gram``, ``jacobians``, ``reference``, …
        null: the column to read it against, whose value it has without any learning.
        of_features: whether it reads features alone, so that outputs of any module have it too.
        at_inputs: whether ``WᵀΣW`` and ``WᵀKW`` are enough for it in place of Σ and K.
        sums: further sums that it reads, ``view[MySum]``.
    """

    name: str
    group: str
    summary: str
    formula: str
    compute: Callable[[LayerView], Value] = field(repr=False)
    needs: AbstractSet[str] = frozenset()
    null: str | None = None
    of_features: bool = False
    at_inputs: bool = False
    sums: tuple[type[Sum], ...] = ()


def sketched(layer: LayerStatistics) -> str:
    """A remark on functions of all eigenvalues of K, where K is a sketch."""
    if layer[Kernel].numbers.shape[0] == 1:
        return ""
    return "from a sketch of K, whose eigenvalues are spread wider than those of K; jacobians=True takes every output"


#: families of columns
GROUPS = {
    "weights": "Size of the weights and how far they have moved",
    "gradient": "Size of the gradient, and the Feature Learning Equation",
    "virtual": "The virtual covariance shift of a gradient step",
    "alignment": "The neural feature ansatz: weight Grams against average gradient outer products",
    "linearity": "How linear the targets are in the features, and surrogates of it",
    "collapse": "Neural collapse",
    "spectra": "How many directions weights, features and gradients use",
    "later": "Hypotheses and ratios of later papers",
}

Side = Literal["inputs", "outputs"]


class LayerGrams:
    """Weight Gram, gradients, features and tangent kernel of a layer as :class:`~gramscope.linalg.gram.Gram`.

    Args:
        layer: its statistics.
        budget: what may be formed; larger layers are estimated from random probes.
    """

    def __init__(self, layer: LayerStatistics, budget: Budget) -> None:
        self.layer = layer
        self.budget = budget
        probed = any(isinstance(total, SquareSum) and total.estimated for total in layer.sums.values())
        self.large = probed or budget.is_large(layer.weight.shape)

    @cached_property
    def factor(self) -> Factor:
        """W."""
        return Factor(self.layer.weight)

    def of(self, left: Factor, right: Factor | None = None, core: Tensor | None = None) -> Gram:
        """``AᵀKB`` as the layer's size allows."""
        return self._fit(Factored.of(left, right, core))

    @cached_property
    def weight(self) -> Gram:
        """``WᵀW``."""
        return self.of(self.factor)

    # --- a gradient step ----------------------------------------------------------------------------------------------

    @cached_property
    def gradient(self) -> Factor:
        """D."""
        return Factor(self.layer.gradient)

    @cached_property
    def mixed(self) -> Gram:
        """``WᵀD + DᵀW``."""
        half = Factored.of(self.factor, self.gradient)
        return self._fit(half + half.mT)

    @cached_property
    def gradient_gram(self) -> Gram:
        """``DᵀD``."""
        return self.of(self.gradient)

    @cached_property
    def covariance(self) -> Gram:
        """``WᵀΣW``."""
        gram = self.layer[Covariance].gram(self.factor)
        return self._fit(gram) if isinstance(gram, Factored) else gram

    def step(self, gamma: float) -> tuple[Gram, Gram]:
        """The virtual covariance shift ``v`` and the change of ``WᵀW`` in a step of rate γ."""
        first = self.mixed * -gamma
        return first + self.covariance * gamma**2, first + self.gradient_gram * gamma**2

    # --- both ends of the layer ---------------------------------------------------------------------------------------

    def weights(self, side: Side) -> Gram:
        """``WᵀW``, or at the outputs ``WWᵀ``."""
        return self.weight if side == "inputs" else self._fit(Factored.of(Factor(self.layer.weight.mT)), side)

    def gradients(self, side: Side) -> Gram:
        """``WᵀΣW``, or at the outputs Σ."""
        if side == "inputs":
            return self.covariance
        if self.layer[Covariance].estimated:
            raise Missing("Σ does not fit memory=; of it only ΣWΩ is kept, which tells of the layer's inputs")
        return self._fit(Dense(self.layer.covariance[None]), side)

    def features(self, side: Side) -> Gram:
        """``HᵀH``, or of the outputs ``W HᵀH Wᵀ``."""
        rows, inner = self._features()
        if rows is None:
            return self._fit(
                Dense(inner) if side == "inputs" else Factored.of(Factor(self.layer.weight.mT), K=inner), side
            )
        return self._fit(Factored.of(rows if side == "inputs" else Factor(rows.times(self.layer.weight.mT))), side)

    def exact_features(self) -> Gram:
        """``HᵀH``, never estimated."""
        rows, inner = self._features()
        return Dense(inner) if rows is None else Factored.of(rows)

    def _features(self) -> tuple[Factor | None, Tensor]:
        """H where its rows are kept, else ``HᵀH``, of grouped layers by group."""
        part, weight = features_of(self.layer), self.layer.weight
        if part.of_outputs:
            raise Missing("its inputs are one-hot vectors, whose HᵀH is not collected")
        groups, d = weight.shape[:-2].numel(), weight.shape[-1]
        if part.rows is not None:
            rows = part.rows.reshape(len(part.rows), groups, d).movedim(1, 0)
            return Factor(rows if weight.dim() > 2 else rows[0]), weight
        if part.joint.C_hh is None:
            raise Missing(f"HᵀH was not collected: d = {groups * d} is large; ask with gram=True")
        blocks = part.joint.HtH.reshape(groups, d, groups, d).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        return None, blocks[None] if weight.dim() > 2 else blocks

    # --- the tangent kernel -------------------------------------------------------------------------------------------

    @cached_property
    def ansatz(self) -> Ansatz:
        """``WᵀW`` and ``WᵀKW``."""
        layer = self.layer
        K = layer[Kernel]
        if K.estimated:
            return estimated_ansatz(layer.weight, self._probed(K, 0))
        return exact_ansatz(self.factor, K.parts / layer.n, K.at_inputs)

    def moved_ansatz(self, W0: Tensor, kind: Literal["centered", "double", "ptk"]) -> Ansatz:
        """The same of ``W − W₀`` and K, of ``W − W₀`` and K̄, or of ``W₀`` and K̄."""
        layer = self.layer
        side = W0 if kind == "ptk" else layer.weight - W0
        K = layer[Kernel if kind == "centered" else CenteredKernel]
        if K.estimated:
            return estimated_ansatz(side, self._probed(K, 0 if kind == "double" else 1))
        return exact_ansatz(Factor(to_double(side)), K.parts / layer.n)

    def _probed(self, K: Kernel, place: int) -> Tensor:
        """Of a kernel's products with the thin matrices of two weights, side by side, those of one."""
        sides = 2 if CenteredKernel in self.layer.sums else 1
        return K.numbers.chunk(sides, -1)[place] / self.layer.n

    def _fit(self, gram: Dense | Factored, side: Side = "inputs") -> Gram:
        if not self.large:
            return gram.small() if isinstance(gram, Factored) else gram
        return Estimated.from_gram(gram, self._omega(side))

    def _omega(self, side: Side = "inputs") -> Tensor:
        """Random signs at one end of the layer; at its inputs those that the statistics were collected with."""
        length = self.layer.weight.shape[-1 if side == "inputs" else -2]
        return probes(length, self.budget.probes(length), self.layer.weight)


def grams_of(view: LayerView) -> LayerGrams:
    """The matrices of a layer, formed once for all its columns."""
    return view.once("grams", lambda: LayerGrams(view.layer, view.context.budget))


@dataclass(frozen=True)
class Ansatz:
    """What the ansatz ``WᵀW ∝ WᵀKW`` and its null need.

    Args:
        weight: ``WᵀW``.
        agop: ``WᵀKW``.
        kernel: K on the column space of W.
        trace_square: ``(tr WᵀW)²``, summed over groups.
        rows: of K on the column space: ``min(k, d)`` in each group.
    """

    weight: Gram
    agop: Gram
    kernel: Gram
    trace_square: float
    rows: int

    def value(self, center: bool = False) -> Measured:
        """``ρ(WᵀW, WᵀKW)``."""
        return cosine(self.weight, self.agop, center)

    def null(self, center: bool = False) -> Measured:
        """The same when K keeps its eigenvalues and its eigenvectors are uniformly random ([NFA] Figure 1, corrupted).

        The expectations of both sides are exact: for a random symmetric Q of m×m with those eigenvalues,
        ``E[Q_ij Q_pq] = a δ_ij δ_pq + b (δ_ip δ_jq + δ_iq δ_jp)``.
        """
        m, groups, entries, weight = self.rows, self.weight.shape[:-2].numel(), self.weight.entries, self.weight

        def formula(size: Tensor, trace: Tensor, square: Tensor, total: Tensor) -> Tensor:
            t1, t2 = trace / groups, square / groups
            b = (t2 - t1.square() / m).clamp(min=0.0) / max((m - 1) * (m + 2), 1)
            a = t1.square() / m**2 - 2 * b / m
            expected = (a + b) * size + b * self.trace_square - 2 * b * (1 - 1 / m) * total.square() / entries
            return correlation(entries, t1 / m * size, size, expected, total, t1 / m * total)

        kernel, total = self.kernel, weight.total() if center else 0.0
        return combine(formula, weight.inner(weight), kernel.trace(), kernel.inner(kernel), total)


def exact_ansatz(W: Factor, parts: Tensor, at_inputs: bool = False) -> Ansatz:
    """The ansatz of a weight ``[..., k, d]``.

    Args:
        W: the weight.
        parts: ``[parts, ..., k, k]`` that add up to K, or ``[parts, ..., d, d]`` that add up to ``WᵀKW``.
        at_inputs: which of the two.

    >>> W = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> ansatz = exact_ansatz(Factor(W), torch.eye(2, dtype=torch.float64)[None])
    >>> float(ansatz.value()), float(ansatz.null())   # K is a multiple of the identity
    (1.0, 1.0)
    """
    k, d = W.rows.shape[-2:]
    weight, parts = Factored.of(W).small(), to_double(parts)
    agop = Dense(parts) if at_inputs else Factored.of(W, W, parts).small()
    kernel = Dense(parts)
    if isinstance(weight, Dense) and isinstance(agop, Dense) and k > d:
        kernel = Dense(_on_column_space(weight.dense(), agop.parts))
    return Ansatz(weight, agop, kernel, _trace_square(W.rows), min(k, d))


def _on_column_space(gram: Tensor, agop: Tensor) -> Tensor:
    """K on the column space of W from ``WᵀW`` and ``WᵀKW``, in some orthonormal basis: ``L⁻¹ WᵀKW L⁻ᵀ`` with ``LLᵀ = WᵀW``."""
    factor = clear_factor(gram, 0.0) if gram.dim() == 2 else None
    if factor is None:
        half = psd_power(gram, -0.5)
        return half @ agop @ half
    R, scale = factor
    once: Tensor = torch.linalg.solve_triangular(R.mT, agop / torch.outer(scale, scale), upper=False)
    twice: Tensor = torch.linalg.solve_triangular(R, once, upper=True, left=False)
    return twice


def estimated_ansatz(W: Tensor, products: Tensor) -> Ansatz:
    """The ansatz of a large weight ``[..., k, d]``, from K times the thin matrices of :func:`thin_of_kernel`.

    Args:
        W: in any floating dtype.
        products: ``[parts, ..., k, r + 1 + 64]`` that add up to ``K [WΩ, W1, Ψ]``.
    """
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    k, d = W.shape[-2:]
    r = products.shape[-1] - 1 - FEWEST
    factor, omega, psi = Factor(W), probes(d, r, W), probes(k, FEWEST, W)
    outer = factor.transposed_times(to_double(products[..., : r + 1]))
    of_outputs = products[..., r + 1 :]
    if k > d:
        of_outputs = onto_columns(W, of_outputs.to(W.dtype))
    weight = Estimated.from_gram(Factored.of(factor), omega)
    agop = Estimated(outer[..., :r], omega, outer[..., r:])
    return Ansatz(weight, agop, Estimated(of_outputs, psi), _trace_square(W), min(k, d))


def _trace_square(W: Tensor) -> float:
    return float(torch.stack([row_norm(block) for block in W.reshape(-1, *W.shape[-2:])]).pow(4).sum())
