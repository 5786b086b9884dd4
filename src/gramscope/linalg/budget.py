"""Every rule about memory: what ``memory=`` bytes allow for one layer, as functions of shapes.

Matrices that a measurement keeps or forms of one layer, and a chunk of Jacobians, take at most a few times the budget.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gramscope.errors import InputError

#: bytes by default
MEMORY = 256 * 2**20
#: bytes of a chunk of Jacobians on the CPU, whatever is allowed: larger chunks leave its caches and are slower
CPU_CHUNK = 4 * 2**20
#: least and largest number of random probes of a layer, and groups of them from whose spread errors are taken
GROUPS, FEWEST, MOST = 16, 64, 512
#: d up to which HᵀH is kept whatever the budget
GRAM_SIDE = 4096
#: d from which few rows are kept themselves in place of HᵀH
ROWS_SIDE = 512
#: seconds between two calls of the C library, and how many times longer than a call takes
PAUSE, SHARE = 0.5, 10


_next = 0.0


@dataclass(frozen=True)
class Budget:
    """What fits ``memory`` bytes.

    >>> Budget().is_large((4096, 11_008)), Budget().is_large((1024, 1024)), Budget(2**22).is_large((1024, 1024))
    (True, False, True)
    >>> Budget().probes(8192), Budget().probes(28_672), Budget(1).probes(8192)
    (512, 144, 64)
    """

    memory: int = MEMORY

    def __post_init__(self) -> None:
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory <= 0:
            raise InputError(f"memory={self.memory!r}: give a positive whole number of bytes")

    def __str__(self) -> str:
        return f"{self.memory / 2**20:,.0f} MiB of memory="

    def probes(self, d: int) -> int:
        """Random probes of length d, of which eight float64 matrices fit; at least 64."""
        return min(max(self.memory // (64 * d) // GROUPS * GROUPS, FEWEST), MOST)

    def is_large(self, shape: Sequence[int]) -> bool:
        """Whether exact measures of a weight ``[..., k, d]`` take more, and products with probes less.

        They need k×k or d×d matrices, whichever are smaller, three at a time.
        """
        *stack, k, d = shape
        side = min(k, d)
        return math.prod(stack) * 24 * side**2 > self.memory and k * self.probes(d) < side**2

    def keeps_square(self, shape: Sequence[int], each: int) -> bool:
        """Whether k×k sums of a weight ``[..., k, d]`` are kept: they are no larger than it, or fit."""
        *stack, k, d = shape
        return k <= d or math.prod(stack) * k**2 * each <= self.memory

    def decomposes(self, side: int) -> bool:
        """Whether the decomposition of a side×side matrix, three of them in float64, fits."""
        return 24 * side**2 <= self.memory

    def keeps_gram(self, d: int) -> bool:
        """Whether ``HᵀH [d, d]`` is kept unless asked for."""
        return d <= GRAM_SIDE or self.decomposes(d)

    def most_rows(self, d: int) -> int:
        """How many feature rows are kept as they are: up to d, or what fits where ``HᵀH`` does not."""
        if d <= ROWS_SIDE:
            return 0
        fit = (self.memory if d > GRAM_SIDE else MEMORY) // (16 * d)
        return min(fit, d) if self.keeps_gram(d) else fit

    def outputs_at_once(self, each: int, on_cpu: bool) -> int:
        """How many outputs a chunk of Jacobians takes, of ``each`` bytes; at least one."""
        return max(1, (min(self.memory, CPU_CHUNK) if on_cpu else self.memory) // max(each, 1))


def trim_malloc() -> None:
    """Let the C library return freed memory, so seldom that it takes a small part of the time.

    glibc keeps what lies below tensors that are still alive.
    """
    global _next
    start = time.monotonic()
    if start < _next or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
    stop = time.monotonic()
    _next = stop + max(PAUSE, SHARE * (stop - start))
