"""The benchmarks by name, imported only when they run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gramscope.errors import InputError

if TYPE_CHECKING:
    from gramscope.bench.timing import Row

BENCHMARKS = {
    "measure": "measuring every layer against plain forward and backward passes",
    "vcl": "VCL's solvers against Algorithm 1 to the letter and SGD",
    "whiten": "Gram-whitened steps against the optimizers they wrap",
    "train": "training epochs against pure arithmetic and a DataLoader; many runs at once",
}


def run_benchmark(name: str, *, device: str = "cpu", seconds: float | None = None) -> list[Row]:
    """Run one benchmark.

    Args:
        name: a key of :data:`BENCHMARKS`.
        device: where.
        seconds: time to spend on each comparison; the benchmark's own choice by default.
    """
    if name not in BENCHMARKS or find_spec(f"gramscope.bench.{name}") is None:
        raise InputError(f"benchmark {name!r} is not known; there are: {', '.join(BENCHMARKS)}")
    run: Callable[..., list[Row]] = import_module(f"gramscope.bench.{name}").run
    arguments: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
    return run(device=device, **arguments)
