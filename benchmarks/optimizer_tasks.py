"""What the optimizers are compared on: small nets of six kinds on shipped, downloaded and Python's own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.training import Pair
from gramscope.errors import InputError
from gramscope_lab.data.named_sets import load
from gramscope_lab.nets import build
from gramscope_lab.nets.seeded_layers import conv, embedding, linear

#: kind of net → name and options for :func:`gramscope_lab.nets.build`
NETS = {
    "mlp": ("mlp", {"hidden": (128,), "activation": "gelu"}),
    "deep mlp": ("mlp", {"hidden": (128, 128, 128), "activation": "gelu"}),
    "cnn": ("cnn", {"channels": (8, 16, 16)}),
    "resnet": ("resnet", {"widths": (8, 16), "norm": "batch"}),
}
#: pairs of net and data, by scale
TASKS = {
    "quick": (("mlp", "digits"), ("cnn", "digits"), ("gpt", "text")),
    "full": (
        ("mlp", "cifar10"),
        ("deep mlp", "mnist"),
        ("cnn", "cifar10"),
        ("resnet", "digits"),
        ("gpt", "text"),
        ("mlp", "mnist"),
        ("deep mlp", "digits"),
        ("cnn", "mnist"),
        ("vit", "digits"),
    ),
}


@dataclass(frozen=True)
class Task:
    """A net to train on data that are split in three.

    Attributes:
        net, data: names.
        build: makes the net with weights from a generator.
        train, validation, test: inputs and targets.
        batch: samples a step.
        text: the score is the test loss per character; otherwise the accuracy in per cent.
    """

    net: str
    data: str
    build: Callable[[torch.Generator], nn.Module]
    train: Pair
    validation: Pair
    test: Pair
    batch: int = 64
    text: bool = False

    def loss(self, net: nn.Module, pair: Pair) -> Tensor:
        """Mean cross-entropy of a batch, over characters too where the data are text."""
        scores: Tensor = net(pair[0])
        return F.cross_entropy(scores.flatten(0, -2), pair[1].flatten())

    @torch.no_grad()
    def score(self, net: nn.Module, pair: Pair) -> float:
        """Accuracy in per cent, or minus the loss per character: more is better. The net is left in training mode."""
        net.eval()
        parts = list(zip(*(torch.split(part, 500) for part in pair), strict=True))
        if self.text:
            total = sum(float(self.loss(net, part)) * len(part[0]) for part in parts)
            found = -total / len(pair[0])
        else:
            found = 100 * sum(int((net(x).argmax(1) == y).sum()) for x, y in parts) / len(pair[0])
        net.train()
        return found


def make_task(net: str, data: str, data_dir: str | None = None, device: str = "cpu") -> Task:
    """The task of a net on data.

    Args:
        net: a key of :data:`NETS`, ``"vit"``, or ``"gpt"`` for text.
        data: ``"text"``, or a data set of images by name. At most 10,000 images train, 2,000 validate and 2,000 test.
            Images of 32 pixels are averaged over 2×2 pixels, and all are standardised by channel.
        data_dir: folder with the official files.
        device: where the tensors are.
    """
    if (net == "gpt") != (data == "text"):
        raise InputError(f"net {net!r} on data {data!r}: the gpt is for text, and the other nets for images")
    if net == "gpt":
        return _text_task(device)
    if net not in (*NETS, "vit"):
        raise InputError(f"net {net!r} is not known; there are: {', '.join([*NETS, 'vit', 'gpt'])}")
    found = load(data, data_dir, download=False)
    order = torch.randperm(len(found.x_train), generator=torch.Generator().manual_seed(0))
    held_out = min(2_000, len(order) // 5)
    picks = order[held_out : held_out + 10_000], order[:held_out]
    x, y = found.x_train, found.y_train
    tests = torch.arange(min(2_000, len(found.x_test)))
    parts = [(x[picks[0]], y[picks[0]]), (x[picks[1]], y[picks[1]]), (found.x_test[tests], found.y_test[tests])]
    if x.shape[-1] == 32:
        parts = [(F.avg_pool2d(a, 2), b) for a, b in parts]
    train, validation, test = _standardised(parts, device)
    shape = tuple(train[0].shape[1:])
    batch = 64 if "mlp" in net else 32
    make: Callable[..., nn.Module] = partial(VisionTransformer, shape, 10)
    if net in NETS:
        name, options = NETS[net]
        make = partial(build, name, shape, 10, **options)  # type: ignore[arg-type]
    return Task(net, data, lambda generator: make(generator=generator).to(device), train, validation, test, batch)


def _standardised(parts: Sequence[Pair], device: str) -> list[Pair]:
    """Images with mean 0 and variance 1 over the first part, channel by channel."""
    variance, mean = torch.var_mean(parts[0][0], dim=(0, 2, 3), keepdim=True)
    return [(((x - mean) / variance.sqrt()).to(device), y.to(device)) for x, y in parts]


# --- text ---------------------------------------------------------------------------------------------------------

_CONTEXT = 32


def _text_task(device: str) -> Task:
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
    width = len(alphabet)
    make = lambda generator: CharacterGPT(width, _CONTEXT, generator).to(device)  # noqa: E731
    return Task("gpt", "text", make, train, validation, test, batch=16, text=True)


# --- transformers ------------------------------------------------------------------------------------------------


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
