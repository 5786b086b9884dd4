"""How time grows where samples, widths or layers double, beside what the largest term of the cost would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.timing import Row, compare
from gramscope.instruments.measure import measure
from gramscope.measures.linearity import target_linearity
from gramscope.measures.spectrum import weight_spectrum
from gramscope.optim.free_muon import FreeMuon
from gramscope.optim.polar import polar
from gramscope.optim.whitening import GramWhitened
from gramscope.statistics.collect import collect
from gramscope_lab.nets import build


class Case(NamedTuple):
    """Something to time at sizes that double: ``make(size)`` prepares it, its time should grow like ``size^power`` or less."""

    name: str
    variable: str
    sizes: Sequence[int]
    power: int
    make: Callable[[int], Callable[[], object]]


def run(device: str = "cpu", seconds: float = 0.4) -> Iterator[Row]:
    """All cases, each size for about ``seconds``."""
    for case in cases(device):
        before = None
        for size in case.sizes:
            taken = compare({"it": case.make(size)}, device=device, seconds=seconds, warm_up=1)["it"]
            label, expected = f"{case.variable} = {size:,}", f"expected ≤ {2**case.power}"
            half = label if before is None else f"{case.variable} = {size // 2:,}"
            yield Row(case.name, label, 1e3 * taken, half, taken / before if before else 1.0, note=expected)
            before = taken


def cases(device: str) -> Iterator[Case]:
    """Measures, collections, and training steps of three optimizers."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    def labels(n: int) -> Tensor:
        return torch.randint(10, (n,), generator=g).to(device)

    def of_net(function: Callable[..., object], n: int, width: int, layers: int) -> Callable[[], object]:
        model = build("mlp", (width,), 10, generator=g, hidden=(width,) * layers).to(device)
        return partial(function, model, (normal(n, width), labels(n)), nn.CrossEntropyLoss(), progress=False)

    def step(make: Callable[[nn.Module], Optimizer], width: int) -> Callable[[], object]:
        model = build("mlp", (width,), 10, generator=g, hidden=(width,)).to(device)
        x, y, optimizer = normal(256, width), labels(256), make(model)

        def once() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return once

    def sgd(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01)

    gradients: Callable[..., Any] = partial(collect, gram=False)
    sides = (256, 512, 1024)
    yield Case("target linearity, d = 256", "n", (4096, 8192, 16384), 1,
               lambda n: partial(target_linearity, normal(n, 256), labels(n), ridge=1.0))  # fmt: skip
    yield Case("target linearity, n = 4,096", "d", sides, 2,
               lambda d: partial(target_linearity, normal(4096, d), labels(4096), ridge=1.0))  # fmt: skip
    yield Case("effective rank", "d = k", sides, 3, lambda d: partial(weight_spectrum, normal(d, d)))
    yield Case("polar factor", "d = k", sides, 3, lambda d: partial(polar, normal(d, d)))
    yield Case("collect, two layers of 512", "n", (1024, 2048, 4096), 1, lambda n: of_net(gradients, n, 512, 1))
    yield Case("collect, n = 1,024", "d = k", sides, 2, lambda d: of_net(gradients, 1024, d, 1))
    yield Case("measure, n = 256, d = 256", "layers", (2, 4, 8), 1, lambda l: of_net(measure, 256, 256, l))
    yield Case("SGD step, n = 256", "d = k", sides, 2, lambda d: step(sgd, d))
    yield Case("FreeMuon step, n = 256", "d = k", sides, 3, lambda d: step(FreeMuon, d))
    yield Case("whitened step, n = 256", "d = k", sides, 3, lambda d: step(lambda net: GramWhitened(sgd(net), net), d))
