from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gramscope.theory.freeness import (
    Family,
    MatrixFamily,
    Partition,
    PowerFamily,
    free_cumulant,
    free_moment,
    kreweras_complement,
    noncrossing_partitions,
)
from gramscope.theory.gaussian import set_partitions
from reference import free_moment_by_definition
from refusals import assert_refused


def matrices(letters: str, seed: int) -> MatrixFamily:
    generator = torch.Generator().manual_seed(seed)
    found = {letter: torch.randn(3, 3, generator=generator, dtype=torch.float64) for letter in letters}
    return MatrixFamily({letter: m + m.mT for letter, m in found.items()})


def by_definition(word: str, first: Family, second: Family) -> float:
    families = (first, second)
    elements = tuple((int(letter in second.letters), letter) for letter in word)
    return free_moment_by_definition(elements, lambda family, part: float(families[family].moment(part)))


@given(st.text("ABRS", min_size=1, max_size=8), st.integers(0, 100))
@example("ARBSCT", 0)  # the words of Lemmas 14 and 15, all letters different
@example("ARBSCTDU", 0)
def test_any_word_up_to_eight_letters_follows_from_the_definition(word: str, seed: int) -> None:
    first, second = matrices("ABCD", seed), matrices("RSTU", seed + 1000)
    assert float(free_moment(word, first, second)) == pytest.approx(
        by_definition(word, first, second), rel=1e-8, abs=1e-8
    )


@given(st.text("AB", min_size=1, max_size=6), st.integers(0, 100))
def test_matrix_moments_are_traces(word: str, seed: int) -> None:
    family = matrices("AB", seed)
    product = torch.eye(3, dtype=torch.float64)
    for letter in word:
        product = product @ family._products[letter]
    assert float(family.moment(word)) == pytest.approx(float(product.trace()) / 3)


def test_semicircle_and_free_poisson_are_known() -> None:
    semicircle = PowerFamily("S", torch.tensor([0.0, 1, 0, 2, 0, 5]))
    assert [float(free_cumulant(("S",) * n, semicircle)) for n in range(1, 7)] == [0, 1, 0, 0, 0, 0]
    poisson = PowerFamily("P", torch.tensor([1.0, 2, 5, 14, 42]))
    assert [float(free_cumulant(("P",) * n, poisson)) for n in range(1, 6)] == [1, 1, 1, 1, 1]


def test_a_stack_of_moments_gives_a_stack() -> None:
    a = matrices("A", 0)
    moments = torch.rand(5, 2, dtype=torch.float64)
    stacked = free_moment("ARAR", a, PowerFamily("R", moments))
    single = [float(free_moment("ARAR", a, PowerFamily("R", row))) for row in moments]
    assert stacked.tolist() == pytest.approx(single)


def test_bad_words_are_named() -> None:
    a, r = matrices("A", 0), PowerFamily("R", torch.ones(2))
    assert_refused("'X'", free_moment, "AXR", a, r)
    assert_refused("both families", free_moment, "AR", a, matrices("A", 1))
    assert_refused("3 spectral moments", free_moment, "ARRR", a, r)
    assert_refused("one letter", MatrixFamily, {"AB": torch.eye(2)})


# -- partitions ------------------------------------------------------------------------------------------------------
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
