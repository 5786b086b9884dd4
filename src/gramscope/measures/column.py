"""What a column of a table is, and what its function may read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from gramscope.linalg.moments import ClassMoments
from gramscope.measures.estimate import Estimate
from gramscope.measures.large_spectrum import LargeSpectrum, large_weight_spectrum
from gramscope.measures.linearity import IterativeResult
from gramscope.statistics.layer import LayerStatistics
from gramscope.statistics.result import Statistics

Part = TypeVar("Part")


#: why measures of all eigenvalues of K have no answer for a large layer
NO_KERNEL = (
    "K itself does not fit memory=, and products with random probes do not give all of its eigenvalues and eigenvectors"
)


class Missing(Exception):
    """The measure has no answer for this layer; the message says why."""


class Readings(Protocol):
    """What further readings of the data tell of layers with neither rows nor ``HᵀH``, by name of the layer."""

    def fits(self) -> Mapping[str, IterativeResult]:
        """Linear fits of the targets."""

    def class_moments(self) -> Mapping[str, ClassMoments]:
        """Class moments in the span of the centred class means, with the scatter within classes."""

    def held_out_spreads(self) -> Mapping[str, Tensor]:
        """``‖Hβ‖²`` of the centred held-out features and both coefficients of the fits, ``[2]``."""


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
    #: what further readings of the data tell of layers with neither rows nor HᵀH
    readings: Readings | None = None
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

    def large_spectrum(self, layer: LayerStatistics, what: str, make: Callable[[], Tensor]) -> LargeSpectrum | None:
        """The estimated spectrum of a layer's matrix, where its decomposition does not fit the budget.

        Args:
            layer: the layer.
            what: name of the matrix, under which its spectrum is kept for other measures.
            make: gives the matrix, of the weight's shape.
        """
        side = min(layer.weight.shape[-2:])
        if layer.weight.dim() > 2 or 24 * side**2 <= self.memory:  # three matrices in float64
            return None
        return self.once(layer, f"spectrum of {what}", lambda: large_weight_spectrum(make(), min(16, side)))


@dataclass(frozen=True)
class Measure:
    """A named column: what it needs (``loss``, ``features``, ``gram``, ``jacobians``, ``reference``, …) and its formula."""

    compute: Callable[[Context, LayerStatistics], Estimate]
    needs: frozenset[str]
    formula: str


#: a function of context and layer
Column: TypeAlias = Callable[[Context, LayerStatistics], Tensor | float | Estimate]

#: the function of a column, what must have been collected, and its formula
Entry: TypeAlias = tuple[Column, str, str]
