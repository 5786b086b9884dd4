from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gramscope.optim.vcl.basis import column_space, extend_basis, reorthonormalised

sizes = st.integers(1, 6)


def rows(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def basis_of(generator: torch.Generator, m: int, d: int, *stack: int) -> Tensor:
    return torch.linalg.qr(rows(generator, *stack, d, m))[0].mT


@given(sizes, sizes, st.integers(-3, 8), st.sampled_from([(), (2,)]))
def test_extension_reproduces_the_rows_with_orthonormal_directions(m: int, b: int, extra: int, stack: tuple[int, ...]):
    generator = torch.Generator().manual_seed(m + 10 * b)
    d = max(m + b + extra, m)
    basis, x = basis_of(generator, m, d, *stack), rows(generator, *stack, b, d)
    found = extend_basis(basis, x)
    torch.testing.assert_close(found.coordinates @ basis + found.factor @ found.directions, x)
    both = torch.cat([basis, found.directions], -2)
    assert both.shape[-2] == min(m + b, d)
    torch.testing.assert_close(both @ both.mT, torch.eye(both.shape[-2], dtype=x.dtype).expand(*stack, -1, -1))


def test_dependent_and_known_rows_give_no_noise_directions(generator: torch.Generator):
    basis = basis_of(generator, 4, 20).float()
    x = rows(generator, 2, 20).float()
    x = torch.cat([x, x, torch.zeros(1, 20), basis[:2] * 100])
    found = extend_basis(basis, x)
    torch.testing.assert_close(found.coordinates @ basis + found.factor @ found.directions, x, atol=2e-5, rtol=1e-4)
    # where there is nothing new: nothing, or some orthonormal direction with a negligible coefficient
    gram = found.directions @ found.directions.mT
    assert (gram - torch.diag((gram.diagonal() > 0.5).float())).abs().max() < 1e-2
    assert (found.directions @ basis.mT).abs().max() < 1e-2
    assert found.factor[:, 2:].abs().max() < 1e-2
    strong = found.directions[:2]
    torch.testing.assert_close(strong @ strong.mT, torch.eye(2), atol=1e-5, rtol=0)
    assert (strong @ basis.mT).abs().max() < 1e-5


def test_directions_of_rows_near_the_basis_are_orthogonal_to_it(generator: torch.Generator):
    basis = basis_of(generator, 8, 60).float()
    x = rows(generator, 3, 8).float() @ basis * 1e3 + rows(generator, 3, 60).float()
    assert (extend_basis(basis, x).directions @ basis.mT).abs().max() < 1e-6


def test_reorthonormalising_squares_the_error(generator: torch.Generator):
    basis = basis_of(generator, 5, 12) + 1e-4 * rows(generator, 5, 12)
    eye = torch.eye(5, dtype=torch.float64)
    before = (basis @ basis.mT - eye).norm()
    better = reorthonormalised(basis)
    assert (better @ better.mT - eye).norm() < before**2


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_column_space_of_a_matrix_of_low_rank(generator: torch.Generator, dtype: torch.dtype, stack: tuple[int, ...]):
    left = rows(generator, *stack, 40, 12) * torch.logspace(0, -4, 12, dtype=torch.float64)
    A = (left @ rows(generator, *stack, 12, 90)).to(dtype)
    for rank in (12, 15):
        Q = column_space(A, rank)
        torch.testing.assert_close(Q.mT @ Q, torch.eye(rank, dtype=dtype).expand(*stack, -1, -1))
        assert float((Q @ (Q.mT @ A) - A).norm() / A.norm()) < 20 * torch.finfo(dtype).eps
