"""Powers of positive semidefinite matrices and random rotations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import fractional_matrix_power

from cases import refused
from gramscope.errors import NumericalError, RescueWarning
from gramscope.linalg.psd import SymmetricSum, eigh, psd_eigen, psd_power, random_orthogonal, svd


@given(st.integers(1, 6), st.sampled_from([0.5, 0.25, 1.5, -0.5, -1.0]), st.integers(0, 4))
def test_powers_equal_scipy(d: int, power: float, seed: int) -> None:
    X = torch.randn(2, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    A = X.mT @ X + 0.1 * torch.eye(d)
    result = psd_power(A, power)
    for one, matrix in zip(result, A, strict=True):
        assert torch.allclose(one, torch.from_numpy(fractional_matrix_power(matrix.numpy(), power)).real, atol=1e-9)


def test_the_null_space_stays_null(generator: torch.Generator) -> None:
    X = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    A = X.T @ X
    assert torch.allclose(psd_power(A, -1.0), torch.linalg.pinv(A, hermitian=True), atol=1e-9)
    assert torch.linalg.matrix_rank(psd_power(A, 0.1)) == 3


def test_an_indefinite_matrix_is_clamped_and_announced() -> None:
    with pytest.warns(RescueWarning, match=r"1 eigenvalues down to -5\.00e-01"):
        values, _ = psd_eigen(torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64)))
    assert values.tolist() == [0.0, 2.0]


def test_failed_decompositions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    monkeypatch.setattr(torch.linalg, "svd", fail)
    with pytest.raises(NumericalError, match=r"eigenvectors of a \(2, 2\) matrix did not converge: no convergence"):
        eigh(torch.eye(2))
    refused(svd, torch.eye(2), match=r"a \(2, 2\) matrix did not converge", error=NumericalError)


def test_random_rotations_are_uniform(generator: torch.Generator) -> None:
    Q = random_orthogonal(3, generator, stack=(4000,))
    eye = torch.eye(3, dtype=torch.float64)
    assert torch.allclose(Q @ Q.mT, eye.expand_as(Q), atol=1e-12)
    # Without the sign correction the first diagonal entry would be of one sign.
    assert Q[:, 0, 0].mean().abs() < 0.05
    assert (Q[:, 0, 0].square().mean() - 1 / 3).abs() < 0.02


@pytest.mark.parametrize("d", [1, 64, 65, 250])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_sum_is_the_whole_product(d: int, stack: tuple[int, ...]) -> None:
    rows = torch.randn(3, *stack, 20, d, dtype=torch.float64)
    total = SymmetricSum(d, stack)
    for part in rows:
        total.add_gram(part)
    torch.testing.assert_close(total.dense(), (rows.mT @ rows).sum(0))
    assert torch.equal(total.dense(), total.dense().mT)


def test_a_half_of_the_numbers_is_kept() -> None:
    total = SymmetricSum(1600)
    assert sum(strip.numel() for strip in total.strips) < 0.57 * 1600**2


def test_parts_are_added_apart_and_split_into_equal_shares() -> None:
    rows = torch.randn(2, 5, 120, dtype=torch.float64)
    total = SymmetricSum(120, (1,))
    total.add_gram(rows[0], 0)
    total = total.split(4)
    total.add_gram(rows[1], 2)
    share = rows[0].mT @ rows[0] / 4
    expected = torch.stack([share, share, share + rows[1].mT @ rows[1], share])
    torch.testing.assert_close(total.dense(), expected)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_float32_rows_of_any_scale(scale: float) -> None:
    rows = scale * torch.randn(10, 100)
    total = SymmetricSum(100)
    total.add_gram(rows)
    torch.testing.assert_close(total.dense(), rows.double().mT @ rows.double(), rtol=1e-4, atol=1e-5 * scale**2)
