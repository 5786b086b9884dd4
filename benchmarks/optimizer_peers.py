"""The optimizers that are compared, each with its grid of rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from typing_extensions import override

from gramscope.layers.select import select_layers
from gramscope.optim.free_muon import FreeMuon

#: AdamW's rate on what Muon does not train, as a share of Muon's
BESIDE_MUON = 0.15


@dataclass(frozen=True)
class Competitor:
    """An optimizer and its rates.

    Attributes:
        name: for the table.
        rates: the grid, from which a validation split chooses.
        make: the optimizers of a net at a rate.
        default: the rate that counts, whatever validation says; None lets validation choose.
    """

    name: str
    rates: tuple[float, ...]
    make: Callable[[nn.Module, float], Sequence[Optimizer]]
    default: float | None = None


def competitors(soap: bool | None = None) -> list[Competitor]:
    """FreeMuon, over a factor of its built-in step lengths, and its peers; grids cover a factor of 100.

    Args:
        soap: with SOAP from the package pytorch_optimizer; by default if it is installed.
    """
    found = [
        Competitor("FreeMuon", tuple(10.0**e for e in (-1, -0.5, 0, 0.5, 1)), _free_muon, 1.0),
        Competitor("Muon", (0.003, 0.01, 0.03, 0.1, 0.3), _muon),
        Competitor("Muon, decay 0.1", (0.003, 0.01, 0.03, 0.1, 0.3), partial(_muon, decay=0.1)),  # torch's default
        Competitor("AdamW", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), _adamw),
        Competitor("SGD, momentum", (0.003, 0.01, 0.03, 0.1, 0.3), _sgd),
    ]
    if soap if soap is not None else find_spec("pytorch_optimizer") is not None:
        found.append(Competitor("SOAP", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), _soap))
    return found


def _free_muon(net: nn.Module, factor: float) -> list[Optimizer]:
    """The bare call, with all its step lengths times a factor, as a peer's rate scales its steps."""
    optimizer = FreeMuon(net)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return [optimizer]


def _sgd(net: nn.Module, rate: float) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=rate, momentum=0.9)]


def _adamw(net: nn.Module, rate: float) -> list[Optimizer]:
    return [AdamW(net.parameters(), lr=rate)]


def _soap(net: nn.Module, rate: float) -> list[Optimizer]:
    kind: Any = import_module("pytorch_optimizer").SOAP
    return [kind(net.parameters(), lr=rate)]


def _muon(net: nn.Module, rate: float, decay: float = 0.0) -> list[Optimizer]:
    """Muon on all weights of linear layers and convolutions but the last layer's, AdamW on the rest."""
    hidden = [layer.parameter for layer in select_layers(net).layers[:-1]]
    chosen = {id(p) for p in hidden if p is not None}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    weights = [p for p in net.parameters() if id(p) in chosen]
    return [KernelMuon(weights, rate, decay), AdamW(rest, lr=BESIDE_MUON * rate)]


class KernelMuon(Muon):
    """torch's Muon, which takes matrices, on kernels flattened to ``[outputs, inputs × positions]``."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, decay: float = 0.0) -> None:
        self._kernels = list(parameters)
        self._matrices = [nn.Parameter(p.detach().flatten(1)) for p in self._kernels]  # views of the same memory
        super().__init__(self._matrices, lr=lr, weight_decay=decay)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for kernel, matrix in zip(self._kernels, self._matrices, strict=True):
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        return super().step(closure)  # type: ignore[no-untyped-call]

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for kernel in self._kernels:
            kernel.grad = None
