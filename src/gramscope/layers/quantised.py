"""Linear layers whose weight is computed: LoRA adapters, and weights kept in a few bits.

These are weights of bitsandbytes and torchao, modules with packed weights (GPTQ, AWQ), and experts in MXFP4 (gpt-oss). ``W``
is what the module multiplies by. It is read whenever it is asked for and never kept, so that one layer at a time takes the
memory of full numbers. D, Σ and K come from inputs and gradients as for other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import Layer, LinearLayer, TransposedLinearLayer
from gramscope.layers.modules import loaded

#: inputs that a packed module gets at once to show its weight
_BLOCK = 1024


class QuantisedLayer(LinearLayer):
    """A linear layer with a quantised weight; where its inputs are rounded too, ``z = W h + b`` holds to a few per cent."""

    rounding = 0.05

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return quantised_format(module) is not None

    @override
    def is_standard(self) -> bool:
        return False

    @property
    @override
    def parameter(self) -> None:
        return None

    @property
    @override
    def remark(self) -> str:
        return f"weights in {quantised_format(self.module)} format, dequantised one layer at a time"

    @override
    @torch.no_grad()
    def stored_weight(self) -> Tensor:
        return dequantised(self.module)


class LoraLayer(LinearLayer):
    """A LoRA layer: ``z = (W + Σ s BA) h + b``, where W is frozen and A and B are trained.

    Where adapters are dropped out or changed in another way (DoRA), the output is not of that form, which is checked.
    """

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        base = module._modules.get("base_layer")
        adapters = isinstance(module._modules.get("lora_A"), nn.ModuleDict) and hasattr(module, "get_delta_weight")
        return adapters and base is not None and any(kind.matches(base) for kind in _BASES)

    @property
    def base(self) -> Layer:
        """The layer with W, without adapters."""
        module = self.module.get_submodule("base_layer")
        return next(kind for kind in _BASES if kind.matches(module))(f"{self.name}.base_layer", module)

    @property
    @override
    def remark(self) -> str:
        return self.base.remark

    @property
    def rounding(self) -> float:  # type: ignore[override]
        """That of the layer with W."""
        return self.base.rounding

    @override
    def is_standard(self) -> bool:
        return False

    @override
    @torch.no_grad()
    def stored_weight(self) -> Tensor:
        layer: Any = self.module
        weight = self.base.native_weight()
        if layer.disable_adapters or layer.merged:
            return weight
        with ExitStack() as stack:
            for factor in self.factors():
                stack.enter_context(loaded(factor))
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A:
                    weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        return weight

    @override
    def bias(self) -> Tensor | None:
        return self.base.bias()

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return self.base.to_matrix(weight)

    def factors(self) -> Iterator[nn.Module]:
        """The modules with W, A and B."""
        for name in ("base_layer", "lora_A", "lora_B"):
            yield from self.module.get_submodule(name).modules()


#: kinds of layers that LoRA adapts
_BASES: tuple[type[Layer], ...] = (QuantisedLayer, LinearLayer, TransposedLinearLayer)


def quantised_format(module: nn.Module) -> str | None:
    """The format of a module's quantised weight; ``None`` where it has none."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear):
        if hasattr(weight, "quant_state"):
            return f"bitsandbytes {getattr(weight, 'quant_type', '4 bit')}"
        if hasattr(weight, "SCB"):
            return "bitsandbytes int8"
        known = type(weight).dequantize if weight is not None else Tensor.dequantize
        return None if known is Tensor.dequantize else f"torchao {type(weight).__name__}"
    if _sizes(module) is None:
        return None
    stored = {**module._parameters, **module._buffers}
    packed = [name for name, t in stored.items() if t is not None and t.dim() == 2 and not t.is_floating_point()]
    whole = any(t is not None and t.dim() > 1 and t.is_floating_point() for t in module._parameters.values())
    return f"{type(module).__name__} ({', '.join(packed)})" if packed and not whole else None


#: the numbers of four bits in MXFP4
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def has_mxfp4(module: nn.Module, name: str) -> bool:
    """Whether a fused weight of experts is stored in MXFP4, as blocks and scales or as tensors of transformers' kernels."""
    return hasattr(module, f"{name}_blocks") or getattr(module, f"{name}_precision_config", None) is not None


@torch.no_grad()
def from_mxfp4(module: Any, name: str) -> Tensor:
    """The weight ``[experts, k, d]``: two codes in a byte, the first in its lower half, and a power of 2 for each 32 inputs."""
    if hasattr(module, f"{name}_blocks"):
        blocks, scales = getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales")
    else:
        weight, scales = getattr(module, name), getattr(module, f"{name}_precision_config").weight_scale
        weight, scales = (t.storage.layout.unswizzle_data(t.storage.data).mT for t in (weight, scales))
        blocks = weight.reshape(*scales.shape, -1)
    numbers = torch.tensor(_FOUR_BITS, dtype=torch.float32, device=blocks.device)
    values = numbers[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)


def dequantised(module: Any) -> Tensor:
    """The weight ``[k, d]`` that a module with a quantised one multiplies by."""
    weight = module._parameters.get("weight")
    if hasattr(weight, "SCB"):  # one scale for each row; the module takes it over in its first forward
        scale: Tensor = module.state.SCB if weight.SCB is None else weight.SCB
        return weight.data.float() * scale.unsqueeze(1) / 127  # type: ignore[no-any-return]
    if weight is None or hasattr(weight, "quant_state"):
        return _shown(module)
    return weight.dequantize()  # type: ignore[no-any-return]


def _shown(module: nn.Module) -> Tensor:
    """The weight of any linear module from its outputs on unit vectors, without its bias."""
    d = (_sizes(module) or (0, 0))[0]
    places: list[dict[str, Any]] = [
        place for place in (module._parameters, module._buffers) if place.get("bias") is not None
    ]
    held = [place["bias"] for place in places]
    stored = [t for t in (*held, *module.parameters(), *module.buffers()) if t is not None]
    dtypes = [t.dtype for t in stored if t.is_floating_point()]
    device = stored[-1].device
    try:
        for place in places:
            place["bias"] = None
        blocks = []
        for start in range(0, d, _BLOCK):
            units = torch.zeros(min(_BLOCK, d - start), d, dtype=dtypes[0] if dtypes else torch.float32, device=device)
            units.diagonal(start).fill_(1)
            with torch.enable_grad():  # in inference bitsandbytes would pack the weight in another way
                blocks.append(type(module).forward(module, units.requires_grad_()).detach())  # no hooks
        return torch.cat(blocks).mT.contiguous()
    finally:
        for place, bias in zip(places, held, strict=True):
            place["bias"] = bias


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of inputs and outputs, as modules with packed weights name them."""
    for names in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        d, k = (getattr(module, name, None) for name in names)
        if isinstance(d, int) and isinstance(k, int):
            return d, k
    return None
