"""What a column of a table is, and what its function may read."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from gramscope.linalg.budget import Budget
from gramscope.linalg.measured import Measured
from gramscope.measures.spectrum import Spectrum, large_weight_spectrum, weight_spectrum
from gramscope.statistics.matrix_sums import Kernel
from gramscope.statistics.result import LayerStatistics, Statistics
from gramscope.statistics.sums import Sum

T = TypeVar("T")
OneSum = TypeVar("OneSum", bound=Sum)


#: why measures of all eigenvalues of K have no answer for a large layer
NO_KERNEL = (
    "K itself does not fit memory=, and products with random probes do not give all of its eigenvalues and eigenvectors"
)


class Missing(Exception):
    """The column has no answer for this layer; the message says why."""


@dataclass(frozen=True)
class Context:
    """What the columns of a table share: the statistics of all layers, and the arguments of :func:`gramscope.measure`."""

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
        """``W₀``, the weight of the reference network, in its own dtype."""
        if self.layer.name not in self.context.reference_weights:
            raise Missing("no reference network was given")
        return self.context.reference_weights[self.layer.name].to(self.layer.weight.device)

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

    def __call__(self, view: LayerView) -> Measured:
        """The column's value at a layer."""
        value = self.compute(view)
        return value if isinstance(value, Measured) else Measured(float(value))


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
