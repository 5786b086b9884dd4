"""What the optimizers are compared on: nine small nets on shipped, downloaded, generated and Python's own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.training import Pair
from gramscope.errors import InputError
from gramscope_lab.nets import build
from gramscope_lab.nets.seeded_layers import conv, embedding, linear

#: kind of net → name and options for :func:`gramscope_lab.nets.build`
NETS = {
    "mlp": ("mlp", {"hidden": (128,), "activation": "gelu"}),
    "deep mlp": ("mlp", {"hidden": (128, 128, 128), "activation": "gelu"}),
    "cnn": ("cnn", {"channels": (8, 16, 16)}),
    "resnet": ("resnet", {"widths": (8, 16), "norm": "batch"}),
    "autoencoder": ("mlp", {"hidden": (128, 16, 128), "activation": "gelu"}),
}
#: pairs of net and data, by scale
TASKS = {
    "quick": (("mlp", "digits"), ("cnn", "digits"), ("gpt", "text")),
    "full": (
        ("mlp", "cifar10"),
        ("deep mlp", "mnist"),
        ("cnn", "cifar10"),
        ("resnet", "digits"),
        ("autoencoder", "mnist"),
        ("deep mlp", "multi-index"),
        ("gpt", "text"),
        ("gru", "text"),
        ("vit", "digits"),
    ),
}
#: the worst score that counts, by kind of target: one class of ten, a loss of 10 per character, a constant guess
WORST = {"class": 10.0, "character": -10.0, "value": 0.0}


@dataclass(frozen=True)
class Task:
    """A net to train on data that are split in three.

    Attributes:
        net, data: names.
        build: makes the net with weights from a generator.
        train, validation, test: inputs and targets.
        batch: samples a step.
        target: the score is accuracy in per cent, minus the loss per character, or 100 R²: more is better.
    """

    net: str
    data: str
    build: Callable[[torch.Generator], nn.Module]
    train: Pair
    validation: Pair
    test: Pair
    batch: int = 64
    target: Literal["class", "character", "value"] = "class"

    @property
    def names(self) -> tuple[str, str]:
        """Net and data."""
        return self.net, self.data

    def loss(self, net: nn.Module, pair: Pair) -> Tensor:
        """Mean cross-entropy of a batch, over characters too where the data are text, or the mean squared error."""
        outputs: Tensor = net(pair[0])
        if self.target == "value":
            return F.mse_loss(outputs, pair[1])
        return F.cross_entropy(outputs.flatten(0, -2), pair[1].flatten())

    @torch.no_grad()
    def score(self, net: nn.Module, pair: Pair) -> float:
        """The score, at least that of a constant guess. The net is left in training mode."""
        net.eval()
        parts = list(zip(*(torch.split(part, 500) for part in pair), strict=True))
        if self.target == "class":
            found = 100 * sum(int((net(x).argmax(1) == y).sum()) for x, y in parts) / len(pair[0])
        else:
            found = -sum(float(self.loss(net, part)) * len(part[0]) for part in parts) / len(pair[0])
        if self.target == "value":
            found = 100 * (1 + found / float(pair[1].var(correction=0)))
        net.train()
        return found if found >= WORST[self.target] else WORST[self.target]  # also where it is NaN


def make_task(net: str, data: str, data_dir: str | None = None, device: str = "cpu") -> Task:
    """The task of a net on data.

    Args:
        net: a key of :data:`NETS`, ``"vit"``, or for text ``"gpt"`` or ``"gru"``.
        data: ``"text"``, ``"multi-index"``, or a data set of images by name. At most 10,000 images train, 2,000 validate and
            2,000 test. Images of 32 pixels are averaged over 2×2 pixels, and all are standardised by channel.
        data_dir: folder with the official files.
        device: where the tensors are.
    """
    if net not in (*NETS, "vit", "gpt", "gru"):
        raise InputError(f"net {net!r} is not known; there are: {', '.join([*NETS, 'vit', 'gpt', 'gru'])}")
    if (net in ("gpt", "gru")) != (data == "text"):
        raise InputError(f"net {net!r} on data {data!r}: gpt and gru are for text, and the other nets for images")
    if data == "multi-index" and "mlp" not in net:
        raise InputError(f"net {net!r} on data {data!r}: choose mlp or deep mlp")
    if data == "text":
        return _text_task(net, device)
    parts = _multi_index() if data == "multi-index" else _images(data, data_dir)
    if net == "autoencoder":
        parts = [(x, x.flatten(1)) for x, _ in parts]
    train, validation, test = ((x.to(device), y.to(device)) for x, y in parts)
    shape, values = tuple(train[0].shape[1:]), train[1].is_floating_point()
    outputs = train[1].shape[1] if values else 10
    make: Callable[..., nn.Module] = partial(VisionTransformer, shape, 10)
    if net in NETS:
        name, options = NETS[net]
        make = partial(build, name, shape, outputs, **options)  # type: ignore[arg-type]
    batch = 64 if values or "mlp" in net else 32
    target: Literal["value", "class"] = "value" if values else "class"
    return Task(net, data, lambda g: make(generator=g).to(device), train, validation, test, batch, target)


def _images(data: str, data_dir: str | None) -> list[Pair]:
    """Training, validation and test images; over the first the mean is 0 and the variance 1, channel by channel."""
    from gramscope_lab.data.named_sets import load

    found = load(data, data_dir, download=False)
    order = torch.randperm(len(found.x_train), generator=torch.Generator().manual_seed(0))
    held_out = min(2_000, len(order) // 5)
    picks = order[held_out : held_out + 10_000], order[:held_out]
    tests = torch.arange(min(2_000, len(found.x_test)))
    parts = [(found.x_train[pick], found.y_train[pick]) for pick in picks] + [
        (found.x_test[tests], found.y_test[tests])
    ]
    if found.x_train.shape[-1] == 32:
        parts = [(F.avg_pool2d(x, 2), y) for x, y in parts]
    variance, mean = torch.var_mean(parts[0][0], dim=(0, 2, 3), keepdim=True)
    return [((x - mean) / variance.sqrt(), y) for x, y in parts]


def _multi_index() -> list[Pair]:
    """Values ``z₁z₂ + sin 2z₃`` of three of 32 normal inputs, rotated."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(32, 3, generator=generator)).Q
    x = torch.randn(14_000, 32, generator=generator)
    z = x @ directions
    y = (z[:, 0] * z[:, 1] + torch.sin(2 * z[:, 2]))[:, None]
    return [(x[cut], y[cut]) for cut in (slice(4_000, None), slice(2_000), slice(2_000, 4_000))]


_CONTEXT = 32


def _text_task(net: str, device: str) -> Task:
    """Python's own help texts, character by character, in pieces of 32."""
    from pydoc_data.topics import topics

    text = "".join(topics[key] for key in sorted(topics))
    alphabet = sorted({c for c in text if c.isascii()})
    number = {c: i for i, c in enumerate(alphabet)}
    codes = torch.tensor([number.get(c, 0) for c in text])
    pieces = codes[: (len(codes) - 1) // _CONTEXT * _CONTEXT + 1]
    x, y = pieces[:-1].view(-1, _CONTEXT), pieces[1:].view(-1, _CONTEXT)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].to(device), y[order].to(device)
    cuts = (slice(600, None), slice(300), slice(300, 600))
    train, validation, test = ((x[cut], y[cut]) for cut in cuts)
    make = partial(CharacterGPT, len(alphabet), _CONTEXT) if net == "gpt" else partial(CharacterGRU, len(alphabet))
    return Task(net, "text", lambda g: make(generator=g).to(device), train, validation, test, 16, "character")


class CharacterGRU(nn.Module):
    """A recurrent net of width 64 that predicts the next character, ``[n, t] → [n, t, characters]``."""

    def __init__(self, characters: int, generator: torch.Generator, *, width: int = 64) -> None:
        super().__init__()
        self.embed = embedding(characters, width, generator)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        with torch.no_grad():
            for parameter in self.recurrent.parameters():
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) / width**0.5)
        self.readout = linear(width, characters, generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.recurrent(self.embed(x))[0])  # type: ignore[no-any-return]


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
