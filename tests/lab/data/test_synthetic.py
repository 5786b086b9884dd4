from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramscope.linalg.psd import random_orthogonal
from gramscope_lab.data import synthetic as s
from refusals import assert_refused

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gaussian_has_the_asked_covariance() -> None:
    spectrum = s.decaying_spectrum(6, 1.0, dtype=F64)
    assert spectrum.tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7])
    basis = random_orthogonal(6, seeded(1))
    x = s.gaussian(200_000, spectrum, seeded(2), basis=basis)
    assert torch.allclose(x.mT @ x / len(x), (basis * spectrum) @ basis.mT, atol=6e-3)


def test_generators_depend_on_nothing_but_their_generator() -> None:
    state = torch.get_rng_state()
    draws = [s.alignment_reversing(8, 6, 0.5, seeded(3))[0] for _ in range(2)]
    assert torch.equal(*draws)
    s.swiss_roll(5, seeded())
    s.randomise_labels(torch.zeros(9, dtype=torch.long), 0.5, 3, seeded())
    assert torch.equal(state, torch.get_rng_state())


def test_targets_by_hand() -> None:
    x = torch.tensor([[2.0, 3.0, 5.0, 7.0]])
    assert s.chain_monomial(x, 3).tolist() == [2 * 3 + 3 * 5 + 5 * 2]
    assert s.chain_monomial(x, 4).tolist() == [2 * 3 + 3 * 5 + 5 * 7 + 7 * 2]
    assert s.merged_staircase(x, 3).tolist() == [2 + 6 + 30]
    q = torch.tensor([[1.0, 0, 0, -1], [0, 2, 0, 0]])
    assert s.high_rank_polynomial(x, q).tolist() == [(2 - 7) ** 2 + 6**2]


def test_unit_std_scales_without_centring() -> None:
    y = torch.tensor([1.0, 2.0, 6.0])
    scaled = s.unit_std(y)
    assert float(scaled.std()) == pytest.approx(1)
    assert torch.allclose(scaled / scaled[0], y / y[0])
    for bad in (torch.ones(4), torch.ones(1), torch.tensor([1.0, math.nan])):
        assert_refused("standard deviation", s.unit_std, bad)


@pytest.mark.parametrize("n1_at_least_d", [True, False])
def test_second_part_inverts_the_first(n1_at_least_d: bool) -> None:
    n, d, balance = (24, 4, 0.5) if n1_at_least_d else (24, 20, 0.25)
    x, y = s.alignment_reversing(n, d, balance, seeded(), eps2=0.0)
    first = round(n * balance)
    x1, x2 = x[:first], x[first:]
    assert torch.allclose(y[:first], torch.full((first,), 1 + 1e-5, dtype=F64))
    assert torch.allclose(y[first:], torch.full((n - first,), 1e-5, dtype=F64))
    gram = x1.mT @ x1
    expected = torch.linalg.pinv(gram, hermitian=True)
    expected = expected @ expected
    if not n1_at_least_d:
        assert n - first >= first, "all of X₁'s directions are reached"
    assert torch.allclose(x2.mT @ x2, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_inversion_rules_differ_only_where_the_gram_is_singular_and_reached() -> None:
    def norm(balance: float, rule: str) -> float:
        return float(s.alignment_reversing(32, 32, balance, seeded(), inverse=rule)[0].norm())  # type: ignore[arg-type]

    assert norm(0.7, "pseudo") == norm(0.7, "literal")
    assert norm(0.3, "literal") > 1e6 * norm(0.3, "pseudo")


@pytest.mark.parametrize("balance", [0.0, -0.1, 1.1, math.nan, 0.001])
def test_balance_is_checked(balance: float) -> None:
    assert_refused("balance", s.alignment_reversing, 10, 4, balance, seeded())


@pytest.mark.parametrize("operation", s.MODULAR_OPERATIONS)
def test_modular_tables_by_integer_arithmetic(operation: str) -> None:
    p = 7
    pairs, values = s.modular_arithmetic(p, operation)
    assert len(pairs) == (p * (p - 1) if operation == "x/y" else p * p)
    for (x, y), value in zip(pairs.tolist(), values.tolist(), strict=True):
        if "if" in operation:
            expected = x * pow(y, -1, p) if y % 2 else x - y
        elif operation == "x/y":
            expected = x * pow(y, -1, p)
        else:
            expected = eval(operation.replace("xy", "x*y").replace("^", "**"), {"x": x, "y": y})
        assert value == expected % p, (operation, x, y)


@given(st.floats(0, 1), st.integers(2, 12))
def test_label_noise_touches_the_asked_share(fraction: float, classes: int) -> None:
    labels = torch.full((200,), -1)
    noisy = s.randomise_labels(labels, fraction, classes, seeded(5))
    changed = noisy != -1
    assert int(changed.sum()) == round(fraction * 200)
    assert torch.equal(labels, torch.full((200,), -1))
    if changed.any():
        assert int(noisy[changed].min()) >= 0
        assert int(noisy[changed].max()) < classes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: s.chain_monomial(torch.ones(2, 3), 0), "rank=0"),
        (lambda: s.merged_staircase(torch.ones(2, 3), 4), "reads 4"),
        (lambda: s.high_rank_polynomial(torch.ones(2, 3), torch.ones(2, 2)), "columns"),
        (lambda: s.gaussian(3, torch.tensor([1.0, -1.0]), seeded()), "spectrum"),
        (lambda: s.decaying_spectrum(3, -1.0), "alpha"),
        (lambda: s.modular_arithmetic(9, "x/y"), "prime"),
        (lambda: s.modular_arithmetic(7, "x%y"), "operation"),
        (lambda: s.randomise_labels(torch.zeros(3), 1.5, 2, seeded()), "fraction"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    assert_refused(message, call)
