"""Low-rank adapters of ``peft``: one layer with the weight W + s·BA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import LinearKind, TransposedLinearKind

_BASES = (LinearKind(), TransposedLinearKind())


class LoraKind(LinearKind):
    """A LoRA layer: ``z = (W + Σ s BA) h + b``, where W is frozen and A and B are trained.

    Where adapters are dropped out or changed in another way (DoRA), the output is not of that form, which is checked.
    """

    @override
    def matches(self, module: nn.Module) -> bool:
        base = module._modules.get("base_layer")
        adapters = isinstance(module._modules.get("lora_A"), nn.ModuleDict) and hasattr(module, "get_delta_weight")
        return adapters and base is not None and any(kind.matches(base) for kind in _BASES)

    @override
    def is_standard(self, module: nn.Module) -> bool:
        return False

    @override
    @torch.no_grad()
    def computed_weight(self, module: nn.Module) -> Tensor:
        layer: Any = module
        weight: Tensor = layer.base_layer.weight.detach()
        if layer.disable_adapters or layer.merged:
            return weight
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        return weight

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        base = module.get_submodule("base_layer")
        return next(kind for kind in _BASES if kind.matches(base)).to_matrix(base, weight)

    def factors(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules with W, A and B."""
        for name in ("base_layer", "lora_A", "lora_B"):
            yield from module.get_submodule(name).modules()
