"""Layers with quantised weights: how each format is made from a linear layer, and its weight written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Packed(nn.Module):
    """A layer as GPTQ and AWQ store it: eight inputs in one int32, scales and zeros of groups of 32 inputs.

    The libraries' own wheels need a GPU and its compiler.
    """

    def __init__(self, linear: nn.Linear, group: int = 32) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = linear.in_features, linear.out_features, group
        W = linear.weight.detach().mT.unflatten(0, (-1, group))
        zeros = W.amin(1, keepdim=True)
        scales = (W.amax(1, keepdim=True) - zeros) / 15
        codes = ((W - zeros) / scales).round().to(torch.int32).flatten(0, 1).unflatten(0, (-1, 8))
        self.register_buffer("qweight", sum(codes[:, i] << 4 * i for i in range(8)))
        self.register_buffer("scales", scales.squeeze(1))
        self.register_buffer("qzeros", zeros.squeeze(1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.qweight >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1)
        W = codes.unflatten(0, (-1, self.group)) * self.scales.unsqueeze(1) + self.qzeros.unsqueeze(1)
        z = x @ W.flatten(0, 1)
        return z if self.bias is None else z + self.bias


def unpacked(module: Any) -> Tensor:
    """The weight of :class:`Packed`, number by number."""
    W = torch.zeros(module.out_features, module.in_features, dtype=torch.float64)
    for row in range(module.out_features):
        for column in range(module.in_features):
            code = int(module.qweight[column // 8, row]) >> 4 * (column % 8) & 15
            group = column // module.group
            W[row, column] = code * float(module.scales[group, row]) + float(module.qzeros[group, row])
    return W


def four_bits(linear: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    made.bias = linear.bias
    return made.to("cpu")  # type: ignore[no-any-return]


def from_four_bits(module: Any) -> Tensor:
    """Two codes in a byte, the first in its upper half; a scale for each block, which is a code of eight bits itself."""
    state, data = module.weight.quant_state, module.weight.data.flatten().int()
    codes, of_scales = torch.stack([data >> 4, data & 15], 1).flatten(), state.state2
    blocks = of_scales.absmax.double().repeat_interleave(of_scales.blocksize)[: len(state.absmax)]
    scales = of_scales.code.double()[state.absmax.int()] * blocks + float(state.offset)
    return (state.code.double()[codes] * scales.repeat_interleave(state.blocksize)).reshape(state.shape)


def eight_bits(linear: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made.to("cpu")  # type: ignore[no-any-return]


def torchao(name: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    def convert(linear: nn.Linear) -> nn.Module:
        quantisation = pytest.importorskip("torchao.quantization")
        quantisation.quantize_(linear, getattr(quantisation, name)(**options))
        return linear

    return convert


def from_torchao(module: Any) -> Tensor:
    """Codes of groups of inputs, less their zero, times their scale."""
    W = module.weight
    codes, scales = W.qdata.double(), W.scale.double().reshape(W.shape[0], -1)
    zeros = getattr(W, "zero_point", None)
    zeros = torch.zeros_like(scales) if zeros is None else zeros.double().reshape(scales.shape)
    each = W.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(each, 1)


#: how it is made, its weight in float64 from the module and the weight before, words of the note, relative error
FORMATS: dict[str, tuple[Callable[[nn.Linear], nn.Module], Callable[[Any, Tensor], Tensor], str, float]] = {
    "packed": (Packed, lambda module, _: unpacked(module), "Packed (qweight)", 1e-4),
    # its backward pass rounds once more
    "bitsandbytes nf4": (four_bits, lambda module, _: from_four_bits(module), "bitsandbytes nf4", 2e-3),
    # inputs are rounded too
    "bitsandbytes int8": (
        eight_bits, lambda m, W: m.weight.data.double() * W.double().abs().amax(1, keepdim=True) / 127, "bitsandbytes int8",
        0.1,
    ),
    "torchao int8": (torchao("Int8WeightOnlyConfig"), lambda m, _: from_torchao(m), "torchao Int8Tensor", 1e-4),
    "torchao int4": (
        torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), lambda m, _: from_torchao(m),
        "torchao IntxUnpacked", 1e-4,
    ),
}  # fmt: skip
