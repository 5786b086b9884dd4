"""Sums over samples: what each of them reads of a batch, how it grows, and how two of them become one.

A new statistic is one subclass of :class:`Sum`; docs/howto/extend.md has an example.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError, NumericalError
from gramscope.layers.positions import Positions
from gramscope.layers.record import LayerRecord

if TYPE_CHECKING:
    from gramscope.statistics.batch import BatchResult
    from gramscope.statistics.plan import Plan


class LeftOut(InputError):
    """A sum cannot be formed for a layer; the message says why and becomes a note."""


class NotCollected(InputError):
    """A statistic that a measure needs was not asked for, or was left out."""


@dataclass
class Seen:
    """One layer in one batch, in normal form; of Jacobians, one block of outputs.

    Args:
        layer: its name; ``"<module> (output)"`` for a module's output and ``"(output)"`` for that of the network.
        weight: ``W [..., k, d]``; of outputs an empty tensor.
        batch: the batch after its forward and backward.
        positions: tokens and padding of the batch's sequences.
        record: the layer's inputs and output gradients, from which ``h`` and ``delta`` are taken.
        whole_batch: whether this is the last thing seen of a batch.
        parameter_gradient: the parameter's own gradient, ``[..., k, d]``.
        tied: whether another module uses the same parameter.
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
    batch: BatchResult
    positions: Positions = field(default_factory=Positions)
    record: LayerRecord | None = None
    whole_batch: bool = False
    parameter_gradient: Tensor | None = None
    tied: bool = False
    J: Tensor | None = None
    J_reference: Tensor | None = None
    reference_weight: Tensor | None = None
    first: int = 0
    sketch: int | None = None
    rows: Tensor | None = None
    target: Tensor | None = None
    residual: Tensor | None = None

    @property
    def given(self) -> set[str]:
        """What it holds, in the words of :attr:`Sum.needs`."""
        held = {name for name in ("parameter_gradient", "J", "J_reference", "rows") if getattr(self, name) is not None}
        if self.record is not None:
            held |= {"h", "delta"} if any(a.dz is not None for a in self.record.applications) else {"h"}
        return held | {"batch"} if self.whole_batch else held

    @property
    def h(self) -> Tensor:
        """Inputs ``[..., batch, sites, d]``."""
        assert self.record is not None
        return self.record.h

    @property
    def delta(self) -> Tensor:
        """``δ = ∂L_i/∂z [..., batch, sites, k]``, zero at padding."""
        assert self.record is not None
        return self.positions.without_padding(self.record.delta)


class Sum(ABC):
    """A sum over samples of one layer, of a size that depends on the layer and not on the data.

    ``add`` takes one batch after the other; ``finish`` adds what waits to be added and comes before anything is read.
    ``merge`` is exact: sums of two parts of the data become the sum over both, in any order.

    Args:
        layer: name of the layer.
        weight: ``W [..., k, d]``.
        plan: of the run.
    """

    #: what it reads: ``h``, ``delta``, ``parameter_gradient``, ``J``, ``J_reference``, ``rows`` or ``batch`` of :class:`Seen`
    needs: ClassVar[frozenset[str]]
    #: whether it is undefined where one row of a layer's inputs serves several samples
    of_single_samples: ClassVar[bool] = False

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        self.layer, self.weight = layer, weight

    @abstractmethod
    def add(self, seen: Seen) -> None:
        """Add one batch; raise :class:`LeftOut` where the layer cannot have this sum."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The sum over the samples of both."""

    @classmethod
    @abstractmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        """Bytes that the sum of a weight of this shape takes at most, with ``memory`` bytes allowed."""

    def finish(self) -> None:  # noqa: B027
        """Add what still waits; raise where the sum is not finite."""

    def outline(self) -> Any:
        """What other processes must know of this sum before :meth:`all_reduce`."""
        return None

    @classmethod
    def all_reduce(
        cls, own: Self | None, outlines: Sequence[Any], exchange: Exchange, device: torch.device
    ) -> Self | None:
        """The sum over all processes without sending parts; ``None`` where the parts must be sent and merged in turn.

        Args:
            own: of this process; ``None`` if it has none.
            outlines: of all processes; ``None`` for those that have none.
            exchange: the processes.
            device: where the group's operations work.
        """
        return None

    def to(self, device: torch.device) -> Self:
        """A copy with all its numbers on ``device``; it needs the weight no more."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, value[..., :0, :0] if name == "weight" else _moved(value, device))
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if hasattr(value, "to") else value


def finite(what: str, layer: str, total: Tensor) -> Tensor:
    """The tensor, or an error that names the layer if an entry is NaN or infinite."""
    if not torch.isfinite(total.sum()):
        raise NumericalError(f"{what} of layer {layer!r} is NaN or infinite; look at the inputs and weights there")
    return total


def added(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` of one shape, in the wider precision."""
    if a.shape != b.shape:
        raise InputError(f"cannot merge sums of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a + b.to(a.device)


def reduced(own: Sequence[Tensor], exchange: Exchange, device: torch.device) -> list[Tensor]:
    """Tensors that have one shape in all processes, summed over them."""
    result = []
    for tensor in own:
        total = tensor.to(device, copy=True).contiguous()
        exchange.add(total)
        result.append(total)
    return result
