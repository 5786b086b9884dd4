"""How fast the measures are against the obvious way: target linearity, surrogate, AGOP, collecting, monitoring."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from gramscope.bench.timing import Row, compare, peak_extra_bytes
from gramscope.instruments.agop import agop
from gramscope.instruments.monitor import Monitor, geometric
from gramscope.measures.linearity import surrogate, target_linearity
from gramscope.statistics.collect import collect

MEGABYTE = 2**20


def run(device: str = "cpu", seconds: float = 4.0) -> list[Row]:
    """All cases; every ratio is measured within this call."""
    generator = torch.Generator().manual_seed(0)
    return [
        *linearity(device, seconds, generator),
        *input_agop(device, seconds, generator),
        *collecting(device, seconds, generator),
        *monitoring(device, generator),
    ]


def linearity(device: str, seconds: float, generator: torch.Generator) -> list[Row]:
    """Target linearity and surrogate of 20,000 × 256 features against the n×n Gram; memory at growing n."""
    n, d, c = 20_000, 256, 10
    H = torch.randn(n, d, generator=generator).to(device)
    y = torch.randint(c, (n,), generator=generator).to(device)
    Y = F.one_hot(y, c).float()
    Y -= Y.mean(0)

    def gram_linearity() -> Tensor:
        # ‖Y − Ŷ‖² = λ² tr Yᵀ(G + λI)⁻²Y with the n×n Gram, as published code has it
        G = H @ H.mT
        G.diagonal().add_(1.0)
        residual: Tensor = torch.linalg.solve(G, Y)
        return 1 - residual.square().sum() / Y.square().sum()

    def gram_surrogate() -> Tensor:
        return (Y.mT @ (H @ H.mT) @ Y).diagonal().sum()

    rows = []
    for size in (20_000, 200_000):
        features = torch.randn(size, d, generator=generator).to(device)
        labels = torch.randint(c, (size,), generator=generator).to(device)
        extra = peak_extra_bytes(lambda f=features, t=labels: (target_linearity(f, t), surrogate(f, t)), device)  # type: ignore[misc]
        megabytes = extra / MEGABYTE
        note = "peak extra megabytes; ratio is to 100 MB"
        rows.append(
            Row(
                f"memory of both, n = {size:,}",
                "gramscope",
                megabytes,
                "100 MB",
                megabytes / 100,
                "≤ 1",
                extra < 100 * MEGABYTE,
                note,
            )
        )
    pairs: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]] = [
        ("target linearity 20,000×256", lambda: target_linearity(H, y, ridge=1.0), gram_linearity),
        ("surrogate 20,000×256", lambda: surrogate(H, y), gram_surrogate),
    ]
    for case, ours, naive in pairs:
        times = compare({"gramscope": ours}, device=device, seconds=seconds / 4)
        times |= compare({"n×n Gram": naive}, device=device, seconds=0.0, warm_up=0, least=1)
        ratio = times["n×n Gram"] / times["gramscope"]
        rows.append(Row(case, "n×n Gram", 1e3 * times["n×n Gram"], "gramscope", ratio, "≥ 100", ratio >= 100))
        rows.append(Row(case, "gramscope", 1e3 * times["gramscope"], "gramscope", 1.0))
    return rows


def input_agop(device: str, seconds: float, generator: torch.Generator) -> list[Row]:
    """AGOP at the input of 3072→256→256→10 against per-sample Jacobians of the input."""
    model = _mlp(3072, (256, 256), generator).to(device)
    x = torch.randn(512, 3072, generator=generator).to(device)
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def dense() -> Tensor:
        total = torch.zeros(3072, 3072, device=device)
        one = jacrev(lambda sample: functional_call(model, parameters, (sample,)))
        for part in torch.split(x, 64):
            J = vmap(one)(part).flatten(0, 1)
            total.addmm_(J.mT, J)
        return total / x.shape[0]

    times = compare({"vmap(jacrev)": dense, "gramscope": lambda: agop(model, x, "0")}, device=device, seconds=seconds)
    ratio = times["vmap(jacrev)"] / times["gramscope"]
    case = "input AGOP, 512 samples"
    return [
        Row(case, "vmap(jacrev)", 1e3 * times["vmap(jacrev)"], "gramscope", ratio, "≥ 10", ratio >= 10),
        Row(case, "gramscope", 1e3 * times["gramscope"], "gramscope", 1.0),
    ]


def collecting(device: str, seconds: float, generator: torch.Generator) -> list[Row]:
    """Capture plus collect of D, Σ and HᵀY against the plain forward and backward."""
    rows = []
    cases: list[tuple[str, nn.Module, tuple[int, ...], float]] = [
        ("collect, MLP 3072→256→10, batch 64", _mlp(3072, (256,), generator), (3, 32, 32), 1.5),
        ("collect, ResNet-like CNN, batch 64", _ResNet(), (3, 32, 32), 2.0),
    ]
    for case, net, shape, goal in cases:
        model = net.to(device).eval()
        samples = 2048 if goal == 1.5 else 256
        x = torch.randn(samples, *shape, generator=generator).to(device)
        y = torch.randint(10, (samples,), generator=generator).to(device)
        loader = list(zip(torch.split(x, 64), torch.split(y, 64), strict=True))

        def plain(model: nn.Module = model, loader: list[tuple[Tensor, Tensor]] = loader) -> None:
            for inputs, target in loader:
                model.zero_grad()
                F.cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]

        def ours(model: nn.Module = model, loader: list[tuple[Tensor, Tensor]] = loader) -> None:
            collect(model, loader, nn.CrossEntropyLoss(), gram=False)

        times = compare({"forward/backward": plain, "gramscope": ours}, device=device, seconds=seconds)
        ratio = times["gramscope"] / times["forward/backward"]
        rows.append(Row(case, "forward/backward", 1e3 * times["forward/backward"], "forward/backward", 1.0))
        rows.append(
            Row(case, "gramscope", 1e3 * times["gramscope"], "forward/backward", ratio, f"≤ {goal}", ratio <= goal)
        )
    return rows


def monitoring(device: str, generator: torch.Generator) -> list[Row]:
    """What the default Monitor costs in a run of the papers' MLP and CNN: its records against the run's steps.

    The run has 20 epochs of 782 steps. The time of a step and of a record are measured and scaled to the run's counts.
    """
    steps = 20 * 782
    records = sum(geometric(step) for step in range(steps + 1))
    rows = []
    for case, net in (("MLP", _mlp(3072, (256,), generator)), ("CNN", _cnn())):
        model = net.to(device)
        x = torch.randn(1024, 3, 32, 32, generator=generator).to(device)
        y = torch.randint(10, (1024,), generator=generator).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        monitor = Monitor(model, (x, y), nn.CrossEntropyLoss())

        def step(
            model: nn.Module = model, x: Tensor = x, y: Tensor = y, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x[:64]), y[:64]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        times = compare({"step": step, "record": monitor.record}, device=device, seconds=3.0)
        share = records * times["record"] / (steps * times["step"])
        note = f"{records} records in {steps:,} steps; step {1e3 * times['step']:.1f} ms"
        rows.append(
            Row(f"Monitor, {case}", "record", 1e3 * times["record"], "20 epochs", share, "≤ 0.05", share <= 0.05, note)
        )
    return rows


def _mlp(inputs: int, hidden: tuple[int, ...], generator: torch.Generator) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(-3)] if inputs == 3072 and len(hidden) == 1 else []
    sizes = (inputs, *hidden)
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def _cnn() -> nn.Module:
    """The CNN of [Gram] Fig. 6."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class _ResNet(nn.Sequential):
    """Two stages of residual blocks, 16 and 32 channels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), _Block(16), _Block(16),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), _Block(32), _Block(32),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
