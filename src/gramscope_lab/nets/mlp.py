"""Fully connected nets: any depth, width and activation, standard or NTK parametrisation."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.nets.seeded_layers import (
    Init,
    Scale,
    activation_module,
    default_generator,
    linear,
    per_layer,
    shape_of,
)


class MLP(nn.Sequential):
    """``flatten → hidden1 → activation1 → … → readout``.

    Args:
        input_shape: shape of one input; flattened.
        outputs: width of the readout.
        hidden: widths of the hidden layers; ``()`` is a linear model, an int is one hidden layer.
        activation: relu, gelu, silu, tanh, sigmoid, softplus, leaky_relu, elu, erf, quadratic (½z²), linear.
        bias: for all layers, or one value per layer, readout included.
        init: ``"torch"`` (uniform, torch's default) or ``"normal"`` (W_ij ~ N(0, s/d), bias 0).
        init_scale: the factor s on the variance of the weights, for all layers or one per layer, readout included.
        parametrisation: ``"standard"`` z = W h, or ``"ntk"`` z = W h/√d with W_ij ~ N(0, s) and bias 0. The 1/√d is a
            module of its own in front of the layer, so every layer stays a plain ``z = W h + b``.
        output_scale: constant the readout is multiplied by.
        generator: source of the initial weights; a new one with seed 0 when ``None``.
    """

    def __init__(
        self,
        input_shape: int | Sequence[int],
        outputs: int,
        hidden: int | Sequence[int] = (256,),
        *,
        activation: str = "gelu",
        bias: bool | Sequence[bool] = True,
        init: Init | None = None,
        init_scale: float | Sequence[float] = 1.0,
        parametrisation: Literal["standard", "ntk"] = "standard",
        output_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        hidden = (hidden,) if isinstance(hidden, int) else tuple(hidden)
        widths = (math.prod(shape_of(input_shape)), *hidden, outputs)
        if min(widths) < 1:
            raise InputError(f"hidden={hidden}, outputs={outputs}: every width must be at least 1")
        if parametrisation not in ("standard", "ntk"):
            raise InputError(f"parametrisation={parametrisation!r} is not known; there are: standard, ntk")
        ntk = parametrisation == "ntk"
        if ntk and init is not None:
            raise InputError(
                f"init={init!r} does not apply to parametrisation='ntk', whose weights are N(0, init_scale)"
            )
        generator = default_generator(generator)
        depth = len(widths) - 1
        biases = per_layer("bias", bias, depth)
        scales = per_layer("init_scale", init_scale, depth)

        modules: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for index, (inputs, width) in enumerate(pairwise(widths)):
            last = index == depth - 1
            if ntk:
                modules[f"scale{index + 1}"] = Scale(1 / math.sqrt(inputs))
            modules["readout" if last else f"hidden{index + 1}"] = linear(
                inputs,
                width,
                generator,
                bias=biases[index],
                init="normal" if ntk else (init or "torch"),
                scale=scales[index] * (inputs if ntk else 1),
            )
            if not last:
                modules[f"activation{index + 1}"] = activation_module(activation)
        if output_scale != 1.0:
            modules["output_scale"] = Scale(output_scale)
        super().__init__(modules)
