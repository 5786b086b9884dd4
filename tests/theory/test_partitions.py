from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from gramscope.theory.partitions import Partition, kreweras_complement, noncrossing_partitions, set_partitions


def crosses(partition: Partition) -> bool:
    for first, second in combinations(partition, 2):
        for a, c in combinations(first, 2):
            inside = sum(a < b < c for b in second)
            if 0 < inside < len(second):
                return True
    return False


@pytest.mark.parametrize("n", range(1, 7))
def test_noncrossing_are_the_set_partitions_that_do_not_cross(n: int) -> None:
    expected = {tuple(sorted(p)) for p in set_partitions(n) if not crosses(p)}
    assert set(noncrossing_partitions(n)) == expected
    assert len(noncrossing_partitions(n)) == comb(2 * n, n) // (n + 1)


@pytest.mark.parametrize("n", range(1, 6))
def test_complement_is_the_largest_that_does_not_cross(n: int) -> None:
    for partition in noncrossing_partitions(n):
        interleaved = tuple(tuple(2 * i for i in block) for block in partition)
        fitting = [
            candidate
            for candidate in noncrossing_partitions(n)
            if not crosses(interleaved + tuple(tuple(2 * i + 1 for i in block) for block in candidate))
        ]
        largest = min(fitting, key=len)
        assert kreweras_complement(partition) == largest
        assert len(partition) + len(largest) == n + 1
