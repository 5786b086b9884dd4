"""What backward brings to one layer: inputs and output gradients since the last step, checked against ``.grad``.

What a step sees is always the factor of the loss's reduction times ``parameter.grad`` as it is at that moment: scaled by
clipping, unscaled by GradScaler, summed over micro-batches. Keeping the inputs as well only makes it cheaper: D = Σ δhᵀ
has few rows of h behind it. Whether ``.grad`` still is a multiple of that sum is checked on one fixed random vector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import LayerError
from gramscope.layers.linear_layer import Layer
from gramscope.optim.vcl_rules import Batch
from gramscope.optim.vcl_targets import Target


@dataclass(frozen=True)
class _Part:
    """One layer application's share: rows and left are kept while few, ``summed`` where the factor is not the usual one."""

    task: int
    factor: float
    rows: Tensor | None
    left: Tensor | None
    sigma: Tensor | None
    summed: Tensor | None
    rough: bool


class Gatherer:
    """Collects for one target; :meth:`batch` hands it over."""

    def __init__(self, target: Target, *, rows: bool, sigma: bool, dtype: torch.dtype) -> None:
        self.target = target
        self.dtype = dtype
        self._want_rows = rows
        self._want_sigma = sigma
        self._pending: list[_Part] = []
        self._parts: list[_Part] = []
        self._usual: float | None = None
        self._probe: Tensor | None = None
        self._response: Tensor | None = None
        self._grad: Callable[[], Tensor | None] = lambda: None
        self._version = 0

    def clear(self) -> None:
        """Forget everything; gradients start anew."""
        self._pending, self._parts = [], []
        self._usual = self._response = None
        self._grad = lambda: None

    @property
    def seen(self) -> bool:
        """Whether some application of the layer has received a gradient."""
        return bool(self._parts or self._pending)

    @torch.no_grad()
    def receive(self, layer: Layer, x: Tensor, dz: Tensor, factor: float) -> None:
        """Take in the gradient of one application's output."""
        self._forget_if_zeroed()
        if self._usual is None:
            self._usual = factor
        rough = dz.dtype in (torch.bfloat16, torch.float16)
        delta = layer.kind.outputs(layer.module, dz).flatten(-3, -2).to(self.dtype)
        kept = sum(part.left.shape[-2] for part in (*self._parts, *self._pending) if part.left is not None)
        few = self._want_rows and 0 < delta.shape[-2] <= delta.shape[-1] - kept
        self._pending.append(
            _Part(
                task=int(torch._C._current_graph_task_id()),
                factor=factor,
                rows=self.target.rows(layer, x).to(self.dtype) if few else None,
                left=delta if few else None,
                sigma=delta.mT @ delta if self._want_sigma else None,
                summed=None if few or factor == self._usual else self.target.summed(layer, x, dz).to(self.dtype),
                rough=rough or torch.is_autocast_enabled(dz.device.type),
            )
        )

    @torch.no_grad()
    def accumulated(self) -> None:
        """``.grad`` has just been added to: settle what this backward brought, and remember what ``.grad`` was."""
        grad = self.target.parameter.grad
        gradient = self.target.gradient()
        if grad is None or gradient is None:
            return
        if self._grad() is not grad:  # a new tensor: gradients had been set to None
            self._parts = []
        task = int(torch._C._current_graph_task_id())
        self._parts += [part for part in self._pending if part.task == task]
        self._pending = []
        self._grad, self._version = weakref.ref(grad), grad._version
        self._response = self._probed(gradient)

    def _forget_if_zeroed(self) -> None:
        """Gradients that were set to zero in place start anew; only a ``.grad`` that was changed is looked at."""
        grad = self._grad()
        if grad is not None and grad._version != self._version:
            self._version = grad._version
            if not bool(grad.any()):
                self.clear()

    def batch(self, dense: bool) -> tuple[Batch, Tensor | None]:
        """The summed gradient of everything since the last clear, and how far it is from ``.grad``.

        Args:
            dense: take the rows of ``.grad`` itself.

        Returns:
            The batch, and the relative distance of ``.grad`` from any multiple of what the kept rows give, None where
            ``.grad`` itself is used. Above :attr:`tolerance` (noise or penalties were added, elements clipped) ask again
            with ``dense=True``.
        """
        name, grad = self.target.name, self.target.gradient()
        if grad is None:
            raise LayerError(
                f"VCL layer {name!r} has no gradient: run backward() of a loss that depends on it before step(), or leave "
                "the layer out of layers="
            )
        if self._response is None or not self._parts:
            raise LayerError(
                f"VCL layer {name!r} has a gradient but was not seen in a forward pass. VCL must be made before the model "
                "runs (under torch.compile: before its first call), its layers must be called rather than their weights "
                "used directly, and gradients must come from backward()"
            )
        grad = grad.to(self.dtype)
        now = self._probed(grad)
        scale = self._scale(now, self._response)
        sigma = None
        if self._want_sigma:
            sigma = sum(part.factor**2 * part.sigma for part in self._parts if part.sigma is not None) * scale**2
        if not dense and all(part.rows is not None for part in self._parts):
            return self._factored(now, scale, sigma)
        usual = self._usual if self._usual is not None else 1.0
        D = usual * grad
        for part in self._parts:
            if part.factor != usual:
                D = D + (part.factor - usual) * scale * self._own_sum(part)
        return Batch(D, None, sigma), None

    @property
    def tolerance(self) -> float:
        """What rounding explains of the distance that :meth:`batch` returns."""
        if any(part.rough for part in self._parts):
            return 0.05
        return 1e4 * max(torch.finfo(dtype).eps for dtype in (self.dtype, self.target.parameter.dtype))

    def _factored(self, now: Tensor, scale: Tensor, sigma: Tensor | None) -> tuple[Batch, Tensor]:
        pairs = [(part.rows, part.left, part.factor) for part in self._parts]
        rows = _joined([r for r, _, _ in pairs if r is not None])
        left = _joined([l for _, l, _ in pairs if l is not None])
        expected = scale * (left.mT @ (rows @ self.probe(now)).unsqueeze(-1)).squeeze(-1)
        weight = scale * pairs[0][2]
        if len({f for _, _, f in pairs}) > 1:
            weight = scale * torch.cat([l.new_full((l.shape[-2], 1), f) for _, l, f in pairs if l is not None])
        return Batch(rows, left * weight, sigma), relative_distance(expected, now)

    def _own_sum(self, part: _Part) -> Tensor:
        """``Σ δhᵀ`` of one part, unscaled."""
        if part.summed is not None:
            return part.summed
        assert part.left is not None
        assert part.rows is not None
        return part.left.mT @ part.rows

    def _probed(self, gradient: Tensor) -> Tensor:
        """``gradient @ probe``, ``[…, k]``."""
        return gradient.to(self.dtype) @ self.probe(gradient)

    def probe(self, like: Tensor) -> Tensor:
        """A fixed random vector ``[d]`` on the device of ``like``."""
        if self._probe is None or self._probe.device != like.device:
            d = self.target.read().shape[-1]
            probe = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self._probe = probe.to(like.device, self.dtype)
        return self._probe

    @staticmethod
    def _scale(now: Tensor, then: Tensor) -> Tensor:
        """By what ``.grad`` was multiplied since backward (least squares): clipping, unscaling."""
        return (now * then).sum() / then.square().sum().clamp_min(torch.finfo(then.dtype).tiny)


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """``‖a − b‖/‖b‖``, zero where both vanish."""
    size: Tensor = torch.linalg.vector_norm(b).clamp_min(torch.finfo(b.dtype).tiny)
    distance: Tensor = torch.linalg.vector_norm(a - b)
    return distance / size


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
