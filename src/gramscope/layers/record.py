"""What a capture keeps: calls of the model, and of each layer its applications with their views in normal form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gramscope.errors import LayerError
from gramscope.layers.batches import tensors_in
from gramscope.layers.kinds import AttentionProjection, Layer, sum_outer
from gramscope.linalg.arrays import without_autocast
from gramscope.linalg.stochastic import probes

#: why a layer has no D where a derivative is a part of the output or of the loss (force fields, gradient penalties)
DIFFERENTIATED = "no gradients: the model or its loss differentiates through this layer, so D is more than Σ δhᵀ"
#: why a layer has no D where autograd's gradient of the weight is another
OTHER_GRADIENT = (
    "no gradients: D = Σ δhᵀ differs from autograd's gradient of the weight, on the first batch and in such layers by up to "
    "{:.2g} % of its size, so the weight gets gradients another way: a second use, a hook, a function with its own backward, "
    "or activations computed again with other values"
)
#: random signs by which two gradients of a weight are compared
PROBES = 8


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
        self.over = False

    def applied(self, layer: Layer, x: Tensor) -> None:
        """A layer was applied to the native input ``x``."""
        if self.over:
            return
        unbatched = layer.is_unbatched(x)
        (self._ranked if layer.fixed_rank else self._vectors).add(unbatched)
        self._rows.add(layer.samples(x, self._batch_dim))
        if isinstance(layer, AttentionProjection) and not unbatched:
            self._attention[layer.name] = (x.shape[0], x.shape[1], bool(getattr(layer.module, "batch_first", False)))

    def returned(self, output: object) -> None:
        """The model returned ``output``."""
        self._outputs = set(self._sizes(output))
        self.over = True

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


@dataclass(eq=False)
class Application:
    """One application of a layer in one forward: native input ``x`` and native output gradient ``dz``."""

    layer: Layer
    x: Tensor
    z_shape: torch.Size
    z_dtype: torch.dtype
    call: int
    edge: GradientEdge | None = None
    dz: Tensor | None = None
    version: int = -1
    x_edge: GradientEdge | None = None

    @property
    def z_bytes(self) -> int:
        """Bytes of the layer's output in normal form."""
        return self.layer.normal_bytes(self.z_shape.numel() * self.z_dtype.itemsize)

    def zero(self) -> Tensor:
        """A zero gradient of the layer's output, which takes no memory."""
        return torch.zeros((), dtype=self.z_dtype, device=self.x.device).expand(self.z_shape)

    def check_unchanged(self) -> None:
        """Raise if the input was overwritten in place after the layer read it."""
        if self.version >= 0 and self.x._version != self.version:
            raise LayerError(
                f"the input of layer {self.layer.name!r} was modified in place after the layer read it, so what was "
                "captured is gone; overwrite a copy of it (x.clone())"
            )


class LayerRecord:
    """What a capture saw of one layer, in normal form; grouped layers carry a leading ``groups`` axis."""

    def __init__(
        self, layer: Layer, factor: Callable[[int], float], reached: Callable[[int], bool], batch_dim: int = 0
    ) -> None:
        self.layer = layer
        self._batch_dim = batch_dim
        self._factor_of_call = factor
        self._call_was_reached = reached
        self.applications: list[Application] = []
        #: why the layer has no D and no Σ: :data:`DIFFERENTIATED` or :data:`OTHER_GRADIENT`; empty where it has
        self.problem = ""
        self._weight: Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.layer.name

    @property
    def weight(self) -> Tensor:
        """``W [k, d]`` as it was at the layer's first application in this capture (a copy)."""
        if self._weight is None:
            self._weight = self.layer.weight().clone()
        return self._weight

    @property
    def h(self) -> Tensor:
        """Inputs ``[batch, sites, d]``: repeated applications add sites, further forwards add batch rows."""
        return self._joined(self._inputs)

    @property
    def delta(self) -> Tensor:
        """``δ = ∂L_i/∂z`` per sample, ``[batch, sites, k]``, free of the loss's batch reduction.

        Zero for applications that the loss does not reach, where it reaches another one.
        """
        return self._joined(self._delta)

    @property
    def g(self) -> Tensor:
        """``g = Wᵀδ``, the gradient at the layer's input that passes through this layer, ``[batch, sites, d]``."""
        delta = self.delta
        return (delta.flatten(-3, -2) @ self.weight.to(delta.dtype)).reshape(*delta.shape[:-1], -1)

    @property
    def D(self) -> Tensor:
        """``D = Σ_i δ_i h_iᵀ``, the weight gradient of the summed loss, ``[k, d]``."""
        if self.problem:
            raise LayerError(f"layer {self.name!r} has {self.problem}")
        terms = []
        for a in self._seen():
            a.check_unchanged()
            terms.append(self._factor(a) * a.layer.weight_gradient(a.x, self._received(a)))
        return reduce(torch.add, terms)

    @property
    def Sigma(self) -> Tensor:
        """``Σ = Σ_i δ_i δ_iᵀ``, ``[k, k]``."""
        return reduce(torch.add, [sum_outer(delta, delta) for delta in self.deltas()])

    def deltas(self) -> list[Tensor]:
        """``δ`` of each application, ``[batch, sites, k]``, also where they do not join into one tensor."""
        return [self._delta(a) for a in self._seen()]

    def add_gradient(self, total: Tensor) -> None:
        """Add ``D`` to ``total [k, d]`` in place, without forming it where the layer can; unit factor only."""
        for a in self._seen():
            a.check_unchanged()
            a.layer.add_weight_gradient(a.x, self._received(a), total)

    def of_gradient(self, gradient: Tensor) -> Tensor:
        """What is kept of autograd's gradient of the weight: its product with random signs, ``[…, k, PROBES]``."""
        matrix = self.layer.to_matrix(gradient)
        return _times_signs(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))

    def gradient_error(self, kept: Tensor) -> float:
        """How far D is from autograd's gradient, relative to the larger of both; 0 where rounding explains it.

        Args:
            kept: of :meth:`of_gradient`.
        """
        D = _times_signs(self.D).to(kept.dtype) if self.reached else torch.zeros_like(kept)
        error, size = float((kept - D).norm()), float(torch.maximum(kept.norm(), D.norm()))
        known = {kept.device.type} | {a.z_dtype for a in self.applications}
        exact = known <= {"cpu", torch.float32, torch.float64} and self.layer.native_weight().itemsize > 2
        relative, of_terms = (1e-3, 2e-6) if exact else (3e-2, 1e-2)
        if not error > relative * size:
            return 0.0
        seen = [a for a in self.applications if a.dz is not None]
        terms = [a.layer.weight_gradient(a.x.abs(), a.dz.abs()).norm() for a in seen if a.dz is not None]
        return error / size if error > of_terms * PROBES**0.5 * float(sum(terms)) else 0.0  # terms may cancel

    def forget(self) -> None:
        """Drop everything seen."""
        self.applications.clear()
        self._weight = None

    def _inputs(self, a: Application) -> Tensor:
        a.check_unchanged()
        return a.layer.inputs(a.x, self._batch_dim)

    def _delta(self, a: Application) -> Tensor:
        dz = a.layer.outputs(self._received(a), self._batch_dim)
        factor = self._factor(a)
        return dz if factor == 1 else dz * factor

    def _factor(self, a: Application) -> float:
        return self._factor_of_call(a.call)

    def _received(self, a: Application) -> Tensor:
        if a.dz is not None:
            return a.dz
        if self.reached and self._call_was_reached(a.call):
            return a.zero()
        raise LayerError(
            f"no gradient reached layer {self.name!r}: run backward inside the capture, with a loss that depends on it"
        )

    @property
    def reached(self) -> bool:
        """Whether some application has received a gradient."""
        return any(a.dz is not None for a in self.applications)

    def _seen(self) -> list[Application]:
        if not self.applications:
            raise LayerError(f"layer {self.name!r} was not applied in this capture")
        return self.applications

    def _joined(self, normal_form: Callable[[Application], Tensor]) -> Tensor:
        calls: dict[int, list[Tensor]] = {}
        for a in self._seen():
            calls.setdefault(a.call, []).append(normal_form(a))
        try:
            merged = [torch.cat(sites, dim=-2) if len(sites) > 1 else sites[0] for sites in calls.values()]
            return torch.cat(merged, dim=-3) if len(merged) > 1 else merged[0]
        except RuntimeError as error:
            shapes = [tuple(one.shape) for sites in calls.values() for one in sites]
            raise LayerError(
                f"the applications of layer {self.name!r} have shapes {shapes}, which do not join into one "
                "[batch, sites, features]; use .D and .Sigma, or look at .applications"
            ) from error


def _times_signs(matrix: Tensor) -> Tensor:
    with without_autocast(matrix.device):
        return matrix @ probes(matrix.shape[-1], PROBES, matrix)
