"""Activations, and linear and convolution layers initialised from an explicit generator.

A module built here never draws from torch's global random state: the layer is made on torch's meta device and then filled
from the generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError

Init: TypeAlias = Literal["torch", "normal"]
T = TypeVar("T")
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class Erf(nn.Module):
    """``erf(z)``."""

    @override
    def forward(self, z: Tensor) -> Tensor:
        return torch.erf(z)


class Quadratic(nn.Module):
    """``½ z²``, the quadratic activation of [NFA] with the ½ that makes φ′(z) = z."""

    @override
    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * z * z


class Scale(nn.Module):
    """Multiply by a constant: the 1/√d of the NTK parametrisation, the 1/√width of an output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = float(factor)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    @override
    def extra_repr(self) -> str:
        return f"{self.factor:.6g}"


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "erf": Erf,
    "quadratic": Quadratic,
    "linear": nn.Identity,
}


def activation_module(name: str) -> nn.Module:
    """A new module for an activation's name."""
    if name not in ACTIVATIONS:
        raise InputError(f"activation={name!r} is not known; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def default_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator given, or a new one with seed 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def shape_of(input_shape: int | Sequence[int]) -> tuple[int, ...]:
    """An input shape as a tuple of positive sizes."""
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(int(size) for size in input_shape)
    if not shape or min(shape) < 1:
        raise InputError(
            f"input_shape={input_shape!r} is not the shape of an input; give its sizes, for example (3, 32, 32)"
        )
    return shape


def image_shape(input_shape: int | Sequence[int], model: str) -> tuple[int, int, int]:
    """An input shape that has to be channels, height and width."""
    shape = shape_of(input_shape)
    if len(shape) != 3:
        raise InputError(f"{model} takes images (channels, height, width), not inputs of shape {shape}")
    return shape


def per_layer(name: str, value: T | Sequence[T], layers: int) -> tuple[T, ...]:
    """The values given, one for every layer, or the one value repeated."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != layers:
            raise InputError(
                f"{name}={list(value)} has {len(value)} values; the model has {layers} layers with weights"
            )
        return tuple(value)
    return (value,) * layers


@torch.no_grad()
def _drawn(module: Layer, init: Init, scale: float, generator: torch.Generator) -> Layer:
    """The module on the generator's device, with weight and bias drawn from the generator.

    ``torch``: both from U(−1/√d, 1/√d) (torch's own default, variance 1/3d), the weight then times √scale.
    ``normal``: W_ij ~ N(0, scale/d) ([NFA] §2.1), bias 0. d is the fan-in.
    """
    if scale < 0 or not math.isfinite(scale):
        raise InputError(f"init_scale={scale} must be a finite variance factor ≥ 0")
    module = module.to_empty(device=generator.device)
    fan_in = math.prod(module.weight.shape[1:])
    if init == "torch":
        bound = 1 / math.sqrt(fan_in)
        module.weight.uniform_(-bound, bound, generator=generator).mul_(math.sqrt(scale))
        if module.bias is not None:
            module.bias.uniform_(-bound, bound, generator=generator)
    elif init == "normal":
        module.weight.normal_(0, 1, generator=generator).mul_(math.sqrt(scale / fan_in))
        if module.bias is not None:
            module.bias.zero_()
    else:
        raise InputError(f"init={init!r} is not known; there are: torch, normal")
    return module


def linear(
    inputs: int,
    outputs: int,
    generator: torch.Generator,
    *,
    bias: bool = True,
    init: Init = "torch",
    scale: float = 1.0,
) -> nn.Linear:
    """``nn.Linear`` drawn from the generator, on the generator's device."""
    return _drawn(nn.Linear(inputs, outputs, bias=bias, device="meta"), init, scale, generator)


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    generator: torch.Generator,
    *,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
    init: Init = "torch",
    scale: float = 1.0,
) -> nn.Conv2d:
    """``nn.Conv2d`` drawn from the generator, on the generator's device."""
    module = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias, device="meta")
    return _drawn(module, init, scale, generator)


def embedding(entries: int, width: int, generator: torch.Generator, *, std: float = 0.02) -> nn.Embedding:
    """``nn.Embedding`` with entries from N(0, std²), on the generator's device."""
    module = nn.Embedding(entries, width, device="meta").to_empty(device=generator.device)
    with torch.no_grad():
        module.weight.normal_(0, std, generator=generator)
    return module
