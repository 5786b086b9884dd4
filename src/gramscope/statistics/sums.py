"""Sums over samples: what each of them reads of a batch, how it grows, and how two of them become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from gramscope.layers.positions import Positions
from gramscope.layers.record import LayerRecord


@dataclass
class Seen:
    """One layer in one batch, in normal form; of Jacobians, one block of outputs.

    Args:
        layer: its name.
        weight: ``W [..., k, d]``.
        samples: of the batch.
        positions: tokens and padding of the batch's sequences.
        record: the layer's inputs and output gradients, where gradients are added.
        J: ``∂f/∂z`` of a block of outputs (or of random combinations of them), ``[m, ..., batch, sites, k]``, padding zero.
        J_reference: the same of the reference network.
        reference_weight: ``W₀`` of the reference network.
        first: number of the block's first output.
        sketch: how many random combinations of outputs there are in all; ``None`` for the outputs themselves.
        rows: feature rows ``[n, d]``.
        target: their labels or values, ``None`` for none.
        residual: ``E = −∂L/∂f`` where rows are samples.
    """

    layer: str
    weight: Tensor
    samples: int
    positions: Positions = field(default_factory=Positions)
    record: LayerRecord | None = None
    J: Tensor | None = None
    J_reference: Tensor | None = None
    reference_weight: Tensor | None = None
    first: int = 0
    sketch: int | None = None
    rows: Tensor | None = None
    target: Tensor | None = None
    residual: Tensor | None = None


class Sum(ABC):
    """A sum over samples of one layer, of a size that depends on the layer and not on the data.

    ``add`` takes one batch after the other; ``finish`` adds what waits to be added and must come before anything is read.
    ``merge`` is exact: sums of two parts of the data become the sum over both, in any order.
    """

    #: fields of :class:`Seen` that it reads
    needs: ClassVar[frozenset[str]]

    @abstractmethod
    def add(self, seen: Seen) -> None:
        """Add one batch."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The sum over the samples of both."""

    def finish(self) -> Self:
        """This sum, with all added that still waits."""
        return self

    @classmethod
    @abstractmethod
    def size(cls, shape: torch.Size, memory: int) -> int:
        """Bytes that the sum of a weight of this shape takes under a budget of ``memory`` bytes."""
