"""gramscope beside other programs that compute the same: time and memory of the peer over ours, in one process and thread."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.peer_cases import CASES, SINGLE, PeerCase
from benchmarks.timing import compare, peak_extra_bytes
from gramscope.errors import InputError, ResultWarning

MEGABYTE = 1e6


@dataclass(frozen=True)
class PeerRow:
    """One comparison; ratios are the peer's over ours, so that above 1 gramscope is ahead.

    Args:
        case: what is computed.
        peer: who else computes it.
        time: seconds of the peer over ours.
        memory: peak of additional memory of the peer over ours.
        met: whether both are at least 1; None for a peer that is not installed.
        ours_ms, peer_ms: milliseconds, medians.
        ours_mb, peer_mb: megabytes at the peak, beyond what was in use before.
        note: how far the results agree, or what to install.
    """

    case: str
    peer: str
    time: float | None = None
    memory: float | None = None
    met: bool | None = None
    ours_ms: float | None = None
    peer_ms: float | None = None
    ours_mb: float | None = None
    peer_mb: float | None = None
    note: str = ""

    def line(self) -> str:
        """The row as one line of text."""
        if self.time is None or self.memory is None:
            return f"{self.case:40} {self.peer:28} {self.note}"
        verdict = "met" if self.met else "not met"
        return (
            f"{self.case:40} {self.peer:28} time {self.time:6.2f} ({self.peer_ms:.4g} ms / {self.ours_ms:.4g} ms)"
            f"  memory {self.memory:6.2f} ({self.peer_mb:.4g} MB / {self.ours_mb:.4g} MB)  ≥ 1: {verdict}  ({self.note})"
        )


def run(device: str = "cpu", seconds: float = 2.0, scale: float = 1.0) -> Iterator[PeerRow]:
    """All comparisons; peers that are not installed are named with what to install.

    Args:
        device: must be the CPU, where all peers run.
        seconds: time for each comparison.
        scale: factor of all sizes, for tests.
    """
    if torch.device(device).type != "cpu":
        raise InputError(f"device = {device}: peers are compared on the CPU, in one thread")
    generator = torch.Generator().manual_seed(0)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResultWarning)  # n < d explains any target, also in the peers
        for package, maker in CASES:
            missing = _missing(package)
            if missing:
                yield PeerRow(str(maker.__doc__).split(",")[0].rstrip("."), package, note=missing)
                continue
            for case in maker(generator, scale):
                yield measure(case, seconds)


def measure(case: PeerCase, seconds: float) -> PeerRow:
    """Time and memory of both ways, in alternation."""
    off = case.difference(case.ours(), case.theirs())
    if not off <= SINGLE:
        raise InputError(f"{case.case}: gramscope and {case.peer} differ by {off:.1e} of the result")
    ways = {"ours": case.ours, "theirs": case.theirs}
    times = compare(ways, seconds=seconds, warm_up=1, clock=time.process_time)
    ours, theirs = (_megabytes(way) for way in (case.ours, case.theirs))
    faster, smaller = times["theirs"] / times["ours"], theirs / ours
    installed = f"{case.package} {version(case.package)}, " if case.package else ""
    note = f"{installed}results agree to {off:.0e}"
    met = faster >= 1 <= smaller
    milliseconds = 1e3 * times["ours"], 1e3 * times["theirs"]
    return PeerRow(case.case, case.peer, faster, smaller, met, *milliseconds, ours, theirs, note)


def _megabytes(way: Callable[[], Any]) -> float:
    """The smallest peak of three runs: what the C library keeps between allocations varies by megabytes."""
    return max(min(peak_extra_bytes(way) for _ in range(3)), 4096) / MEGABYTE


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch, and NumPy where threadpoolctl is installed (it comes with scikit-learn), use one thread."""
    before = torch.get_num_threads()
    limits: Any = None
    with suppress(ImportError):
        limits = import_module("threadpoolctl").threadpool_limits(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if limits is not None:
            limits.restore_original_limits()


def _missing(package: str) -> str:
    """What to install, or nothing."""
    if not package:
        return ""
    try:
        version(package)
    except PackageNotFoundError:
        return f"not installed: pip install {package}, or pip install 'gramscope[peers]' for all peers"
    return ""
