"""Sums over samples: what a run shows of a batch, how a sum grows, how two become one, and the plan of which are wanted.

A new statistic is one subclass of :class:`Sum`; docs/howto/extend.md has an example.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from gramscope.errors import InputError, Note, NumericalError
from gramscope.layers.batches import Positions, Unpack
from gramscope.layers.kinds import WeightAttribute
from gramscope.layers.labels import IGNORED
from gramscope.layers.losses import ignored_label
from gramscope.layers.model_call import OutputSelector
from gramscope.layers.record import LayerRecord
from gramscope.layers.select import LayerSelector
from gramscope.linalg.budget import Budget

if TYPE_CHECKING:
    from gramscope.statistics.structure import Tokens


#: the name of the network's own output; that of a module is called ``"<module> (output)"``
OUTPUT = "(output)"
#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256
#: random combinations of outputs that it takes above; each costs a backward pass
SKETCH = 4


class LeftOut(InputError):
    """A sum cannot be formed for a layer; the message says why and becomes a note."""


class NotCollected(InputError):
    """A statistic that a measure needs was not asked for, or was left out."""


@dataclass
class BatchResult:
    """A batch after its forward (and backward).

    Args:
        inputs: as the loader gave them.
        target: what features are compared with; ``None`` for none.
        output: the model's output ``[n, …]``, with its graph.
        n: samples.
        positions: tokens and padding of its sequences.
        loss: ``Σ_i L_i``, ``None`` without a loss.
        terms: what the mean loss divides by (:mod:`gramscope.layers.losses`); 0 without a loss.
        residual: ``E = −∂L/∂f``, when asked for.
        parameter_gradients: gradients of the parameters themselves by layer, when asked for.
        order: the layers that ran, also those that are not measured.
    """

    inputs: Any
    target: Any
    output: Tensor
    n: int
    positions: Positions = field(default_factory=Positions)
    loss: float | None = None
    terms: float = 0
    residual: Tensor | None = None
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


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
        at_inputs: whether ``J`` is that of the layer's inputs, ``J W``.
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
    at_inputs: bool = False
    rows: Tensor | None = None
    target: Tensor | None = None
    residual: Tensor | None = None

    @property
    def source(self) -> Tensor | Callable[[], Tensor]:
        """The weight, or the function that reads it."""
        return vars(self)["weight"]  # type: ignore[no-any-return]

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


Seen.weight = WeightAttribute()  # type: ignore[assignment]


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
    #: the argument of :func:`gramscope.collect` that asks for it
    ask: ClassVar[str] = "sums="

    #: W; where it is computed or offloaded it is read again each time
    weight = WeightAttribute()

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


#: stands for every layer in :attr:`Notes.without`
EVERY = "*"


@dataclass
class Notes:
    """Notes on layers and modules, and what is left out for all data because some part of them cannot have it.

    Args:
        found: by layer or module, ``"(output)"`` for the network's output.
        without: pairs of a layer and the name of the sum that it has not.
        layers: those that the run watches.
    """

    found: dict[str, list[Note]] = field(default_factory=dict)
    without: set[tuple[str, str]] = field(default_factory=set)
    layers: list[str] = field(default_factory=list)

    def add(self, name: str, note: Note) -> None:
        """Add a note once."""
        if note not in self.found.setdefault(name, []):
            self.found[name].append(note)

    def remark(self, name: str, text: str) -> None:
        """Add a remark."""
        self.add(name, Note("remark", text))

    def left_out(self, name: str, reason: str) -> None:
        """Note that something is left out."""
        self.add(name.removesuffix(OUTPUT).strip() or name, Note("left out", reason))

    def leave_out(self, name: str, kind: type[Sum], reason: str = "") -> None:
        """Leave a sum out for all data, with a note if there is a reason to tell."""
        self.without.add((name, kind.__name__))
        if reason:
            self.left_out(name, reason)

    def has(self, name: str, kind: str) -> bool:
        """Whether a sum is not left out."""
        return (name, kind) not in self.without and (EVERY, kind) not in self.without


@dataclass(frozen=True)
class Plan:
    """What a run keeps; most fields are arguments of :func:`gramscope.collect`.

    Args:
        sums: the statistics to add up.
        at_inputs: which of them may be kept at the inputs of a layer that has fewer of these than outputs.
        classes: whether the loss takes its targets for classes, so that real ones are centred as labels are.
        snapshot: copy weights and gradients, so that the model may change afterwards.
        estimates: keep products with random probes of matrices that do not fit the budget.
        notes: what was found on the way.
    """

    sums: tuple[type[Sum], ...]
    layers: LayerSelector = None
    outputs: str | Sequence[str] = ()
    channels: str = "auto"
    reduction: str | float | None = None
    output: OutputSelector = None
    unpack: Unpack | None = None
    targets: Callable[[Any, Any], Tensor] | None = None
    tokens: Tokens = "auto"
    ignore_index: int = IGNORED
    gram: bool | str = "auto"
    residuals: bool = False
    jacobians: bool | str = "auto"
    sketch: int | None = None
    generator: torch.Generator | None = None
    budget: Budget = field(default_factory=Budget)
    batch_dim: int = 0
    eval_mode: bool = True
    dtype: torch.dtype = torch.float64
    at_inputs: frozenset[type[Sum]] = frozenset()
    classes: bool = False
    snapshot: bool = True
    estimates: bool = False
    notes: Notes = field(default_factory=Notes)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float64, torch.float32):
            raise InputError(f"dtype={self.dtype}: sums are kept in torch.float64 or torch.float32")
        if self.channels not in ("auto", "first", "last"):
            raise InputError(f"channels={self.channels!r}: give 'auto', 'first' or 'last'")
        for name in ("residuals", "eval_mode"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}: give True or False")
        for name in ("gram", "jacobians"):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) != "auto":
                raise InputError(f"{name}={getattr(self, name)!r}: give True, False or 'auto'")

    def with_arguments(self, arguments: Mapping[str, Any], loss: Any) -> Plan:
        """The plan with the arguments of :func:`gramscope.collect` or ``gs.measure`` that it has fields for."""
        given = {f.name: arguments[f.name] for f in fields(self) if f.name in arguments and f.name != "sums"}
        if given["ignore_index"] is None:
            given["ignore_index"] = ignored_label(loss)
        if given["gram"] == "auto":
            del given["gram"]
        return replace(self, budget=Budget(arguments["memory"]), **given)

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the sums read of :class:`Seen`."""
        return frozenset().union(*(kind.needs for kind in self.sums))

    @cached_property
    def needs_gradients(self) -> bool:
        """Whether the loss must be differentiated."""
        return self.residuals or "delta" in self.needs or "parameter_gradient" in self.needs

    @cached_property
    def needs_graph(self) -> bool:
        """Whether anything must be differentiated."""
        return self.needs_gradients or "J" in self.needs

    def sketch_of(self, output: Tensor) -> int | None:
        """How many random combinations of outputs to take, ``None`` for all outputs."""
        large = self.jacobians == "auto" and output[0].numel() > OUTPUT_LIMIT
        return SKETCH if large and self.sketch is None else self.sketch

    def entry_bytes(self, weight: Tensor) -> int:
        """Bytes of an entry of a k×k sum, and of the product that is added to it."""
        return self.dtype.itemsize + max(weight.dtype.itemsize, 4)

    def is_estimated(self, weight: Tensor) -> bool:
        """Whether products with random probes take the place of this layer's k×k sums."""
        return self.estimates and self.budget.is_large(weight.shape)

    def to_dict(self) -> dict[str, Any]:
        """The options that must agree for statistics to be merged."""
        names = ("gram", "residuals", "sketch", "ignore_index", "batch_dim", "eval_mode")
        return {
            "layers": sorted(self.notes.layers),
            "outputs": [self.outputs] if isinstance(self.outputs, str) else sorted(self.outputs),
            "tokens": "a function" if callable(self.tokens) else self.tokens,
            "sums": sorted(kind.__name__ for kind in self.sums),
            **{name: getattr(self, name) for name in names},
            **({"jacobians": self.jacobians} if "J" in self.needs else {}),
            **({"at_inputs": sorted(kind.__name__ for kind in self.at_inputs)} if self.at_inputs else {}),
            **({"memory": self.budget.memory} if self.estimates else {}),
        }
