"""Small networks, data and training loops that the tests of VCL share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference

AdamW = partial(torch.optim.AdamW, lr=1e-2)


def mlp(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        layers: list[nn.Module] = []
        for into, out in pairwise(sizes):
            layers += [nn.Linear(into, out, bias=bias, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def data(
    d: int = 7, n: int = 10, classes: int = 3, seed: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=dtype), torch.randint(classes, (n,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def train_both(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Train two models side by side on the same batches, each in its own precision."""
    for x, y in batches:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, x.to(next(model.parameters()).dtype), y)


def deltas(model: nn.Module, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of each sample's loss at a layer's output, ``[n, k]``, one sample at a time."""
    each = partial(F.cross_entropy, reduction="none")
    return torch.cat([g.flatten(0, 1) for g in reference.preactivation_gradients(model, layer, x, y, each)])


def same(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


class Tokens(nn.Module):
    """A small attention block with token-wise layers."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        sizes = {"kdim": 6, "vdim": 6} if separate else {}
        self.inner = nn.Linear(8, 8)
        self.side = nn.Linear(8, 6) if separate else nn.Identity()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x.reshape(x.shape[0], -1, 8)))
        side = self.side(h)
        return self.head(self.attention(h, side, side)[0].mean(1))


class Twice(nn.Module):
    """One weight in two layers, one of which is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.a(x))))))


class HeadFirst(nn.Module):
    """The layer executed last is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


KINDS = ["conv", "tokens", "separate", "twice", "deep", "wide", "narrow", "one"]
SIZES = {"deep": (5, *[9] * 6, 3), "wide": (4, 12, 3), "narrow": (30, 4, 3), "one": (8, 3)}


def net(kind: str) -> tuple[nn.Module, int]:
    """A float64 network and its number of inputs."""
    if kind in SIZES:
        return mlp(*SIZES[kind]), SIZES[kind][0]
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        if kind == "conv":
            model: nn.Module = nn.Sequential(
                nn.Unflatten(1, (2, 6, 6)),
                nn.Conv2d(2, 4, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(4, 6, 2, groups=2, bias=False),
                nn.Flatten(),
                nn.Linear(24, 3),
            )
            return model.double(), 72
        if kind == "twice":
            return Twice().double(), 8
        return Tokens(kind == "separate").double(), 24
