"""``gs.estimate``: the memory of a measurement, before it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from gramscope.errors import checks_names
from gramscope.instruments.measure import given_by, plan_of
from gramscope.layers.losses import Loss
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.linalg.budget import MEMORY, Budget
from gramscope.measures.column import Column
from gramscope.measures.columns import columns_of


@dataclass(frozen=True)
class Estimate:
    """Bytes at most, beside the model, the data, and the activations of one batch.

    Args:
        sums: what is kept of each layer until its row of the table is computed, ``{layer: {sum: bytes}}``, for targets of up
            to 64 columns or classes.
        evaluation: whole matrices of one layer while its row is computed.
        chunk: Jacobians of a block of outputs, 0 without.
    """

    sums: dict[str, dict[str, int]]
    evaluation: int
    chunk: int

    @property
    def total(self) -> int:
        """The peak: all sums, and the larger of what collecting and evaluating take beside them."""
        return sum(sum(layer.values()) for layer in self.sums.values()) + max(self.evaluation, self.chunk)

    def __str__(self) -> str:
        layers = [f"{name}: {_mebibytes(sum(kept.values()))}" for name, kept in self.sums.items()]
        rest = f"one layer's matrices {_mebibytes(self.evaluation)}, Jacobians {_mebibytes(self.chunk)}"
        return "\n".join([*layers, rest, f"in all {_mebibytes(self.total)}"])


@checks_names
def estimate(
    model: nn.Module,
    loss: Loss | None = None,
    *,
    measures: str | Column | Iterable[str | Column] | None = None,
    layers: LayerSelector = None,
    memory: int = MEMORY,
) -> Estimate:
    """How much memory :func:`gramscope.measure` takes at most, from the sizes of the sums that the measures need.

    Args:
        model, loss, measures, layers, memory: as in :func:`gramscope.measure`; no data are read.

    >>> import torch, gramscope as gs
    >>> gs.estimate(torch.nn.Linear(3, 2), measures=["nfa"]).sums
    {'(model)': {'Kernel': 32}}
    """
    given = given_by(model, loss) | {"reference", "held_out"}
    plan = plan_of(columns_of(measures, given))
    shapes = {layer.name: tuple(layer.weight().shape) for layer in select_layers(model, layers)}
    sums = {name: {kind.__name__: kind.size(shape, memory) for kind in plan.sums} for name, shape in shapes.items()}
    budget = Budget(memory)
    dense = [
        min(8 * math.prod(shape), memory) if budget.is_large(shape) else 8 * math.prod(shape)
        for shape in shapes.values()
    ]
    largest = max((sum(sums[name].values()) + extra for name, extra in zip(sums, dense, strict=True)), default=0)
    return Estimate(sums, largest, memory if "J" in plan.needs else 0)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
