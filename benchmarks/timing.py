"""Timing several ways of doing one thing against each other: interleaved, in one run, as medians."""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gramscope.errors import InputError


@dataclass(frozen=True)
class Row:
    """One line of a benchmark table: what ran, its time or memory, and the ratio to the baseline of the same case."""

    case: str
    method: str
    value: float
    baseline: str
    ratio: float
    goal: str = ""
    met: bool | None = None
    note: str = ""
    unit: str = "ms"

    def line(self) -> str:
        """The row as one line of text."""
        if math.isnan(self.value):
            return f"{self.case:40} {self.method:28} {self.note}"
        goal = f"  goal {self.goal}: {'met' if self.met else 'not met'}" if self.met is not None else ""
        text = (
            f"{self.case:40} {self.method:28} {self.value:10.3f} {self.unit}  {self.ratio:7.3f}× {self.baseline}{goal}"
        )
        return text + (f"  ({self.note})" if self.note else "")


def ratio_row(
    case: str,
    method: str,
    times: Mapping[str, float],
    baseline: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    per_unit: float = 1e3,
    **facts: Any,
) -> Row:
    """The row of ``times[method] / times[baseline]`` (seconds, or bytes with another ``per_unit``), with its goal."""
    ratio = times[method] / times[baseline]
    if at_most is not None:
        facts |= {"goal": f"≤ {at_most:g}", "met": ratio <= at_most}
    if at_least is not None:
        facts |= {"goal": f"≥ {at_least:g}", "met": ratio >= at_least}
    return Row(case, method, per_unit * times[method], baseline, ratio, **facts)


def synchronize(device: torch.device | str) -> None:
    """Wait for queued work of a CUDA device; nothing to do elsewhere."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    ways: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    seconds: float = 2.0,
    warm_up: int = 2,
    least: int = 3,
    calls: int = 1,
) -> dict[str, float]:
    """Median seconds per call of each way, measured in alternation so that drift hits all of them alike.

    With one thread on a CPU these are seconds of the processor, so that other programs do not count.

    Args:
        ways: name → function without arguments.
        device: where the functions run; CUDA is synchronised around each measurement.
        seconds: time to spend on all ways together after warm-up.
        warm_up: untimed calls of each way.
        least: rounds at least, also when they take longer than ``seconds``.
        calls: calls within one timed measurement (raise it for microsecond functions).
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for way in ways.values():
        for _ in range(warm_up):
            way()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < least or time.perf_counter() < end:
        for name, way in ways.items():
            start = clock()
            for _ in range(calls):
                way()
            synchronize(device)
            times[name].append((clock() - start) / calls)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def peak_extra_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Largest memory in use during ``work`` above what was in use before it (resident set on the CPU)."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with contextlib.suppress(OSError, AttributeError):  # so that memory the C library would reuse counts too
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the largest resident set so far
        before = _resident_bytes("VmRSS")
        work()
        return _resident_bytes("VmHWM") - before
    except OSError as error:
        raise InputError(f"peak memory is measured with Linux's /proc/self/clear_refs: {error}") from error


def _resident_bytes(kind: str) -> int:
    """The resident set of this process now (``VmRSS``), or the largest since it was reset (``VmHWM``)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition(f"{kind}:")[2].split()[0])
