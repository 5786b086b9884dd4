"""Checks that a measurement is meaningful: samples are independent, layers linear, and all of them reached."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, ResultWarning
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


COUPLED = (
    "samples of a batch influence each other: the outputs of some change with the inputs of others, so Jacobians of single "
    "samples do not exist. If a batch is one object (a graph whose nodes are rows), make it one sample with a wrapper that "
    "adds a batch axis; if the model uses statistics of the batch, give batches of one sample"
)


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
