"""Non-crossing partitions, their Kreweras complement, set partitions and pairings: the combinatorics of moments.

A partition is a tuple of blocks, a block a tuple of increasing positions ``0 … n−1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

Block: TypeAlias = tuple[int, ...]
Partition: TypeAlias = tuple[Block, ...]


@lru_cache(maxsize=32)
def noncrossing_partitions(n: int) -> tuple[Partition, ...]:
    """All non-crossing partitions of ``n`` points on a circle; there are Catalan(n) of them.

    >>> [len(noncrossing_partitions(n)) for n in range(7)]
    [1, 1, 2, 5, 14, 42, 132]
    """
    return tuple(sorted(tuple(sorted(blocks)) for blocks in _noncrossing(tuple(range(n)))))


def _noncrossing(points: tuple[int, ...]) -> Iterator[list[Block]]:
    """Choose the block of the first point; the gaps it leaves are partitioned independently."""
    if not points:
        yield []
        return
    first, rest = points[0], points[1:]
    for mask in range(2 ** len(rest)):
        chosen = [i for i in range(len(rest)) if mask >> i & 1]
        block = (first, *(rest[i] for i in chosen))
        bounds = [-1, *chosen, len(rest)]
        gaps = [rest[low + 1 : high] for low, high in pairwise(bounds)]
        partial: list[list[Block]] = [[block]]
        for gap in gaps:
            partial = [left + right for left in partial for right in _noncrossing(gap)]
        yield from partial


@lru_cache(maxsize=4096)
def kreweras_complement(partition: Partition) -> Partition:
    """The largest partition of the points ``0', …, (n−1)'`` (``i'`` right after ``i``) that crosses no block.

    As permutations ``K(π) = π⁻¹ ∘ (0 1 … n−1)`` with the blocks as increasing cycles. It exchanges the finest and the
    coarsest partition, and ``|π| + |K(π)| = n + 1``.

    >>> kreweras_complement(((0, 1), (2,)))
    ((0,), (1, 2))
    """
    n = sum(map(len, partition))
    before = {point: block[i - 1] for block in partition for i, point in enumerate(block)}
    step = {i: before[(i + 1) % n] for i in range(n)}
    blocks: list[Block] = []
    left = set(range(n))
    while left:
        cycle = [min(left)]
        while step[cycle[-1]] != cycle[0]:
            cycle.append(step[cycle[-1]])
        left -= set(cycle)
        blocks.append(tuple(sorted(cycle)))
    return tuple(sorted(blocks))


def set_partitions(n: int) -> Iterator[Partition]:
    """All partitions of ``n`` points, crossing ones included; Bell(n) of them.

    >>> [sum(1 for _ in set_partitions(n)) for n in range(6)]
    [1, 1, 2, 5, 15, 52]
    """
    if n == 0:
        yield ()
        return
    for smaller in set_partitions(n - 1):
        for i, block in enumerate(smaller):
            yield (*smaller[:i], (*block, n - 1), *smaller[i + 1 :])
        yield (*smaller, (n - 1,))


def pairings(points: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways of pairing up an even number of points: (2m−1)!! of them for 2m points.

    >>> [sum(1 for _ in pairings(tuple(range(2 * m)))) for m in range(5)]
    [1, 1, 3, 15, 105]
    """
    if not points:
        yield ()
        return
    first, rest = points[0], points[1:]
    for i, partner in enumerate(rest):
        for others in pairings(rest[:i] + rest[i + 1 :]):
            yield ((first, partner), *others)
