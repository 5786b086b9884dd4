"""What a capture keeps of one layer, and its views in normal form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gramscope.errors import LayerError
from gramscope.layers.linear_layer import Layer, sum_outer


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
