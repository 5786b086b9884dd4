"""Which process does which piece of work."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(costs: Sequence[float], processes: int) -> list[int]:
    """The process that does each piece: the most costly pieces first, each given to the process with the least work.

    No process gets more than 4/3 of the work of the best division (Graham 1969). The answer depends on the costs alone, so that
    all processes agree.

    >>> balanced([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    work = [0.0] * processes
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(processes), key=lambda rank: (work[rank], rank))
        owners[piece] = owner
        work[owner] += costs[piece]
    return owners
