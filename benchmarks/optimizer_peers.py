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
from gramscope.optim.vcl import VCL

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
        wide: rates that are tried, but lie outside the range over which the spread is stated.
    """

    name: str
    rates: tuple[float, ...]
    make: Callable[[nn.Module, float], Sequence[Optimizer]]
    default: float | None = None
    wide: tuple[float, ...] = ()


def competitors(soap: bool | None = None) -> list[Competitor]:
    """VCL as it is without arguments, over γ and over the length of its steps, and its peers; grids cover a factor of 100.

    Args:
        soap: with SOAP from the package pytorch_optimizer; by default if it is installed.
    """
    found = [
        Competitor("VCL", tuple(10.0**e for e in (-1, -0.5, 0, 0.5, 1)), _vcl, 1.0, (10**-1.5, 10**1.5)),
        Competitor("VCL, all steps", tuple(10.0**e for e in (-1, -0.5, 0, 0.5, 1)), _vcl_rescaled, 1.0),
        Competitor("Muon", (0.003, 0.01, 0.03, 0.1, 0.3), _muon),
        Competitor("Muon, decay 0.1", (0.003, 0.01, 0.03, 0.1, 0.3), partial(_muon, decay=0.1)),  # torch's default
        Competitor("AdamW", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), _adamw),
        Competitor("SGD, momentum", (0.003, 0.01, 0.03, 0.1, 0.3), _sgd),
    ]
    if soap if soap is not None else find_spec("pytorch_optimizer") is not None:
        found.append(Competitor("SOAP", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), _soap))
    return found


def _vcl(net: nn.Module, factor: float) -> list[Optimizer]:
    """The bare call, with γ times a factor where it is not 1."""
    if factor == 1:
        return [VCL(net)]
    return [VCL(net, gamma=factor * default_gamma())]


def _vcl_rescaled(net: nn.Module, factor: float) -> list[Optimizer]:
    """The bare call with all its step lengths times a factor, as a peer's rate scales its steps; γ itself enters as γ^0.2."""
    optimizer = VCL(net)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return [optimizer]


def default_gamma() -> float:
    """γ of the bare call."""
    import inspect

    return float(inspect.signature(VCL).parameters["gamma"].default)


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
