"""How cost grows: in samples n, widths d and k, layers and processes; and flops beside the machine's matmul peak."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.timing import compare
from gramscope.distributed.exchange import leave_together
from gramscope.instruments.measure import measure
from gramscope.measures.linearity import target_linearity
from gramscope.measures.spectrum import large_weight_spectrum, weight_spectrum
from gramscope.optim.free_muon import FreeMuon
from gramscope.optim.polar import polar
from gramscope.optim.whitening import GramWhitened
from gramscope.statistics.collect import collect
from gramscope_lab.nets import build

#: side of the matrix product whose rate counts as the machine's peak
PEAK_SIDE = 2048


@dataclass(frozen=True)
class Growth:
    """How the time of one thing grows in one size.

    Args:
        case: what was timed.
        variable: which size grew.
        sizes: its values.
        milliseconds: at each of them.
        exponent: slope of log time over log size, over the larger three sizes.
        expected: of the largest term of the cost.
        gflops: billions of operations a second at the largest size; ``None`` where they are not counted.
        share: of the matmul peak of the same precision.
        note: what to know about it.
    """

    case: str
    variable: str
    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]
    exponent: float
    expected: float
    gflops: float | None = None
    share: float | None = None
    note: str = ""

    def line(self) -> str:
        """The row as one line of text."""
        times, sizes = (" ".join(f"{value:.4g}" for value in values) for values in (self.milliseconds, self.sizes))
        text = f"{self.case:32} {times} ms at {self.variable} = {sizes}"
        text += f"  exponent {self.exponent:.2f}, expected {self.expected:g}"
        if self.share is not None:
            text += f"  {self.gflops:.1f} GFlop/s, {self.share:.2f} of the peak"
        return text + (f"  ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Case:
    """Something to time at several sizes: ``make(size)`` prepares it, ``flops(size)`` counts its operations."""

    name: str
    variable: str
    sizes: Sequence[int]
    expected: float
    make: Callable[[int], Callable[[], object]]
    flops: Callable[[int], float] | None = None
    dtype: torch.dtype = torch.float64
    warm_up: int = 1


def run(device: str = "cpu", seconds: float = 0.4) -> Iterator[Growth]:
    """All cases, each size for about ``seconds``."""
    peaks: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.float64):
        peak = peaks[dtype] = matmul_peak(device, dtype, seconds)
        name, milliseconds = str(dtype).removeprefix("torch."), 1e3 * 2 * PEAK_SIDE**3 / peak
        note = "counts as the peak"
        yield Growth(f"matmul, {name}", "side", (PEAK_SIDE,), (milliseconds,), math.nan, 3.0, peak / 1e9, 1.0, note)
    for case in cases(device):
        yield _grow(case, device, seconds, peaks)
    if device == "cpu":
        yield processes()


def matmul_peak(device: str, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of a square matrix product."""
    side = PEAK_SIDE
    A, B = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(A)
    taken = compare({"matmul": lambda: torch.mm(A, B, out=out)}, device=device, seconds=seconds)["matmul"]
    return 2 * side**3 / taken


def fitted_exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Least-squares slope of log time over log size, over the larger three sizes.

    >>> round(fitted_exponent([1, 2, 4, 8], [9.0, 4.0, 16.0, 64.0]), 6)
    2.0
    """
    x = [math.log(size) for size in sizes[-3:]]
    y = [math.log(t) for t in times[-3:]]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def _grow(case: Case, device: str, seconds: float, peaks: dict[torch.dtype, float]) -> Growth:
    times = []
    for size in case.sizes:
        times.append(compare({"it": case.make(size)}, device=device, seconds=seconds, warm_up=case.warm_up)["it"])
    rate = None if case.flops is None else case.flops(case.sizes[-1]) / times[-1]
    return Growth(
        case.name,
        case.variable,
        tuple(case.sizes),
        tuple(1e3 * t for t in times),
        fitted_exponent(case.sizes, times),
        case.expected,
        None if rate is None else rate / 1e9,
        None if rate is None else rate / peaks[case.dtype],
    )


def cases(device: str) -> Iterator[Case]:
    """Measures, collections, steps of both optimizers and training steps."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device)

    def labels(n: int) -> torch.Tensor:
        return torch.randint(10, (n,), generator=g).to(device)

    def linearity(n: int, d: int) -> Callable[[], object]:
        H, y = normal(n, d), labels(n)
        return lambda: target_linearity(H, y, ridge=1.0)

    def of_net(function: Callable[..., object], n: int, width: int, layers: int) -> Callable[[], object]:
        model = build("mlp", (width,), 10, generator=g, hidden=(width,) * layers).to(device)
        x, y = normal(n, width), labels(n)
        return lambda: function(model, (x, y), nn.CrossEntropyLoss(), progress=False)

    def step(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], n: int, width: int) -> Callable[[], object]:
        model = build("mlp", (width,), 10, generator=g, hidden=(width,)).to(device)
        x, y, optimizer = normal(n, width), labels(n), optimizer_of(model)

        def once() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return once

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def free(model: nn.Module) -> torch.optim.Optimizer:
        return FreeMuon(model)

    def whitened(model: nn.Module) -> torch.optim.Optimizer:
        return GramWhitened(sgd(model), model)

    small, sides = (512, 1024, 2048, 4096), (256, 512, 1024)
    yield Case("target linearity, d = 256", "n", (4096, 8192, 16384), 1, lambda n: linearity(n, 256),
               lambda n: 1.0 * n * 256**2, torch.float32)  # fmt: skip
    yield Case("target linearity, n = 4096", "d", sides, 2, lambda d: linearity(4096, d),
               lambda d: 4096.0 * d**2 + d**3 / 3, torch.float32)  # fmt: skip
    yield Case("effective rank", "d = k", sides, 3, lambda d: _call(weight_spectrum, normal(d, d)),
               lambda d: 8 / 3 * d**3)  # fmt: skip
    yield Case("estimated spectrum", "d = k", (512, 1024, 2048), 2, lambda d: _call(large_weight_spectrum, normal(d, d)),
               lambda d: (2 * 64 * 16 + 2 * 14 * 40) * 2.0 * d**2, torch.float32)  # fmt: skip
    yield Case("polar factor", "d = k", sides, 3, lambda d: _call(polar, normal(d, d)))
    yield Case("collect, two layers of 512", "n", small, 1, lambda n: of_net(_collected, n, 512, 1),
               lambda n: 5.0 * n * 512**2, torch.float32)  # fmt: skip
    yield Case("collect, n = 1024", "d = k", sides, 2, lambda d: of_net(_collected, 1024, d, 1),
               lambda d: 5.0 * 1024 * d**2, torch.float32)  # fmt: skip
    yield Case("measure, n = 256, d = 256", "layers", (2, 4, 8), 1, lambda l: of_net(measure, 256, 256, l))
    yield Case(
        "SGD step, n = 256", "d = k", sides, 2, lambda d: step(sgd, 256, d), lambda d: 4.0 * 256 * d**2, torch.float32
    )
    yield Case("FreeMuon step, n = 256", "d = k", sides, 3, lambda d: step(free, 256, d))
    yield Case("whitened step, n = 256", "d = k", sides, 3, lambda d: step(whitened, 256, d))


def _call(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    return lambda: function(*arguments)


def _collected(*arguments: Any, **options: Any) -> object:
    return collect(*arguments, gram=False, **options)


def processes(counts: Sequence[int] = (1, 2, 4)) -> Growth:
    """Collecting 2,048 samples in each of several gloo processes: time grows where there are fewer cores than processes."""
    times = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (count, str(Path(folder) / "store"), str(Path(folder) / "seconds"))
            torch.multiprocessing.spawn(_of_rank, arguments, nprocs=count)  # type: ignore[attr-defined,no-untyped-call]
            times.append(float(Path(arguments[2]).read_text(encoding="ascii")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    note = f"2,048 samples in each; {cores} cores, so that the time grows beyond {cores} processes"
    milliseconds = tuple(1e3 * t for t in times)
    within = [count for count in counts if count <= cores]
    exponent = fitted_exponent(within, times[: len(within)]) if len(within) > 1 else math.nan
    return Growth("collect over gloo", "processes", tuple(counts), milliseconds, exponent, 0.0, note=note)


def _of_rank(rank: int, count: int, store: str, result: str) -> None:
    """Body of one of ``count`` processes; the first writes the seconds of a collection."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    g = torch.Generator().manual_seed(0)
    model = build("mlp", (256,), 10, generator=g, hidden=(256,))
    data = (torch.randn(2048, 256, generator=g), torch.randint(10, (2048,), generator=g))
    times = []
    for _ in range(4):
        torch.distributed.barrier()
        start = time.perf_counter()
        collect(model, data, nn.CrossEntropyLoss(), progress=False)
        times.append(time.perf_counter() - start)
    if rank == 0:
        Path(result).write_text(str(min(times[1:])), encoding="ascii")
    leave_together()
