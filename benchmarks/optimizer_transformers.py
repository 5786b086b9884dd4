"""The transformers among the nets on which optimizers are compared: one for text, one for images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope_lab.nets.seeded_layers import conv, embedding, linear


class CharacterGPT(nn.Module):
    """A decoder of two blocks of width 32 that predicts the next character, ``[n, t] → [n, t, characters]``."""

    def __init__(
        self, characters: int, context: int, generator: torch.Generator, *, width: int = 32, depth: int = 2
    ) -> None:
        super().__init__()
        self.embed = embedding(characters, width, generator)
        self.position = embedding(context, width, generator)
        self.blocks = nn.Sequential(*(Block(width, generator, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.readout = linear(width, characters, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position.weight[: x.shape[1]]
        return self.readout(self.norm(self.blocks(h)))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """An encoder of two blocks of width 32 on the patches of an image, ``[n, channels, side, side] → [n, classes]``.

    A convolution embeds the patches, 4 × 4 of them, and a class token reads them.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, generator: torch.Generator, *, width: int = 32, depth: int = 2
    ) -> None:
        super().__init__()
        patch = shape[-1] // 4
        self.embed = conv(shape[0], width, patch, generator, stride=patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width, generator=generator))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width, generator=generator))
        self.blocks = nn.Sequential(*(Block(width, generator, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.readout = linear(width, classes, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.readout(self.norm(self.blocks(h)[:, 0]))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention of two heads, then two linear layers, each added to its input."""

    def __init__(self, width: int, generator: torch.Generator, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (linear(width, width, generator) for _ in range(4))
        self.fc1, self.fc2 = linear(width, 4 * width, generator), linear(4 * width, width, generator)

    @override
    def forward(self, h: Tensor) -> Tensor:
        x = self.norm1(h)
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.fc2(F.gelu(self.fc1(self.norm2(h))))  # type: ignore[no-any-return]
