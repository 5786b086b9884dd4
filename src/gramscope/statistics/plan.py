"""What one run over the data keeps, and the one list of notes on what it could not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.layers.batches import Unpack
from gramscope.layers.model_call import OutputSelector
from gramscope.layers.select import LayerSelector
from gramscope.linalg.budget import Budget
from gramscope.notes import Note
from gramscope.statistics.features import IGNORED, Tokens
from gramscope.statistics.kernel import OUTPUT_LIMIT, SKETCH, CenteredKernel, Kernel
from gramscope.statistics.sums import Sum

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
        self.add(name.removesuffix("(output)").strip() or name, Note("left out", reason))

    def leave_out(self, name: str, kind: type[Sum], reason: str = "") -> None:
        """Leave a sum out for all data, with a note if there is a reason to tell."""
        self.without.add((name, kind.__name__))
        if reason:
            self.left_out(name, reason)

    def has(self, name: str, kind: type[Sum]) -> bool:
        """Whether a sum is not left out."""
        return self.without.isdisjoint({(name, kind.__name__), (EVERY, kind.__name__)})


@dataclass(frozen=True)
class Plan:
    """What a run keeps; most fields are arguments of :func:`gramscope.collect`.

    Args:
        sums: the statistics to add up.
        at_inputs: which of them may be kept at the inputs of a layer that has fewer of these than outputs.
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

    def wants(self, *given: str) -> bool:
        """Whether some sum reads one of these fields of what is seen."""
        return any(not kind.needs.isdisjoint(given) for kind in self.sums)

    @property
    def needs_gradients(self) -> bool:
        """Whether the loss must be differentiated."""
        return self.wants("delta", "parameter_gradient") or self.residuals

    @property
    def needs_graph(self) -> bool:
        """Whether anything must be differentiated."""
        return self.needs_gradients or self.wants("J")

    def sketch_of(self, output: Tensor) -> int | None:
        """How many random combinations of outputs to take, ``None`` for all outputs."""
        large = self.jacobians == "auto" and output[0].numel() > OUTPUT_LIMIT
        return SKETCH if large and self.sketch is None else self.sketch

    def entry_bytes(self, weight: Tensor) -> int:
        """Bytes of an entry of a k×k sum, and of the product that is added to it."""
        return self.dtype.itemsize + max(weight.dtype.itemsize, 4)

    def is_estimated(self, weight: Tensor) -> bool:
        """Whether products with random probes take the place of this layer's k×k sums."""
        return self.estimates and self.budget.is_large(weight.shape, self.entry_bytes(weight))

    def to_dict(self) -> dict[str, Any]:
        """The options that must agree for statistics to be merged."""
        names = ("gram", "residuals", "sketch", "ignore_index", "batch_dim", "eval_mode")
        return {
            "layers": sorted(self.notes.layers),
            "outputs": [self.outputs] if isinstance(self.outputs, str) else sorted(self.outputs),
            "tokens": "a function" if callable(self.tokens) else self.tokens,
            "sums": sorted(kind.__name__ for kind in self.sums),
            **{name: getattr(self, name) for name in names},
            **({"jacobians": self.jacobians} if Kernel in self.sums or CenteredKernel in self.sums else {}),
            **({"at_inputs": sorted(kind.__name__ for kind in self.at_inputs)} if self.at_inputs else {}),
            **({"memory": self.budget.memory} if self.estimates else {}),
        }
