"""The warm-up of [VCL] §3: the last layer is trained alone before virtual covariance learning begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.errors import InputError
from gramscope.layers.batches import batches, to_device
from gramscope.layers.model_call import call_model, model_device, select_output
from gramscope.layers.modules import unwrap


def warm_up(
    model: nn.Module,
    readout: Optimizer,
    chosen: Sequence[nn.Parameter],
    loader: Iterable[Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    unpack: Callable[[Any], tuple[Any, Any]] | None,
) -> list[float]:
    """Train ``chosen`` alone by ``readout``; see :meth:`gramscope.optim.vcl.optimizer.VCL.warm_up`."""
    if epochs < 1:
        raise InputError(f"epochs={epochs}: a warm-up takes at least one epoch")
    device = model_device(model)
    means = []
    with _only(model, chosen):
        for _ in range(epochs):
            total, count = 0.0, 0
            for inputs, target in batches(loader, unpack):
                inputs, target = to_device(inputs, device), to_device(target, device)
                readout.zero_grad()
                value = loss(select_output(call_model(model, inputs, synchronise=True)), target)
                value.backward()  # type: ignore[no-untyped-call]
                readout.step()
                total, count = total + float(value.detach()), count + 1
            means.append(total / count)
    readout.zero_grad()
    return means


@contextmanager
def _only(model: nn.Module, chosen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this only ``chosen`` requires gradients, and other gradients are forgotten."""
    kept = {id(p) for p in chosen}
    others = [p for p in unwrap(model).parameters() if id(p) not in kept]
    paused = [p for p in others if p.requires_grad]
    try:
        for parameter in others:
            parameter.grad = None
        for parameter in paused:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in paused:
            parameter.requires_grad_(True)
