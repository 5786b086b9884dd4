"""The warm-up of [VCL] §3: the last layer is trained alone before virtual covariance learning begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.batches import batches, to_device
from gramscope.layers.model_call import call_model, model_device, select_output
from gramscope.layers.modules import unwrap

if TYPE_CHECKING:
    from gramscope.optim.vcl.optimizer import VCL


def warm_up(
    optimizer: VCL,
    loader: Iterable[Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    unpack: Callable[[Any], tuple[Any, Any]] | None,
) -> list[float]:
    """See :meth:`gramscope.optim.vcl.optimizer.VCL.warm_up`."""
    if epochs < 1:
        raise InputError(f"epochs={epochs}: a warm-up takes at least one epoch")
    readout = optimizer.readout
    assert readout is not None
    model = optimizer.model
    device = model_device(model)
    chosen: list[nn.Parameter] | None = None
    means = []
    for _ in range(epochs):
        total, count = 0.0, 0
        for inputs, target in batches(loader, unpack):
            inputs, target = to_device(inputs, device), to_device(target, device)
            optimizer.zero_grad()
            if chosen is None:  # the first forward pass shows which layer runs last
                value = loss(select_output(call_model(model, inputs, synchronise=True)), target)
                value.backward()  # type: ignore[no-untyped-call]
                chosen = optimizer.warm_up_parameters()
                _forget_others(model, chosen)
            else:
                with _only(model, chosen):
                    value = loss(select_output(call_model(model, inputs, synchronise=True)), target)
                    value.backward()  # type: ignore[no-untyped-call]
            readout.step()
            total, count = total + float(value.detach()), count + 1
        means.append(total / count)
    optimizer.zero_grad()
    return means


def _forget_others(model: nn.Module, chosen: Sequence[nn.Parameter]) -> None:
    kept = {id(p) for p in chosen}
    for parameter in unwrap(model).parameters():
        if id(parameter) not in kept:
            parameter.grad = None


@contextmanager
def _only(model: nn.Module, chosen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this only ``chosen`` requires gradients."""
    kept = {id(p) for p in chosen}
    paused = [p for p in unwrap(model).parameters() if p.requires_grad and id(p) not in kept]
    try:
        for parameter in paused:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in paused:
            parameter.requires_grad_(True)
