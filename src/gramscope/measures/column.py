"""What a column of a table is, and what its function may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from gramscope.measures.estimate import Estimate
from gramscope.measures.linearity import IterativeResult
from gramscope.statistics.layer import LayerStatistics
from gramscope.statistics.result import Statistics

Part = TypeVar("Part")


class Missing(Exception):
    """The measure has no answer for this layer; the message says why."""


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
    #: the fits of all layers with neither rows nor HᵀH, by name
    iterative_fits: Callable[[], dict[str, IterativeResult]] | None = None
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
