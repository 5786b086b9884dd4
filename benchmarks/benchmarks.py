"""The benchmarks by name; the module of each is imported when it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gramscope.errors import InputError

if TYPE_CHECKING:
    from benchmarks.peers import PeerRow
    from benchmarks.scale import Growth
    from benchmarks.timing import Row

#: name → what it compares
BENCHMARKS = {
    "measure": "measuring every layer against plain forward and backward passes",
    "vcl": "VCL's solvers against Algorithm 1 to the letter and SGD",
    "whiten": "Gram-whitened steps against the optimizers they wrap",
    "peers": "gramscope against scikit-learn, curvlinops, xrfm and plain programs: time and memory",
    "train": "training epochs against pure arithmetic and a DataLoader; many runs at once",
    "scale": "how time grows in samples, widths, layers and processes, and flops beside the matmul peak",
}
#: runs all of them
ALL = "all"
#: comparisons of results rather than speed; :func:`benchmarks.optimizers.compare_optimizers` runs this one
COMPARISONS = {
    "optimizers": "VCL without arguments against tuned SGD, AdamW and Muon: accuracy, spread over rates, seconds",
}
#: name → module of this folder, where they differ
_MODULES = {"measure": "measure_speed", "vcl": "vcl_speed", "train": "train_speed"}


def run_benchmark(name: str, *, device: str = "cpu", seconds: float | None = None) -> Iterator[Row | Growth | PeerRow]:
    """Run one benchmark; each row comes as soon as it is measured.

    Args:
        name: a key of :data:`BENCHMARKS`.
        device: where to run it.
        seconds: time to spend on each comparison; the benchmark's own choice by default.
    """
    if name not in BENCHMARKS:
        raise InputError(f"benchmark {name!r} is not known; there are: {', '.join(BENCHMARKS)}")
    if seconds is not None and not 0 <= seconds < math.inf:
        raise InputError(f"seconds = {seconds:g}: must be a finite number of at least 0")
    run: Callable[..., Iterator[Row | Growth | PeerRow]] = import_module(f"benchmarks.{_MODULES.get(name, name)}").run
    arguments: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
    return run(device=device, **arguments)
