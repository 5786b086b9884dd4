"""The optimizers that are compared, each with its rates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, NAdam, Optimizer
from torch.optim.swa_utils import update_bn
from typing_extensions import override

from benchmarks.training import Pair
from gramscope.layers.select import select_layers
from gramscope.optim.choose_matrices import choose_trained
from gramscope.optim.free_muon import FreeMuon
from gramscope.optim.orthogonalise import orthogonalised

#: AdamW's rate on what Muon does not train, as a share of Muon's
BESIDE_MUON = 0.15
#: what the rates of methods that need no tuning are multiplied by, to see what that does to them
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
OURS, ITSELF = "FreeMuon", "FreeMuon, linear schedule"


@dataclass(frozen=True)
class Competitor:
    """An optimizer and its rates.

    Attributes:
        name: for the table.
        make: the optimizers of a net at a rate.
        rates: the grid from which a validation split chooses; a rate at its edge that is best extends it. Empty for methods
            without tuning: their rate is a factor, 1 for the bare call.
        knows_end: its rates fall linearly to 0 at the end of training. Other methods have one run for all budgets.
        package: what it comes from, by its name on PyPI and for ``import``.
        averaged: a copy of the net with the weights that are meant to be evaluated.
        common_rate: also listed with the one rate that is best for all tasks.
    """

    name: str
    make: Callable[[nn.Module, float], Sequence[Optimizer]]
    rates: tuple[float, ...] = ()
    knows_end: bool = True
    package: tuple[str, str] | None = None
    averaged: Callable[[nn.Module, Sequence[Optimizer], Pair], nn.Module] | None = None
    common_rate: bool = False

    @property
    def missing(self) -> str:
        """The package to install, or nothing."""
        return self.package[0] if self.package is not None and find_spec(self.package[1]) is None else ""


def competitors() -> list[Competitor]:
    """FreeMuon, methods without tuning, and methods with a grid of rates."""
    small, large = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (0.003, 0.01, 0.03, 0.1, 0.3)
    library = ("pytorch_optimizer", "pytorch_optimizer")
    return [
        Competitor(OURS, _free_muon, knows_end=False, averaged=_free_average),
        Competitor(ITSELF, lambda net, factor: [LinearFreeMuon(net, factor)]),
        Competitor("Prodigy", partial(_bare, "prodigyopt", "Prodigy"), package=("prodigyopt", "prodigyopt")),
        Competitor("DAdaptAdam", partial(_bare, "dadaptation", "DAdaptAdam"), package=("dadaptation", "dadaptation")),
        Competitor("LDoG, averaged", _ldog, knows_end=False, package=("dog-optimizer", "dog"), averaged=_ldog_average),
        Competitor("ScheduleFreeAdamW", _schedule_free, knows_end=False, package=("schedulefree", "schedulefree"),
                   averaged=_schedule_free_average),
        Competitor("NorMuon", partial(_muon_of, "NorMuon"), package=library),
        Competitor("AdaMuon", partial(_muon_of, "AdaMuon"), package=library),
        Competitor("NadamW", _nadamw, small, common_rate=True),
        Competitor("Muon", muon, large, common_rate=True),
        Competitor("Muon, decay 0.1", partial(muon, decay=0.1), large),  # torch's default
        Competitor("AdamW", lambda net, rate: [AdamW(net.parameters(), lr=rate)], small),
        Competitor("SGD, momentum", lambda net, rate: [SGD(net.parameters(), lr=rate, momentum=0.9)], large),
        Competitor("SOAP", _soap, small, package=library),
    ]  # fmt: skip


# --- methods without tuning ----------------------------------------------------------------------------------------


def _free_muon(net: nn.Module, factor: float) -> list[Optimizer]:
    """The bare call, with all its step lengths times a factor, as a peer's rate scales its steps."""
    optimizer = FreeMuon(net)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return [optimizer]


def _free_average(net: nn.Module, optimizers: Sequence[Any], pair: Pair) -> nn.Module:
    return _own_statistics(net, pair)  # between steps the net has the averaged weights


def _own_statistics(net: nn.Module, pair: Pair) -> nn.Module:
    """A copy of a net, whose batch normalisation has the statistics of fifty batches at the present weights."""
    average = copy.deepcopy(net)
    update_bn(torch.split(pair[0], 64)[:50], average)
    return average


class LinearFreeMuon(Optimizer):
    """FreeMuon's steps for a known end: no average, no guard, lengths like 1/√n, to be multiplied by a linear schedule."""

    def __init__(self, net: nn.Module, factor: float = 1.0) -> None:
        matrices = [matrix.parameter for matrix in choose_trained(net, None, by_gradient=True).matrices]
        rest = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
        self._tables = {m.weight for m in net.modules() if isinstance(m, nn.Embedding)}
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest}]
        super().__init__(groups, {"lr": factor})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        matrices, rest = self.param_groups
        for p in matrices["params"]:
            state, gradient = self.state[p], p.grad.T if p in self._tables else p.grad.flatten(1)
            n = state["n"] = state.get("n", 0) + 1
            falling, beta = min(1, 25 / (9 * math.sqrt(n))), min(0.95, n / (n + 20))
            mean = state.setdefault("mean", torch.zeros_like(gradient)).lerp_(gradient, 1 - beta)
            O = orthogonalised(gradient.lerp(mean, beta))
            k, d = O.shape
            scale = 0.5 * math.sqrt(k) if p in self._tables else math.sqrt(max(1.0, k / d))
            length = 0.18 * falling * matrices["lr"]
            p.mul_(1 - length * 0.2 * (1 - falling))
            p.sub_(length * scale * (O.T if p in self._tables else O.view(p.shape)))
        for p in rest["params"]:
            state = self.state[p]
            n = state["n"] = state.get("n", 0) + 1
            mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
            rate = 0.02 * min(1, 25 / (9 * math.sqrt(n))) * rest["lr"] / (1 - 0.9**n)
            p.sub_(rate * mean / ((square / (1 - 0.99**n)).sqrt() + 1e-8))


def _bare(package: str, name: str, net: nn.Module, factor: float) -> list[Optimizer]:
    kind: Any = getattr(import_module(package), name)
    return [kind(net.parameters(), lr=factor)]  # 1 is the default of both


def _ldog(net: nn.Module, factor: float) -> list[Optimizer]:
    dog: Any = import_module("dog")
    optimizer: Any = dog.LDoG(net.parameters(), lr=factor)
    optimizer.averager = dog.PolynomialDecayAverager(net)
    optimizer.register_step_post_hook(lambda *_: optimizer.averager.step())
    return [optimizer]


def _ldog_average(net: nn.Module, optimizers: Sequence[Any], pair: Pair) -> nn.Module:
    found: nn.Module = optimizers[0].averager.averaged_model
    return found


def _schedule_free(net: nn.Module, factor: float) -> list[Optimizer]:
    kind: Any = import_module("schedulefree").AdamWScheduleFree
    optimizer: Any = kind(net.parameters(), lr=0.0025 * factor)  # its default
    optimizer.train()
    return [optimizer]


def _schedule_free_average(net: nn.Module, optimizers: Sequence[Any], pair: Pair) -> nn.Module:
    optimizers[0].eval()
    average = _own_statistics(net, pair)  # as its authors advise
    optimizers[0].train()
    return average


def _muon_of(name: str, net: nn.Module, factor: float) -> list[Optimizer]:
    """A relative of Muon at its default rates, those of AdamW for the rest of the parameters included."""
    kind: Any = getattr(import_module("pytorch_optimizer"), name)
    matrices, rest = _muons_share(net)
    rates = ((matrices, 0.02, True), (rest, 3e-4, False))
    return [kind([{"params": params, "lr": factor * rate, "use_muon": muon} for params, rate, muon in rates])]


# --- methods with a rate ---------------------------------------------------------------------------------------------


def _nadamw(net: nn.Module, rate: float) -> list[Optimizer]:
    return [NAdam(net.parameters(), lr=rate, weight_decay=0.01, decoupled_weight_decay=True)]


def _soap(net: nn.Module, rate: float) -> list[Optimizer]:
    kind: Any = import_module("pytorch_optimizer").SOAP
    return [kind(net.parameters(), lr=rate)]


def muon(net: nn.Module, rate: float, decay: float = 0.0) -> list[Optimizer]:
    """Muon on all weights of linear layers, convolutions and embeddings but the last layer's, AdamW on the rest."""
    matrices, rest = _muons_share(net)
    return [KernelMuon(matrices, rate, decay), AdamW(rest, lr=BESIDE_MUON * rate)]


def _muons_share(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights that Muon trains, and the rest."""
    hidden = {id(layer.parameter) for layer in select_layers(net).layers[:-1]}
    return tuple([p for p in net.parameters() if (id(p) in hidden) == chosen] for chosen in (True, False))  # type: ignore[return-value]


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
