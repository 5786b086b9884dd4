"""Exact expectations for Gaussian nets at any finite size, by Wick's rule.

``R = Wᵀ diag(a²) W`` with ``W [k, d]`` of entries N(0, 1/k) and ``a`` of entries N(0, 1), all independent. A moment of
a word in R and fixed symmetric matrices is a finite sum over pairings of the W's: a pairing closes the data matrices
into traces and ties the k-indices into groups. Nothing is asymptotic here; [NFA]'s free-probability formulas are the
limit d, k → ∞, and its Proposition 10 (with the s₁ ≠ s₂ terms it drops) the word ``ARBR``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import perm, prod
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.theory.freeness import Family, Partition

#: letters of data words in the trace product, and sizes of the groups of k-indices
Term: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
LONGEST = 6


def gaussian_moment(word: str, data: Family, width: int, *, size: int) -> Tensor:
    """``E[tr(word)]``, normalised trace, exact for a Gaussian net of ``width`` hidden units on ``size`` inputs.

    Args:
        word: letters of ``data`` and R, e.g. ``"ARARBR"`` or ``"RRRR"``, with at most six R.
        data: the fixed symmetric matrices, such as :class:`~gramscope.theory.freeness.MatrixFamily`.
        width: k.
        size: d, the number of inputs.
    """
    if set(word) - data.letters - {"R"} or "R" in data.letters:
        raise InputError(f"word={word!r}: letters are {sorted(data.letters)} and 'R'")
    degree = word.count("R")
    if degree > LONGEST:
        raise InputError(f"word={word!r} holds {degree} × R: (2·{degree}−1)!! pairings; at most {LONGEST}")
    if degree == 0:
        return data.moment(word)
    start = word.index("R") + 1
    slots = (word[start:] + word[:start])[:-1].split("R")
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for (words, groups), count in _wick_terms(tuple(slots)).items():
        traces = prod((size * data.moment(w) for w in words), start=torch.ones((), dtype=torch.float64, device="cpu"))
        total = total + count * traces * _grouped_moment(groups, width)
    return total * (1 / width) ** degree / size


def gaussian_spectral_moments(width: int, size: int, count: int = 4) -> Tensor:
    """``E[tr(Rᵖ)]`` for p = 1 … count: ``[count]``.

    >>> gaussian_spectral_moments(width=1000, size=1000, count=2).tolist()  # 1 and 1 − 1/k + 3(d + 2)/k
    [1.0, 4.005]
    """
    return torch.stack([gaussian_moment("R" * p, _NoMatrices(), width, size=size) for p in range(1, count + 1)])


class _NoMatrices(Family):
    letters = frozenset[str]()

    @override
    def moment(self, word: str) -> Tensor:
        return torch.ones((), dtype=torch.float64, device="cpu")


@lru_cache(maxsize=64)
def _wick_terms(slots: tuple[str, ...]) -> Counter[Term]:
    """The pairings of ``tr(A₁ R A₂ R … Aₙ R)``, collected by the trace product and the group sizes they give.

    Slot s holds A_s with ends ``2s`` (left) and ``2s+1`` (right); the R after it holds a W at ends ``2s+1``
    and ``2(s+1)``, both with the k-index s.
    """
    n = len(slots)
    ends = 2 * n
    terms: Counter[Term] = Counter()
    for pairing in pairings(tuple(range(ends))):
        partner = {u: v for pair in pairing for u, v in (pair, pair[::-1])}
        words = []
        left = set(range(ends))
        while left:  # walk through a matrix, then along the pairing, until the trace closes
            end, word = min(left), ""
            while end in left:
                other = end ^ 1
                left -= {end, other}
                word += slots[end // 2] if end % 2 == 0 else slots[end // 2][::-1]
                end = partner[other]
            words.append(word)
        index = {end: ((end - 1) % ends) // 2 for end in range(ends)}
        groups = _components(n, [(index[u], index[v]) for u, v in pairing])
        terms[tuple(sorted(words)), tuple(sorted(groups))] += 1
    return terms


def _components(n: int, edges: list[tuple[int, int]]) -> list[int]:
    """Sizes of the connected components of a graph on ``n`` points."""
    label = list(range(n))
    for u, v in edges:
        old, new = label[u], label[v]
        label = [new if value == old else value for value in label]
    return list(Counter(label).values())


def _grouped_moment(groups: tuple[int, ...], width: int) -> float:
    """``E[Π_g Σ_i a_i^{2g}]`` over the groups g, for ``a_i`` ~ N(0, 1): sums split by which indices coincide."""
    total = 0.0
    for partition in set_partitions(len(groups)):
        powers = [sum(groups[i] for i in block) for block in partition]
        total += perm(width, len(powers)) * prod(_double_factorial(2 * m - 1) for m in powers)
    return total


def _double_factorial(n: int) -> int:
    return prod(range(n, 0, -2))


# -- partitions and pairings ----------------------------------------------------------------------------------------
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
