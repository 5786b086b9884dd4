"""What must hold for a measurement to mean something, and how it is found out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.select import Layer, unwrap


def batch_dependence(model: nn.Module) -> str | None:
    """Why a sample's output depends on its batch (batch normalisation in train mode); ``None`` where it does not."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return (
                f"{type(module).__name__} {name!r} is in train mode (or keeps no running statistics), so samples of a "
                "batch depend on each other and per-sample gradients do not exist; measure in eval mode"
            )
    return None


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
