"""How fast the measures are against the obvious way: target linearity, surrogate, AGOP, collecting, monitoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from benchmarks.timing import Row, compare, peak_extra_bytes, ratio_row
from benchmarks.training import train
from gramscope.instruments.agop import agop
from gramscope.instruments.monitor import Monitor, geometric
from gramscope.measures.linearity import surrogate, target_linearity
from gramscope.statistics.collect import collect
from gramscope_lab.nets import build

MEGABYTE = 2**20
IMAGE = (3, 32, 32)


def run(device: str = "cpu", seconds: float = 4.0) -> Iterator[Row]:
    """All cases; every ratio is measured within this call."""
    generator = torch.Generator().manual_seed(0)
    yield from linearity(device, seconds, generator)
    yield from input_agop(device, seconds, generator)
    yield from collecting(device, seconds, generator)
    yield from monitoring(device, seconds, generator)


def linearity(device: str, seconds: float, generator: torch.Generator) -> Iterator[Row]:
    """Target linearity and surrogate of n × 256 features: memory at growing n, and time against the n×n Gram."""

    def features(n: int) -> tuple[Tensor, Tensor]:
        H, y = torch.randn(n, 256, generator=generator), torch.randint(10, (n,), generator=generator)
        return H.to(device), y.to(device)

    for n in (20_000, 200_000):
        given = features(n)
        extra = peak_extra_bytes(lambda g=given: (target_linearity(*g), surrogate(*g)), device) / MEGABYTE  # type: ignore[misc]
        share = extra / 100
        yield Row(f"memory of both, n = {n:,}", "gramscope", extra, "100 MB", share, "≤ 1", share < 1, unit="MB")
    H, y = features(20_000)
    Y = F.one_hot(y, 10).float()
    Y -= Y.mean(0)

    def gram_linearity() -> Tensor:
        # ‖Y − Ŷ‖² = λ² tr Yᵀ(G + λI)⁻²Y with the n×n Gram, as published code has it
        residual: Tensor = torch.linalg.solve((H @ H.mT).diagonal_scatter((H * H).sum(1) + 1), Y)
        return 1 - residual.square().sum() / Y.square().sum()

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "target linearity 20,000×256": (lambda: target_linearity(H, y, ridge=1.0), gram_linearity),
        "surrogate 20,000×256": (lambda: surrogate(H, y), lambda: (Y.mT @ (H @ H.mT) @ Y).trace()),
    }
    for case, (ours, naive) in pairs.items():
        times = compare({"gramscope": ours}, device=device, seconds=seconds / 4)
        times |= compare({"n×n Gram": naive}, device=device, seconds=0.0, warm_up=0, least=1)
        yield ratio_row(case, "n×n Gram", times, "gramscope", at_least=100)
        yield ratio_row(case, "gramscope", times, "gramscope")


def input_agop(device: str, seconds: float, generator: torch.Generator) -> Iterator[Row]:
    """AGOP at the input of 3072→256→256→10 against per-sample Jacobians of the input."""
    model = build("mlp", (3072,), 10, generator=generator, hidden=(256, 256)).to(device)
    x = torch.randn(512, 3072, generator=generator).to(device)
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def dense() -> Tensor:
        total = torch.zeros(3072, 3072, device=device)
        one = jacrev(lambda sample: functional_call(model, parameters, (sample[None],))[0])
        for part in torch.split(x, 64):
            J = vmap(one)(part).flatten(0, 1)
            total.addmm_(J.mT, J)
        return total / x.shape[0]

    times = compare(
        {"vmap(jacrev)": dense, "gramscope": lambda: agop(model, x, "hidden1")}, device=device, seconds=seconds
    )
    case = "input AGOP, 512 samples"
    yield ratio_row(case, "vmap(jacrev)", times, "gramscope", at_least=10)
    yield ratio_row(case, "gramscope", times, "gramscope")


def collecting(device: str, seconds: float, generator: torch.Generator) -> Iterator[Row]:
    """Capture plus collect of D, Σ and HᵀY against the plain forward and backward."""
    resnet = build("resnet", IMAGE, 10, generator=generator, widths=(16, 32), blocks=2, norm="batch")
    cases: list[tuple[str, nn.Module, int, float]] = [
        ("collect, MLP 3072→256→10, batch 64", build("mlp", IMAGE, 10, generator=generator), 2048, 1.5),
        ("collect, ResNet, batch 64", resnet, 256, 2.0),
    ]
    for case, net, samples, goal in cases:
        model = net.to(device).eval()
        x, y = _images(samples, device, generator)
        loader = list(zip(torch.split(x, 64), torch.split(y, 64), strict=True))
        plain = partial(_forward_backward, model, loader)
        ours = partial(collect, model, loader, nn.CrossEntropyLoss(), gram=False)
        times = compare({"forward/backward": plain, "gramscope": ours}, device=device, seconds=seconds)
        yield ratio_row(case, "forward/backward", times, "forward/backward")
        yield ratio_row(case, "gramscope", times, "forward/backward", at_most=goal)


def _forward_backward(model: nn.Module, loader: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


def monitoring(device: str, seconds: float, generator: torch.Generator) -> Iterator[Row]:
    """What the default Monitor costs in a run of the papers' MLP and CNN: its records against the run's steps.

    The run has 20 epochs of 782 steps. The time of a step and of a record are measured and scaled to the run's counts.
    """
    steps = 20 * 782
    records = sum(geometric(step) for step in range(steps + 1))
    for case in ("MLP", "CNN"):
        model = build(case.lower(), IMAGE, 10, generator=generator).to(device)
        x, y = _images(1024, device, generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        monitor = Monitor(model, (x, y), nn.CrossEntropyLoss())

        loss = lambda net, pair: F.cross_entropy(net(pair[0]), pair[1])  # noqa: E731
        step = train(model, [optimizer], loss, (x[:64], y[:64]), 64, 10**9, generator).__next__
        times = compare({"step": step, "record": monitor.record}, device=device, seconds=seconds)
        share = records * times["record"] / (steps * times["step"])
        note = f"{records} records in {steps:,} steps; step {1e3 * times['step']:.1f} ms"
        yield Row(
            f"Monitor, {case}", "record", 1e3 * times["record"], "20 epochs", share, "≤ 0.05", share <= 0.05, note
        )


def _images(n: int, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images and labels of ten classes."""
    x, y = torch.randn(n, *IMAGE, generator=generator), torch.randint(10, (n,), generator=generator)
    return x.to(device), y.to(device)
