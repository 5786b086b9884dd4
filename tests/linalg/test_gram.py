"""Gram matrices in three representations against dense oracles, and numbers that keep their errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from cases import normal, randoms, refused
from gramscope.errors import NumericalError
from gramscope.linalg.gram import Dense, Estimated, Factor, Factored, Gram, cosine, shift_factor
from gramscope.linalg.measured import Measured, combine, mean, ratio
from gramscope.linalg.stochastic import probes


def problem(k: int, d: int, stack: tuple[int, ...], seed: int) -> dict[str, tuple[Factored, Tensor]]:
    """Factored matrices beside their dense form."""
    W, D, root = randoms((*stack, k, d), (*stack, k, d), (*stack, k, k), seed=seed)
    K, w, g = root @ root.mT, Factor(W), Factor(D)
    half = Factored.of(w, g)
    return {
        "WᵀW": (Factored.of(w), W.mT @ W),
        "WᵀKW": (Factored.of(w, w, K[None]), W.mT @ K @ W),
        "WᵀD": (half, W.mT @ D),
        "a sum": ((half + half.mT) * -0.3 + Factored.of(g) * 0.5, 0.5 * D.mT @ D - 0.3 * (W.mT @ D + D.mT @ W)),
    }


SIZES = (st.integers(1, 5), st.integers(1, 6), st.sampled_from([(), (2,)]), st.integers(0, 9))


@settings(max_examples=30, deadline=None)
@given(*SIZES)
def test_factored_and_dense_equal_the_matrices(k: int, d: int, stack: tuple[int, ...], seed: int) -> None:
    X = normal(d, 2, seed=seed)
    for gram, matrix in problem(k, d, stack, seed).values():
        for form in (gram, Dense(gram.dense()[None]), gram.small()):
            assert form.shape == matrix.shape
            assert float(form.trace()) == pytest.approx(float(matrix.diagonal(dim1=-2, dim2=-1).sum()), abs=1e-9)
            assert float(form.total()) == pytest.approx(float(matrix.sum()), abs=1e-9)
            assert float(form.norm()) == pytest.approx(float(matrix.norm()), abs=1e-9)
            torch.testing.assert_close(form.times(X)[0], matrix @ X)
            for other, second in problem(k, d, stack, seed).values():
                for its in (other, Dense(second[None])):
                    assert float(form.inner(its)) == pytest.approx(float((matrix * second).sum()), abs=1e-8)
                difference = form - (other if isinstance(form, Factored) else Dense(second[None]))
                assert float(difference.norm()) == pytest.approx(float((matrix - second).norm()), abs=1e-6)
        torch.testing.assert_close(gram.dense(), matrix)
        torch.testing.assert_close(gram.diagonal(), matrix.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("center", [False, True])
def test_cosines_equal_the_dense_ones(center: bool) -> None:
    forms = problem(3, 6, (), 1)
    for one, first in forms.values():
        for other, second in forms.values():
            expected = float(reference.correlation(first, second, center))
            assert float(cosine(one, Dense(second[None]), center)) == pytest.approx(expected)
            assert float(cosine(one, other, center)) == pytest.approx(expected)
    constant, zero = Dense(torch.ones(1, 2, 2)), Dense(torch.zeros(1, 2, 2))
    assert math.isnan(cosine(constant, zero))
    assert math.isnan(cosine(constant, Dense(torch.eye(2)[None]), center=True))


def scores(value: Callable[[Tensor], Measured], exact: float, d: int, draws: int = 120) -> Tensor:
    """Deviations from the exact value over standard errors, for many draws of 64 probes."""
    found = []
    for seed in range(draws):
        signs = torch.randint(2, (d, 64), generator=torch.Generator().manual_seed(seed)).mul(2).sub(1)
        estimate = value(signs.double())
        assert estimate.error is not None
        found.append((estimate - exact) / estimate.error)
    return torch.tensor(found)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", ["inner", "norm", "cosine", "trace", "of a sum"])
def test_estimates_are_unbiased_within_their_errors(name: str, ones: bool) -> None:
    """As a Student distribution of 15 degrees has them."""
    d, forms = 40, problem(12, 40, (), 3)
    A, B, G = forms["WᵀKW"][0], forms["a sum"][0], Dense(forms["WᵀW"][1][None] + 3.0)
    formulas: dict[str, Callable[[Gram, Gram, Gram], Measured]] = {
        "inner": lambda a, b, g: a.inner(g),
        "norm": lambda a, b, g: a.norm(),
        "cosine": lambda a, b, g: cosine(b, g),
        "trace": lambda a, b, g: Estimated(a.across, a.omega).trace() if isinstance(a, Estimated) else a.trace(),
        "of a sum": lambda a, b, g: cosine(a * 0.5 - b, g, center=ones),
    }
    formula = formulas[name]

    def estimate(omega: Tensor) -> Measured:
        return formula(*(Estimated.from_gram(x, omega, ones and name != "trace") for x in (A, B, G)))

    z = scores(estimate, float(formula(A, B, G)), d)
    assert abs(float(z.mean())) < 0.4
    assert 0.75 < float(z.square().mean().sqrt()) < 1.4


def test_exact_sides_are_seen_by_the_same_probes_and_means_are_exact() -> None:
    (A, a), (B, b) = (problem(3, 20, (2,), 5)[name] for name in ("WᵀW", "WᵀKW"))
    omega = probes(20, 64, a)
    seen = Estimated.from_gram(A, omega)
    assert float(seen.inner(B)) == float(seen.inner(Estimated.from_gram(B, omega))) == float(B.inner(seen))
    assert float(seen.total()) == pytest.approx(float(a.sum()))
    constant = Dense(torch.full((1, 2, 20, 20), 0.3, dtype=torch.float64))  # what lies along 1 is not estimated
    estimate = Estimated.from_gram(constant, omega).inner(seen)
    assert estimate.error == pytest.approx(0.0, abs=1e-10)
    assert float(estimate) == pytest.approx(float(0.3 * a.sum()))
    assert "random probes" in estimate.remark
    refused(Estimated.from_gram(A, omega, ones=False).total, match="leave out center=True")
    refused(seen.inner, Estimated.from_gram(B, omega[:, :32]), match="the same probes")


@pytest.mark.parametrize("factored", [True, False])
def test_random_parts_have_no_bias_and_the_error_of_their_spread(factored: bool) -> None:
    """A kernel from four random parts: its square is free of their noise, and errors are of the right size."""
    W, J = randoms((6, 9), (40, 6), seed=4)
    w, exact = Factor(W), J.mT @ J
    weight, generator = Factored.of(w), torch.Generator().manual_seed(0)
    true = Factored.of(w, w, exact[None])
    found: dict[str, list[float]] = {"square": [], "z": []}
    for _ in range(300):
        signs = torch.randint(2, (4, 30, 40), generator=generator, dtype=torch.float64) * 2 - 1
        parts = (signs @ J).mT @ (signs @ J) / 120
        gram: Gram = Factored.of(w, w, parts) if factored else Dense(W.mT @ parts @ W)
        rho = cosine(weight, gram)
        assert rho.error is not None
        found["square"].append(gram.inner(gram))
        found["z"].append((rho - cosine(weight, true)) / rho.error)
    square, z = (torch.tensor(found[name], dtype=torch.float64) for name in ("square", "z"))
    assert abs(float(square.mean()) - float(true.inner(true))) < 4 * float(square.std()) / 300**0.5
    assert 0.4 < float(z.abs().median()) < 1.2  # the median of |t| with three degrees of freedom is 0.76
    refused(lambda: (gram + (true if factored else Dense(torch.zeros(1, 9, 9)))).trace(), match="random parts")


def test_what_does_not_fit_is_named() -> None:
    A = Factored.of(Factor(torch.ones(2, 3)))
    refused(A.inner, Dense(torch.ones(1, 2, 2)), match="no inner product")
    refused(Factor, torch.full((2, 2), 1e-90, dtype=torch.float64), match="multiply it", error=NumericalError)


def test_arithmetic_keeps_errors() -> None:
    draws = normal(400, 2).square() + torch.tensor([1.0, 2.0])
    a, b = (mean(column, "draws") for column in draws.T)
    by_hand = (draws[:, 0] - a / b * draws[:, 1]).std() / b / 20  # the error of a ratio of means
    assert (a / b).error == pytest.approx(float(by_hand), rel=0.02)
    assert ratio(draws[:, 0], draws[:, 1]).error == pytest.approx(float(by_hand), rel=0.02)
    assert ((a - a) * 3).error == 0.0
    x = Measured(4.0, 0.2, "first; common")
    assert (x**0.5).error == pytest.approx(0.05, rel=1e-2)
    assert (1 - x / 2).error == pytest.approx(0.1)
    assert (x + Measured(1.0, 0.15)).error == pytest.approx(0.25)
    assert float(2 / x) == 0.5
    assert (-x).at_least(-1.0) == -1.0
    assert combine(torch.add, x, Measured(1.0, remark="common; second")).remark == "first; common; second"
    assert Measured(1.0).error is None
    copy = pickle.loads(pickle.dumps(x))
    assert (copy, copy.error, copy.remark) == (x, x.error, x.remark)


def test_the_factor_of_the_virtual_shift(generator: torch.Generator) -> None:
    W, h, delta = (torch.randn(*shape, generator=generator).double() for shape in ((3, 4), (5, 6), (5, 3)))
    D, Sigma = delta.mT @ h, delta.mT @ delta
    wide = torch.nn.functional.pad(W, (0, 2))
    M = shift_factor(W, D, Sigma, 0.3)  # W has no weight on the last two features
    torch.testing.assert_close(wide.mT @ M + M.mT @ wide, reference.virtual_shift(wide, h, delta, 0.3))
    torch.testing.assert_close(shift_factor(W, D, None, 0.3), -0.3 * D)
