"""How many samples one call of a model had."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gramscope.layers.hooks import tensors_in
from gramscope.layers.kinds import AttentionProjectionKind
from gramscope.layers.linear_layer import Layer


class Call:
    """One call of a model and its number of samples.

    Candidates are the sizes of the arguments along ``batch_dim``, in the order of the arguments, and the lengths of lists
    (of images, say). A size of one comes last, since it may be broadcast. The candidate that occurs as the number of rows
    of a layer's input and of the output is taken.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int = 0) -> None:
        self._batch_dim = batch_dim
        lengths = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, list)]
        self._arguments = sorted(self._sizes((args, kwargs)) + lengths, key=lambda size: size == 1)
        self._outputs: set[int] = set()
        self._rows: set[int] = set()
        self._ranked: set[bool] = set()  # whether layers that know the rank of their inputs saw a batch axis
        self._vectors: set[bool] = set()  # whether the others saw single vectors
        self._attention: dict[str, tuple[int, int, bool]] = {}
        self._over = False

    def applied(self, layer: Layer, x: Tensor) -> None:
        """A layer was applied to the native input ``x``."""
        if self._over:
            return
        kind, module = layer.kind, layer.module
        unbatched = kind.is_unbatched(module, x)
        (self._ranked if kind.fixed_rank else self._vectors).add(unbatched)
        self._rows.add(kind.samples(module, x, self._batch_dim))
        if isinstance(kind, AttentionProjectionKind) and not unbatched:
            self._attention[layer.name] = (x.shape[0], x.shape[1], bool(getattr(module, "batch_first", False)))

    def returned(self, output: object) -> None:
        """The model returned ``output``."""
        self._outputs = set(self._sizes(output))
        self._over = True

    @property
    def arguments(self) -> bool:
        """Whether there was a tensor, or a list, that may hold samples."""
        return bool(self._arguments) or self._unbatched

    @property
    def samples(self) -> int:
        """The most likely number of samples; 0 if there was no tensor."""
        if self._unbatched:
            return 1
        return max(self._arguments, key=self._known, default=0)

    @property
    def doubt(self) -> str | None:
        """Why the number of samples is uncertain; ``None`` if it is not."""
        n = self.samples
        if self._unbatched:
            return None
        if not self.arguments:
            return "the model was called with no tensor that has a batch axis"
        if n == 0:
            return None  # an empty batch
        across = self.across_samples
        if across:
            return next(iter(across.values()))
        if self._known(n) or not any(rows % n for rows in self._rows):  # tokens as rows
            return None
        inputs, rows = (", ".join(map(str, sorted(sizes))) for sizes in (set(self._arguments), self._rows))
        return f"the model's inputs have {inputs} rows and its layers saw {rows}"

    @property
    def across_samples(self) -> dict[str, str]:
        """Attention layers whose sequences run along the axis taken for the batch, each with an explanation.

        Attention in windows (``samples × windows`` sequences) does not count, unless the module has the batch second.
        """
        n = self.samples
        return {
            name: f"attention layer {name!r} saw {batch} sequences of {length} positions where the batch has {n} samples: "
            "a sequence-first model needs batch_dim=1; where samples attend to each other none has gradients of its own"
            for name, (batch, length, batch_first) in self._attention.items()
            if length == n != batch and (not batch_first or batch % n)
        }

    @property
    def _unbatched(self) -> bool:
        """Whether this was one sample without a batch axis.

        Convolutions and attention show it by the rank of their inputs; a model of linear layers by inputs that are vectors.
        """
        seen = self._ranked or self._vectors
        return bool(seen) and all(seen)

    def _known(self, size: int) -> int:
        return (size in self._rows) + (size in self._outputs)

    def _sizes(self, values: object) -> list[int]:
        return [t.shape[self._batch_dim] for t in tensors_in(values) if t.dim() > self._batch_dim]
