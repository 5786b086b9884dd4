"""Moments of products of two free families, by free cumulants over non-crossing partitions.

Two families are free when every alternating product of their centred elements has trace zero. Then for a₁ … aₙ in one
and b₁ … bₙ in the other

    φ(a₁ b₁ a₂ b₂ … aₙ bₙ) = Σ_{π ∈ NC(n)} κ_π[a₁ … aₙ] · φ_{K(π)}[b₁ … bₙ],

κ_π and φ_K(π) being products over blocks of free cumulants and of moments, K(π) the Kreweras complement (Nica and
Speicher, *Lectures on the Combinatorics of Free Probability*, Theorem 14.4). All of [NFA] Appendix E is a special case.

A *family* answers one question: the moment of a word in its letters. Values are float64 tensors, so that a family may
stand for a whole stack of random matrices at once (one moment per net).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import comb, prod
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError

#: a tuple of blocks, a block being a tuple of increasing positions 0 … n − 1
Partition: TypeAlias = tuple[tuple[int, ...], ...]


class Family(ABC):
    """Letters and the normalised trace of every word in them."""

    letters: frozenset[str]

    @abstractmethod
    def moment(self, word: str) -> Tensor:
        """``φ(word)``, the normalised trace; the empty word has moment 1."""


class MatrixFamily(Family):
    """Symmetric matrices ``[…, d, d]`` under single-letter names; words are traced through cached half products."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        if not matrices or any(len(name) != 1 for name in matrices):
            raise InputError(f"matrices={sorted(matrices)!r}: give at least one matrix, each under one letter")
        self.letters = frozenset(matrices)
        self._products = {name: matrix.to(torch.float64) for name, matrix in matrices.items()}
        self._moments: dict[str, Tensor] = {}
        self.size = next(iter(matrices.values())).shape[-1]

    def _product(self, word: str) -> Tensor:
        if word not in self._products:
            self._products[word] = self._product(word[:-1]) @ self._products[word[-1]]
        return self._products[word]

    @override
    def moment(self, word: str) -> Tensor:
        key = _canonical(word)
        if key not in self._moments:
            half = (len(key) + 1) // 2
            left = self._product(key[:half]) if key else torch.ones((), dtype=torch.float64, device="cpu")
            if len(key) < 2:
                value = left.diagonal(dim1=-2, dim2=-1).mean(-1) if key else left
            else:
                value = (left * self._product(key[half:]).mT).sum((-2, -1)) / self.size
            self._moments[key] = value
        return self._moments[key]


class PowerFamily(Family):
    """One matrix known by its spectral moments: ``moments[…, p−1] = tr(Rᵖ)``."""

    def __init__(self, letter: str, moments: Tensor) -> None:
        self.letters = frozenset(letter)
        self._values = moments.to(torch.float64)

    @override
    def moment(self, word: str) -> Tensor:
        if not word:
            return torch.ones((), dtype=torch.float64, device="cpu")
        known = self._values.shape[-1]
        if len(word) > known:
            raise InputError(f"tr({word}) needs {len(word)} spectral moments, only {known} are given")
        return self._values[..., len(word) - 1]


def free_cumulant(elements: tuple[str, ...], family: Family) -> Tensor:
    """``κ_n(e₁, …, e_n) = Σ_{σ ∈ NC(n)} φ_σ[e] · μ(σ, 1)``; each element is itself a word.

    The Möbius function is ``μ(σ, 1) = Π_{B ∈ K(σ)} (−1)^{|B|−1} Catalan(|B|−1)``.
    """
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for partition in noncrossing_partitions(len(elements)):
        sizes = [len(block) - 1 for block in kreweras_complement(partition)]
        moebius = prod((-1) ** m * (comb(2 * m, m) // (m + 1)) for m in sizes)
        total = total + moebius * _block_moments(partition, elements, family)
    return total


def _block_moments(partition: Partition, elements: tuple[str, ...], family: Family) -> Tensor:
    """``φ_π[e] = Π_{B ∈ π} φ(Π_{i ∈ B} e_i)``."""
    value = torch.ones((), dtype=torch.float64, device="cpu")
    for block in partition:
        value = value * family.moment("".join(elements[i] for i in block))
    return value


def free_moment(word: str, first: Family, second: Family) -> Tensor:
    """``φ(word)`` for a word in the letters of two free families, e.g. ``"ARARBR"``.

    The word need not alternate letter by letter: neighbours of one family count as one element (the trace is cyclic, so
    its ends are neighbours too).

    >>> import torch
    >>> a, r = PowerFamily("A", torch.tensor([2.0, 5.0])), PowerFamily("R", torch.tensor([1.0, 3.0]))
    >>> float(free_moment("ARAR", a, r))  # tr(A²)tr(R)² + tr(A)²tr(R²) − tr(A)²tr(R)²
    13.0
    """
    if first.letters & second.letters:
        raise InputError(f"both families use the letters {sorted(first.letters & second.letters)}")
    unknown = set(word) - first.letters - second.letters
    if unknown:
        raise InputError(f"word={word!r} has letters {sorted(unknown)} of neither family")
    runs = _alternating_runs(word, first.letters)
    if len(runs) < 2:
        return (first if set(word) <= first.letters else second).moment(word)
    elements, others = tuple(runs[0::2]), tuple(runs[1::2])
    cumulants: dict[tuple[str, ...], Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for partition in noncrossing_partitions(len(elements)):
        term = torch.ones((), dtype=torch.float64, device="cpu")
        for block in partition:
            key = tuple(elements[i] for i in block)
            if key not in cumulants:
                cumulants[key] = free_cumulant(key, first)
            term = term * cumulants[key]
        total = total + term * _block_moments(kreweras_complement(partition), others, second)
    return total


def _alternating_runs(word: str, letters: frozenset[str]) -> list[str]:
    """The word, rotated to start with a run of ``letters`` and to end with a run of others, cut into its runs."""
    starts = [i for i in range(len(word)) if word[i] in letters and word[i - 1] not in letters]
    if not starts:
        return [word]
    rotated = word[starts[0] :] + word[: starts[0]]
    runs = [rotated[0]]
    for previous, letter in pairwise(rotated):
        if (previous in letters) == (letter in letters):
            runs[-1] += letter
        else:
            runs.append(letter)
    return runs


def _canonical(word: str) -> str:
    """One name for all words with the same trace: rotations, and reversals since the letters are symmetric."""
    return min((w[i:] + w[:i] for w in (word, word[::-1]) for i in range(len(word))), default="")


# -- non-crossing partitions -----------------------------------------------------------------------------------------
@lru_cache(maxsize=32)
def noncrossing_partitions(n: int) -> tuple[Partition, ...]:
    """All non-crossing partitions of ``n`` points on a circle; there are Catalan(n) of them.

    >>> [len(noncrossing_partitions(n)) for n in range(7)]
    [1, 1, 2, 5, 14, 42, 132]
    """
    return tuple(sorted(tuple(sorted(blocks)) for blocks in _noncrossing(tuple(range(n)))))


def _noncrossing(points: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
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
        partial: list[list[tuple[int, ...]]] = [[block]]
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
    blocks: list[tuple[int, ...]] = []
    left = set(range(n))
    while left:
        cycle = [min(left)]
        while step[cycle[-1]] != cycle[0]:
            cycle.append(step[cycle[-1]])
        left -= set(cycle)
        blocks.append(tuple(sorted(cycle)))
    return tuple(sorted(blocks))
