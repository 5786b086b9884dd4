"""A small transformer classifier on tokens or on patches of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope_lab.nets.seeded_layers import activation_module, conv, default_generator, embedding, linear, shape_of


class Attention(nn.Module):
    """Multi-head self-attention made of four linear layers, ``[n, t, width] → [n, t, width]``."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(width, width, generator)
        self.key = linear(width, width, generator)
        self.value = linear(width, width, generator)
        self.out = linear(width, width, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for projection in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
        mixed = weights @ value  # written out: the fused kernel cannot be vectorised over models
        return self.out(mixed.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    """``x + attention(norm1(x))``, then ``x + fc2(φ(fc1(norm2(x))))``."""

    def __init__(self, width: int, heads: int, ratio: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, device=generator.device)
        self.attention = Attention(width, heads, generator)
        self.norm2 = nn.LayerNorm(width, device=generator.device)
        self.fc1 = linear(width, ratio * width, generator)
        self.activation = activation_module(activation)
        self.fc2 = linear(ratio * width, width, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embed, add positions, apply blocks, average over positions, read out. Batch first, no dropout.

    Args:
        input_shape: ``(tokens,)`` with ``vocabulary`` (integer inputs), ``(tokens, features)`` (vectors) or
            ``(channels, height, width)`` (images, cut into patches).
        outputs: width of the readout.
        width, heads, depth, ratio: embedding width, attention heads, blocks, width of the inner layer over ``width``.
        vocabulary: number of different tokens, for integer inputs.
        patch: side of the square patches of an image.
        activation: as for :class:`~gramscope_lab.nets.mlp.MLP`.
        generator: source of the initial weights; a new one with seed 0 when ``None``.
    """

    def __init__(
        self,
        input_shape: int | Sequence[int],
        outputs: int,
        *,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        ratio: int = 4,
        vocabulary: int | None = None,
        patch: int = 4,
        activation: str = "gelu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"width={width} does not divide into heads={heads}")
        generator = default_generator(generator)
        shape = shape_of(input_shape)
        self.embed: nn.Module
        if vocabulary is not None:
            if len(shape) != 1:
                raise InputError(f"vocabulary={vocabulary} is for inputs of shape (tokens,), not {shape}")
            positions = shape[0]
            self.embed = embedding(vocabulary, width, generator, std=1.0)
        elif len(shape) == 3:
            if shape[1] % patch or shape[2] % patch:
                raise InputError(f"patch={patch} does not divide images of {shape[1]}×{shape[2]} pixels")
            positions = (shape[1] // patch) * (shape[2] // patch)
            self.embed = conv(shape[0], width, patch, generator, stride=patch)
        elif len(shape) == 2:
            positions = shape[0]
            self.embed = linear(shape[1], width, generator)
        else:
            raise InputError(
                f"inputs of shape {shape} are neither tokens (pass vocabulary=), a sequence of vectors nor an image"
            )
        self.position = embedding(positions, width, generator)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads, ratio, activation, generator) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, device=generator.device)
        self.readout = linear(width, outputs, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        if tokens.dim() == 4:
            tokens = tokens.flatten(2).mT
        tokens = tokens + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.readout(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]
