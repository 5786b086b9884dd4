"""A small residual net for images."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope_lab.nets.seeded_layers import activation_module, conv, default_generator, image_shape, linear

Norm: TypeAlias = Literal["group", "batch", "none"]


def norm_module(norm: Norm, channels: int, device: torch.device) -> nn.Module:
    """A normalisation over ``channels``; group normalisation uses at most 8 groups."""
    if norm == "group":
        return nn.GroupNorm(math.gcd(8, channels), channels, device=device)
    if norm == "batch":
        return nn.BatchNorm2d(channels, device=device)
    if norm == "none":
        return nn.Identity()
    raise InputError(f"norm={norm!r} is not known; there are: group, batch, none")


class Block(nn.Module):
    """``φ(norm2(conv2(φ(norm1(conv1(x))))) + shortcut(x))``; the shortcut is a 1×1 convolution where shapes differ."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Norm, activation: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = conv(inputs, outputs, 3, generator, stride=stride, padding=1, bias=bias)
        self.norm1 = norm_module(norm, outputs, generator.device)
        self.activation1 = activation_module(activation)
        self.conv2 = conv(outputs, outputs, 3, generator, padding=1, bias=bias)
        self.norm2 = norm_module(norm, outputs, generator.device)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, generator, stride=stride, bias=False)
        self.activation2 = activation_module(activation)

    @override
    def forward(self, x: Tensor) -> Tensor:
        z = self.activation1(self.norm1(self.conv1(x)))
        z = self.norm2(self.conv2(z)) + self.shortcut(x)
        return self.activation2(z)  # type: ignore[no-any-return]


class ResNet(nn.Sequential):
    """``stem → norm → activation → stage1 → stage2 → … → pool → flatten → readout``.

    Args:
        input_shape: ``(channels, height, width)``.
        outputs: width of the readout.
        widths: channels of the stages; every stage after the first halves the image.
        blocks: residual blocks in each stage (two convolutions each).
        norm: ``"group"`` (default: each sample is normalised by itself, so per-sample gradients mean what they say),
            ``"batch"`` or ``"none"``.
        activation: as for :class:`~gramscope_lab.nets.mlp.MLP`.
        generator: source of the initial weights; a new one with seed 0 when ``None``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        widths: Sequence[int] = (16, 32, 64),
        *,
        blocks: int = 1,
        norm: Norm = "group",
        activation: str = "relu",
        generator: torch.Generator | None = None,
    ) -> None:
        channels = image_shape(input_shape, "ResNet")[0]
        if not widths or blocks < 1:
            raise InputError(
                f"widths={tuple(widths)}, blocks={blocks}: a ResNet needs at least one stage with one block"
            )
        generator = default_generator(generator)
        modules: OrderedDict[str, nn.Module] = OrderedDict(
            stem=conv(channels, widths[0], 3, generator, padding=1, bias=norm == "none"),
            norm=norm_module(norm, widths[0], generator.device),
            activation=activation_module(activation),
        )
        inputs = widths[0]
        for index, width in enumerate(widths):
            stage = []
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                stage.append(Block(inputs, width, stride, norm, activation, generator))
                inputs = width
            modules[f"stage{index + 1}"] = nn.Sequential(*stage)
        modules["pool"] = nn.AdaptiveAvgPool2d(1)
        modules["flatten"] = nn.Flatten()
        modules["readout"] = linear(inputs, outputs, generator)
        super().__init__(modules)
