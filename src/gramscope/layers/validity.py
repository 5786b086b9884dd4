"""Checks that a measurement is meaningful: samples are independent, layers linear, and all of them reached."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, ResultWarning
from gramscope.layers.batches import nested
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import unwrap
from gramscope.notes import Note

if TYPE_CHECKING:
    from gramscope.layers.tape import Tape


def batch_dependence(model: nn.Module) -> str | None:
    """Why a sample's output depends on its batch (batch normalisation in train mode); ``None`` where it does not."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return (
                f"{type(module).__name__} {name!r} is in train mode (or keeps no running statistics), so samples of a "
                "batch depend on each other and per-sample gradients do not exist; measure in eval mode"
            )
    return None


#: change of an output, in units of its rounding error, that is not taken for an influence of other samples
_ROUNDING = 1000.0
#: samples that are run without the others; a prime number, so that groups of equal size are split
_FEW = 7

COUPLED = (
    "samples of a batch influence each other: the outputs of some change with the inputs of others, so Jacobians of single "
    "samples do not exist. If a batch is one object (a graph whose nodes are rows), make it one sample with a wrapper that "
    "adds a batch axis; if the model uses statistics of the batch, give batches of one sample"
)


@torch.no_grad()
def influences_others(run: Callable[[Any], Tensor], inputs: Any, output: Tensor, n: int, batch_dim: int = 0) -> bool:
    """Whether outputs of some samples change with the inputs of others.

    Of a large batch a few samples from either end are run without the others: where their outputs stay as they were, there is
    no influence. Otherwise the first half of the samples is replaced by copies of others, and the outputs of the second half
    must stay as they were; then the same with the halves exchanged, since influence may go one way only. (A model may draw
    random numbers, which depend on the size of the batch, or accept one size alone.)

    Args:
        run: from inputs to the model's output.
        inputs: of one batch, tensors in any nesting; those with n entries along ``batch_dim`` are exchanged.
        output: what ``run`` returned for these inputs, samples along the first axis or ``batch_dim``.
        n: samples.
        batch_dim: axis of the samples.
    """
    half = n // 2
    axis = next((axis for axis in (batch_dim, 0) if output.dim() > axis and output.shape[axis] == n), None)
    if half == 0 or axis is None:
        return False
    output, state = output.detach(), torch.get_rng_state()
    allowed = _ROUNDING * torch.finfo(output.dtype).eps * float(output.abs().max())

    def is_changed(batch: Callable[[Tensor], Tensor], size: int, start: int, place: int, count: int) -> bool | None:
        """Whether outputs of samples from ``start`` on change in a batch that has them from ``place`` on; None on failure."""
        torch.set_rng_state(state)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # checkpoints warn where there are no gradients
                found = run(of_samples(inputs, batch, n, batch_dim))
        except Exception:
            return None  # the model accepts these samples in this order only, such as sequences sorted by length
        if found.dim() != output.dim() or found.shape[axis] != size:
            return None
        before, after = output.narrow(axis, start, count), found.narrow(axis, place, count)
        return None if before.shape != after.shape else float((after - before).abs().max()) > allowed

    if n > 4 * _FEW:
        ends = (0, n - _FEW)
        alone = (
            is_changed(partial(Tensor.narrow, dim=batch_dim, start=i, length=_FEW), _FEW, i, 0, _FEW) for i in ends
        )
        if all(changed is False for changed in alone):
            return False
    for replaced, kept in ((0, half), (n - half, 0)):  # where the replaced and the kept samples begin

        def exchanged(value: Tensor, replaced: int = replaced, kept: int = kept) -> Tensor:
            found = value.clone()
            found.narrow(batch_dim, replaced, half).copy_(value.narrow(batch_dim, kept, half))
            return found

        changed = is_changed(exchanged, n, kept, kept, n - half)
        if changed is not False:
            return bool(changed)
    return False


def of_samples(value: Any, convert: Callable[[Tensor], Tensor], n: int, batch_dim: int) -> Any:
    """Inputs of ``n`` samples, with tensors of all samples converted."""
    if not isinstance(value, Tensor):
        return nested(value, lambda item: of_samples(item, convert, n, batch_dim))
    fits = value.dim() > batch_dim and value.shape[batch_dim] == n and value.layout == torch.strided
    return convert(value) if fits else value


def shares_parameter(layer: Layer, model: nn.Module) -> bool:
    """Whether another module of the model uses the layer's weight too, so that its gradient is not the layer's own."""
    parameter = layer.parameter
    if parameter is None:
        return False
    return sum(any(p is parameter for p in module._parameters.values()) for module in model.modules()) > 1


def check_reference(model: nn.Module, reference: nn.Module) -> None:
    """Raise if the reference network shares a trainable weight with the model: it would change along with it."""
    places = {
        p.untyped_storage().data_ptr(): name
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and not nn.parameter.is_lazy(p) and p.device.type != "meta" and p.numel()
    }
    known = [p for p in unwrap(reference).parameters() if not nn.parameter.is_lazy(p) and p.device.type != "meta"]
    shared = [places[p.untyped_storage().data_ptr()] for p in known if p.untyped_storage().data_ptr() in places]
    if shared:
        raise InputError(
            f"reference shares {len(shared)} trainable parameters with the model ({', '.join(shared[:3])}), so it is not "
            "the network at initialisation; keep copy.deepcopy(model) before training"
        )


@torch.no_grad()
def is_linear_map(layer: Layer, x: Tensor, z: Tensor) -> bool:
    """Whether ``z = W h + b`` holds for the first sample, in the precision of ``z``."""
    kind, module = layer.kind, layer.module
    try:
        h = kind.inputs(module, x.detach())[..., :1, :, :].double()
        found = kind.outputs(module, z.detach())[..., :1, :, :].double()
        bias = getattr(module, "bias", None)
        expected = (h.flatten(-3, -2) @ layer.weight().double().mT).reshape(found.shape)
        if bias is not None:
            expected = expected + bias.detach().double().reshape(layer.groups, 1, 1, -1).squeeze(0)
    except RuntimeError:  # shapes that do not fit
        return False
    tolerance = 200 * max(torch.finfo(z.dtype).eps, torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
    return bool((found - expected).norm() <= tolerance * expected.norm() + 1e-30)


def check_seen(tape: Tape) -> None:
    """After a capture: raise if layers that were asked for (or all of them) were not seen or reached, else note it."""
    if not tape.ran and not tape.applied_layers:
        warnings.warn(
            "nothing was captured: the model did not run inside the block, or it ran inside a compiled function that holds "
            "it; run the module itself",
            ResultWarning,
            stacklevel=4,
        )
    if not tape.ran:
        return
    unseen = [name for name in tape.records if name not in tape.applied_layers]
    known = {name: tape.unsupported[name] for name in unseen if name in tape.unsupported}
    if known and tape.explicit:
        raise LayerError("; ".join(f"layer {name!r} cannot be captured: {why}" for name, why in known.items()))
    if unseen and (tape.explicit or len(unseen) == len(tape.records)):
        raise LayerError(
            f"the model ran but these layers were never applied: {', '.join(unseen)}. Either the forward does not use them, "
            "or it uses their weights without calling the layers"
        )
    for name in unseen:
        tape.unsupported.setdefault(name, Note("not applied", "not reached by the forward"))
    idle = {name: why for name, why in tape.unsupported.items() if why.kind == "no gradient"}
    without = {name: why for name, why in tape.unsupported.items() if why.kind == "no Jacobians"} | idle
    if without and (tape.explicit or len(idle) == len(tape.applied_layers)):
        reasons = "; ".join(f"layer {name!r}: {why}" for name, why in without.items())
        raise LayerError(f"{reasons}; leave it out of layers=")
