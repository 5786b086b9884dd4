from __future__ import annotations

import pytest
import torch

from gramscope.theory.freeness import MatrixFamily, PowerFamily, free_moment
from gramscope.theory.gaussian import gaussian_moment, gaussian_spectral_moments
from gramscope.theory.quadratic import spectral_moments, weight_matrix
from refusals import assert_refused

WORDS = ("R", "RR", "AR", "ARAR", "ARBR", "ABRBAR", "ABRABR", "ARARBR", "ARRBR")


def data(d: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for letter in "AB":
        m = torch.randn(d, d, generator=generator, dtype=torch.float64)
        found[letter] = m @ m.mT / d
    return found


@pytest.mark.parametrize("word", WORDS)
def test_exact_means_agree_with_sampled_nets(word: str) -> None:
    width, d, nets = 5, 4, 60_000
    matrices = data(d)
    r = weight_matrix(width, d, torch.Generator().manual_seed(1), nets)
    product = torch.eye(d, dtype=torch.float64)
    for letter in word:
        product = product @ (r if letter == "R" else matrices[letter])
    traces = product.diagonal(dim1=-2, dim2=-1).mean(-1)
    exact = float(gaussian_moment(word, MatrixFamily(matrices), width, size=d))
    error = float(traces.std()) / nets**0.5
    assert abs(float(traces.mean()) - exact) < 3.5 * error
    assert error < 0.06 * exact, "the test can tell"


def test_second_moment_by_hand() -> None:
    k, d = 7, 3
    moments = gaussian_spectral_moments(k, d, 2)
    assert moments.tolist() == pytest.approx([1, 1 - 1 / k + 3 * (d + 2) / k])


def test_products_that_are_not_symmetric_by_hand() -> None:
    """E Tr(MRNR) = (1 − 1/k) Tr(MN) + (3/k) [Tr(M)Tr(N) + Tr(MN) + Tr(MNᵀ)] with M = N = AB."""
    k, d = 5, 4
    matrices = data(d)
    m = matrices["A"] @ matrices["B"]
    expected = (1 - 1 / k) * (m @ m).trace() + 3 / k * (m.trace() ** 2 + (m @ m).trace() + (m @ m.mT).trace())
    found = d * gaussian_moment("ABRABR", MatrixFamily(matrices), k, size=d)
    assert float(found) == pytest.approx(float(expected))


def test_freeness_is_the_limit() -> None:
    gaps = []
    for d in (20, 40, 80):
        family = MatrixFamily(data(d))
        free = free_moment("ARARBR", family, PowerFamily("R", gaussian_spectral_moments(d, d)))
        gaps.append(abs(float(gaussian_moment("ARARBR", family, d, size=d) / free) - 1))
    assert gaps[0] > 1.6 * gaps[1] > 1.6**2 * gaps[2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_spectral_moments_are_eigenvalue_means(count: int) -> None:
    r = weight_matrix(6, 5, torch.Generator().manual_seed(0), nets=3)
    eigenvalues = torch.linalg.eigvalsh(r)
    expected = torch.stack([eigenvalues.pow(p).mean(-1) for p in range(1, count + 1)], -1)
    assert torch.allclose(spectral_moments(r, count), expected)


def test_too_long_or_foreign_words_are_refused() -> None:
    family = MatrixFamily(data(3))
    assert_refused("at most 6", gaussian_moment, "R" * 7, family, 3, size=3)
    assert_refused("letters are", gaussian_moment, "CR", family, 3, size=3)
