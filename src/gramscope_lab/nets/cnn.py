"""The convolutional net of [Gram] Fig. 6."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.nets.seeded_layers import (
    Init,
    activation_module,
    conv,
    default_generator,
    image_shape,
    linear,
    per_layer,
)


class CNN(nn.Sequential):
    """``conv1 → activation1 → pool1 → conv2 → activation2 → pool2 → conv3 → activation3 → flatten → readout``.

    A 2×2 max-pool follows every convolution but the last.

    Args:
        input_shape: ``(channels, height, width)``.
        outputs: width of the readout.
        channels: output channels of the convolutions, one per layer.
        kernel: kernel size; 3 with padding 1 by default, 2 (as the paper's text has it) with padding 0.
        padding: ``(kernel − 1) // 2`` when ``None``.
        activation: as for :class:`~gramscope_lab.nets.mlp.MLP`.
        bias, init_scale: for all layers, or one value per layer, readout included.
        init: ``"torch"`` or ``"normal"``.
        generator: source of the initial weights; a new one with seed 0 when ``None``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        channels: Sequence[int] = (16, 16, 16),
        *,
        kernel: int = 3,
        padding: int | None = None,
        activation: str = "relu",
        bias: bool | Sequence[bool] = True,
        init: Init = "torch",
        init_scale: float | Sequence[float] = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        inputs, *size = image_shape(input_shape, "CNN")
        if not channels:
            raise InputError("channels=() leaves no convolution; use the mlp")
        padding = (kernel - 1) // 2 if padding is None else padding
        generator = default_generator(generator)
        depth = len(channels)
        biases = per_layer("bias", bias, depth + 1)
        scales = per_layer("init_scale", init_scale, depth + 1)

        modules: OrderedDict[str, nn.Module] = OrderedDict()
        for index, width in enumerate(channels, start=1):
            modules[f"conv{index}"] = conv(
                inputs,
                width,
                kernel,
                generator,
                padding=padding,
                bias=biases[index - 1],
                init=init,
                scale=scales[index - 1],
            )
            modules[f"activation{index}"] = activation_module(activation)
            size = [side + 2 * padding - kernel + 1 for side in size]
            if index < depth:
                modules[f"pool{index}"] = nn.MaxPool2d(2)
                size = [side // 2 for side in size]
            if min(size) < 1:
                raise InputError(
                    f"inputs of shape {tuple(input_shape)} are used up after conv{index} (kernel={kernel}, "
                    f"padding={padding}, {depth} layers); use fewer layers or more padding"
                )
            inputs = width
        modules["flatten"] = nn.Flatten()
        modules["readout"] = linear(
            inputs * math.prod(size), outputs, generator, bias=biases[-1], init=init, scale=scales[-1]
        )
        super().__init__(modules)
