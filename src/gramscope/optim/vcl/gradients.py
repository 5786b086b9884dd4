"""The gradients of one layer since the last step, as few rows of inputs and output gradients where possible.

A step uses the reduction's factor times ``parameter.grad`` as it is at that moment: scaled by clipping, unscaled by
GradScaler, summed over micro-batches. Where D = Σ δhᵀ is a sum over fewer samples than outputs, the samples' h and δ are kept
as well, because they make the step cheaper. A product with one fixed random vector, the probe, checks whether ``.grad`` is
still a multiple of that sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import LayerError
from gramscope.layers.linear_layer import Layer
from gramscope.optim.lowrank import column_space
from gramscope.optim.vcl.rules import Batch
from gramscope.optim.weight_matrix import WeightMatrix


@dataclass(frozen=True)
class Gradients:
    """A batch, and the relative distance of ``.grad`` from any multiple of it, None where the batch is ``.grad`` itself."""

    batch: Batch
    distance: Tensor | None = None


@dataclass(frozen=True)
class _Part:
    """The gradient of one application of the layer.

    Attributes:
        task: autograd's number of the backward pass.
        factor: that makes it a sum over samples.
        rows, left: inputs ``[…, b, d]`` and output gradients ``[…, b, k]``, kept while they are few.
        sigma: ``Σ δδᵀ``, where the γ² term is wanted.
        summed: ``Σ δhᵀ``, where no rows are kept and the factor differs from the first one.
        count: how many rows the gradient is a sum over.
        rough: computed in half precision.
    """

    task: int
    factor: float
    count: int
    rows: Tensor | None
    left: Tensor | None
    sigma: Tensor | None
    summed: Tensor | None
    rough: bool


@dataclass(frozen=True)
class Reduced:
    """What several processes know together of one matrix (:mod:`gramscope.optim.vcl.processes`).

    Attributes:
        factor: that makes the average of ``.grad`` over processes a sum over all samples.
        response: the product of that average with the probe, as backward passes left it.
        sigma: ``Σ δδᵀ`` of all samples, where the γ² term is wanted.
        correction: what ``factor`` leaves out where micro-batches have other factors.
        count: the gradient is a sum over at most this many rows.
    """

    factor: float
    count: int
    response: Tensor
    sigma: Tensor | None
    correction: Tensor | None


class Gatherer:
    """Collects the gradients of one weight matrix.

    Args:
        weight: the matrix.
        rows: whether to keep inputs and output gradients while they are few.
        sigma: whether ``Σ δδᵀ`` is wanted.
        dtype: of the results.
    """

    def __init__(self, weight: WeightMatrix, *, rows: bool, sigma: bool, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype
        self._want_rows = rows
        self._want_sigma = sigma
        self._pending: list[_Part] = []
        self._parts: list[_Part] = []
        self._factor: float | None = None  # of the first part
        self._probe: Tensor | None = None
        self._response: Tensor | None = None
        self._grad: Callable[[], Tensor | None] = lambda: None
        self._version = 0
        #: whether several processes average ``.grad`` among them
        self.averaged = False
        self.reduced: Reduced | None = None

    def clear(self) -> None:
        """Forget everything; gradients start anew."""
        self._pending, self._parts = [], []
        self.reduced = None
        self._factor = self._response = None
        self._grad = lambda: None

    @property
    def seen(self) -> bool:
        """Whether some application of the layer has received a gradient."""
        return bool(self._parts or self._pending)

    @property
    def idle(self) -> bool:
        """Whether no gradient reaches the weight, as that of an expert without tokens."""
        grad = self.weight.gradient()
        return grad is None or (not self._parts and not bool(grad.any()))

    @torch.no_grad()
    def receive(self, layer: Layer, x: Tensor, dz: Tensor, factor: float) -> None:
        """Take in the gradient of one application's output."""
        self._forget_if_zeroed()
        if self.averaged and self.weight.parameter.grad is None:
            self._parts = []
        if self._factor is None:
            self._factor = factor
        rough = dz.dtype in (torch.bfloat16, torch.float16)
        delta = layer.kind.outputs(layer.module, dz).flatten(-3, -2).to(self.dtype)
        kept = sum(part.left.shape[-2] for part in (*self._parts, *self._pending) if part.left is not None)
        few = self._want_rows and not self.averaged and 0 < delta.shape[-2] <= delta.shape[-1] - kept
        self._pending.append(
            _Part(
                task=int(torch._C._current_graph_task_id()),
                factor=factor,
                count=delta.shape[-2],
                rows=self.weight.rows(layer, x).to(self.dtype) if few else None,
                left=delta if few else None,
                sigma=delta.mT @ delta if self._want_sigma else None,
                summed=None if few or factor == self._factor else self.weight.summed(layer, x, dz).to(self.dtype),
                rough=rough or torch.is_autocast_enabled(dz.device.type),
            )
        )

    @torch.no_grad()
    def accumulated(self) -> None:
        """Take over the parts of the backward pass that has just added to ``.grad``, and remember ``.grad``."""
        grad = self.weight.parameter.grad
        gradient = self.weight.gradient()
        if grad is None or gradient is None:
            return
        # a new tensor: the gradient had been set to None, unless DistributedDataParallel put one of its own there
        if self._grad() is not grad and not self.averaged:
            self._parts = []
        task = int(torch._C._current_graph_task_id())
        self._parts += [part for part in self._pending if part.task == task]
        self._pending = []
        self._grad, self._version = weakref.ref(grad), grad._version
        self._response = self._probed(gradient)

    def _forget_if_zeroed(self) -> None:
        """Start anew where ``.grad`` was set to zero in place; its values are read only where its version changed."""
        grad = self._grad()
        if grad is not None and grad._version != self._version:
            self._version = grad._version
            if not bool(grad.any()):
                self.clear()

    def gradients(self, dense: bool) -> Gradients:
        """The summed gradient of everything since the last clear.

        Where its distance exceeds :attr:`tolerance` (noise or penalties were added, elements were clipped), ask again with
        ``dense=True``.

        Args:
            dense: return ``.grad`` itself, not the kept rows.

        Raises:
            LayerError: there is no gradient, or it did not come through the layer.
        """
        name, grad = self.weight.name, self.weight.gradient()
        if self.reduced is not None and grad is not None:
            return self._of_all_processes(grad.to(self.dtype), self.reduced, dense)
        if grad is None:
            raise LayerError(
                f"VCL layer {name!r} has no gradient: run backward() of a loss that depends on it before step(), or leave "
                "the layer out of layers="
            )
        if self._response is None or not self._parts:
            raise LayerError(
                f"VCL layer {name!r} has a gradient but was not seen in a forward pass. VCL must be made before the model "
                "runs (under torch.compile: before its first call), the layer must be called, or its weight used "
                "by F.linear, a product or a convolution, and gradients must come from backward(). Or leave it out of layers="
            )
        grad = grad.to(self.dtype)
        now = self._probed(grad)
        scale = self._scale(now, self._response)
        sigma = self.sigma()
        sigma = None if sigma is None else sigma * scale**2
        if not dense and all(part.rows is not None for part in self._parts):
            return self._factored(now, scale, sigma)
        usual = self._factor if self._factor is not None else 1.0
        D, correction = usual * grad, self.correction(usual)
        return Gradients(Batch(D if correction is None else D + scale * correction, None, sigma))

    def _of_all_processes(self, grad: Tensor, reduced: Reduced, dense: bool) -> Gradients:
        """The summed gradient of all processes, from the average that ``.grad`` is.

        Inputs and output gradients stay in their processes. Where they are few, D has low rank, and factors of it take their
        place.
        """
        scale = self._scale(self._probed(grad), reduced.response)
        sigma = None if reduced.sigma is None else reduced.sigma * scale**2
        D = reduced.factor * grad
        if reduced.correction is not None:
            D = D + scale * reduced.correction
        if dense or not self._want_rows or not 0 < reduced.count < D.shape[-2]:
            return Gradients(Batch(D, None, sigma))
        Q = column_space(D, reduced.count)
        expected = self._probed(D)
        found = (Q @ (Q.mT @ expected.unsqueeze(-1))).squeeze(-1)
        return Gradients(Batch(Q.mT @ D, Q.mT, sigma), relative_distance(found, expected))

    def sigma(self) -> Tensor | None:
        """``Σ δδᵀ`` of the samples seen here, before clipping; None where it is not wanted."""
        if not self._want_sigma:
            return None
        k = self.weight.shape[-2]
        found = [part.factor**2 * part.sigma for part in self._parts if part.sigma is not None]
        nothing = torch.zeros(*self.weight.shape[:-2], k, k, dtype=self.dtype, device=self.weight.parameter.device)
        return sum(found[1:], found[0]) if found else nothing

    def correction(self, usual: float) -> Tensor | None:
        """``Σ (factor − usual) δhᵀ`` over parts with another factor, before clipping; None where there are none."""
        odd = [(part.factor - usual) * self._own_sum(part) for part in self._parts if part.factor != usual]
        return sum(odd[1:], odd[0]) if odd else None

    @property
    def count(self) -> int:
        """How many rows the gradient seen here is a sum over."""
        return sum(part.count for part in self._parts)

    @property
    def factors(self) -> list[float]:
        """The factors of the parts, in their order."""
        return [part.factor for part in self._parts]

    def responses(self) -> tuple[Tensor, Tensor]:
        """The products of ``.grad`` with the probe, as backward passes left it and as it is now; zero without a gradient."""
        grad = self.weight.gradient()
        like = self.weight.parameter
        nothing = torch.zeros(self.weight.shape[:-1], dtype=self.dtype, device=like.device)
        then = self._response if self._response is not None and self._parts else nothing
        return then, nothing if grad is None else self._probed(grad)

    @property
    def tolerance(self) -> float:
        """The largest distance of :meth:`gradients` that rounding explains."""
        if any(part.rough for part in self._parts):
            return 0.05
        return 1e4 * max(torch.finfo(dtype).eps for dtype in (self.dtype, self.weight.parameter.dtype))

    def _factored(self, now: Tensor, scale: Tensor, sigma: Tensor | None) -> Gradients:
        pairs = [(part.rows, part.left, part.factor) for part in self._parts]
        rows = _joined([r for r, _, _ in pairs if r is not None])
        left = _joined([l for _, l, _ in pairs if l is not None])
        expected = scale * (left.mT @ (rows @ self.probe(now)).unsqueeze(-1)).squeeze(-1)
        weight = scale * pairs[0][2]
        if len({f for _, _, f in pairs}) > 1:
            weight = scale * torch.cat([l.new_full((l.shape[-2], 1), f) for _, l, f in pairs if l is not None])
        return Gradients(Batch(rows, left * weight, sigma), relative_distance(expected, now))

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
            probe = torch.randn(self.weight.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self._probe = probe.to(like.device, self.dtype)
        return self._probe

    @staticmethod
    def _scale(now: Tensor, then: Tensor) -> Tensor:
        """The factor by which clipping or unscaling multiplied ``.grad`` since backward, by least squares."""
        return (now * then).sum() / then.square().sum().clamp_min(torch.finfo(then.dtype).tiny)


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """``‖a − b‖/‖b‖``, zero where both vanish."""
    size: Tensor = torch.linalg.vector_norm(b).clamp_min(torch.finfo(b.dtype).tiny)
    distance: Tensor = torch.linalg.vector_norm(a - b)
    return distance / size


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
