"""Write weights after ten steps of every optimizer: ``PYTHONPATH=src:tests python -m golden.optimizers``.

Run it only to accept a decided difference, and say in the commit which weights changed and why.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import gramscope as gs

STORED = Path(__file__).parent / "optimizers.json"
Make = Callable[[nn.Module], Optimizer]
_rest = partial(SGD, lr=0.1, momentum=0.9)


class Transformer(nn.Module):
    """An embedding, one block and a readout of every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits ``[classes, batch]`` of the mean position."""
        result: torch.Tensor = self.head(self.block(self.words(words)).mean(1))
        return result


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 12), nn.GELU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (_mlp, (40,), 3),
    "cnn": (_cnn, (3, 6, 6), 3),
    "transformer": (Transformer, (), 11),
}
METHODS: dict[str, Make] = {
    "free": gs.FreeMuon,
    "recursive": partial(gs.VCL, solver="recursive", readout=_rest),
    "recursive, rank 16": partial(gs.VCL, solver="recursive", readout=_rest, rank=16),
    "exact": partial(gs.VCL, solver="exact", readout=_rest),
    "exact, alpha 0.3": partial(gs.VCL, solver="exact", readout=_rest, alpha=0.3, gamma=0.1),
    "whitened": lambda model: gs.GramWhitened(_rest(model.parameters()), model),
    "fixed": lambda model: gs.GramFixed(_rest(model.parameters()), model),
}


def weights_of(net: str, method: str) -> dict[str, list[float]]:
    """Norm, sum, and three entries of every parameter after ten steps."""
    build, shape, classes = NETS[net]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = copy.deepcopy(build()).double()
    optimizer = METHODS[method](model)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        n = 6 if step % 2 else 20  # fewer and more samples than outputs
        if shape:
            x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        else:
            x = torch.randint(11, (n, 5), generator=generator)
        y = torch.randint(classes, (n,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        entries = [flat[i * (len(flat) - 1) // 2] for i in range(3)]
        found[name] = [float(f"{float(value):.14g}") for value in (flat.norm(), flat.sum(), *entries)]
    return found


if __name__ == "__main__":
    everything: Any = {f"{net}: {method}": weights_of(net, method) for net in NETS for method in METHODS}
    STORED.write_text(json.dumps(everything, indent=0).replace(",\n", ", ").replace("], ", "],\n") + "\n")
    print(f"{STORED.stat().st_size:,} bytes")
