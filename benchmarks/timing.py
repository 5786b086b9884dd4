"""Timing several ways of doing one thing against each other: interleaved, in one run, as medians."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One line of a benchmark table: what ran, how long it took, and its ratio to the baseline of the same case."""

    case: str
    method: str
    milliseconds: float
    baseline: str
    ratio: float
    goal: str = ""
    met: bool | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values for JSON."""
        return asdict(self)

    def line(self) -> str:
        """The row as one line of text."""
        goal = f"  goal {self.goal}: {'met' if self.met else 'not met'}" if self.met is not None else ""
        text = f"{self.case:40} {self.method:28} {self.milliseconds:10.3f} ms  {self.ratio:7.3f}× {self.baseline}{goal}"
        return text + (f"  ({self.note})" if self.note else "")


def ratio_row(
    case: str,
    method: str,
    times: Mapping[str, float],
    baseline: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    **facts: Any,
) -> Row:
    """The row of ``times[method] / times[baseline]`` (seconds), with its goal and whether it is met."""
    ratio = times[method] / times[baseline]
    if at_most is not None:
        facts |= {"goal": f"≤ {at_most:g}", "met": ratio <= at_most}
    if at_least is not None:
        facts |= {"goal": f"≥ {at_least:g}", "met": ratio >= at_least}
    return Row(case, method, 1e3 * times[method], baseline, ratio, **facts)


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
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds per call of each way, measured in alternation so that drift hits all of them alike.

    Args:
        ways: name → function without arguments.
        device: where the functions run; CUDA is synchronised around each measurement.
        seconds: time to spend on all ways together after warm-up.
        warm_up: untimed calls of each way.
        least: rounds at least, also when they take longer than ``seconds``.
        calls: calls within one timed measurement (raise it for microsecond functions).
        clock: what measures the calls; ``time.process_time`` is the time of the processor, free of other programs'.
    """
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
    _release_free_memory()
    before = peak = _resident_bytes()
    if _reset_peak():
        work()
        return _peak_bytes() - before
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident_bytes())
            done.wait(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        peak = max(peak, _resident_bytes())
        done.set()
        watcher.join()
    return peak - before


def _release_free_memory() -> None:
    """Let the C library return what it holds, so that memory it would reuse counts too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_peak() -> bool:
    """Let the system forget this process's largest resident set; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    """Largest resident set since it was reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _resident_bytes() -> int:
    """Resident set size of this process; Linux only, like the figures this is used for."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read a thousand times a second
        return int(file.read().split()[1]) * 4096
