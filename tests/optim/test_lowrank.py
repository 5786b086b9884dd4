from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gramscope.optim.lowrank import (
    BlockReflection,
    column_space,
    extend_basis,
    leading_directions,
    positive_slope,
    reorthonormalised,
)

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


@given(sizes, sizes, st.floats(0.01, 30.0))
def test_reflection_is_orthogonal_and_applies_everywhere_alike(p: int, q: int, scale: float):
    generator = torch.Generator().manual_seed(p + 10 * q)
    turn = BlockReflection.towards(scale * rows(generator, 2, p, q))
    eye = torch.eye(p + q, dtype=torch.float64).expand(2, -1, -1)
    dense = turn.apply(eye[:, :p], eye[:, p:])
    torch.testing.assert_close(dense @ dense.mT, eye)
    torch.testing.assert_close(dense, dense.mT)
    C = rows(generator, 2, p + q, p + q)
    C = C + C.mT
    torch.testing.assert_close(turn.congruence(C), dense @ C @ dense)
    A = rows(generator, 2, 3, p + q)
    torch.testing.assert_close(turn.leading_part(A), (A @ dense)[..., :p])
    A[..., p:] = 0
    torch.testing.assert_close(turn.leading_part(A[..., :p]), (A @ dense)[..., :p])


@pytest.mark.parametrize("coupling", [0.01, 0.1, 0.3])
def test_slope_turns_into_the_positive_eigenspace(generator: torch.Generator, coupling: float):
    p, q = 6, 4
    gram = torch.diag(
        torch.cat([1 + 3 * torch.rand(p, generator=generator), -torch.rand(q, generator=generator)])
    ).double()
    B = coupling * rows(generator, p, q)
    gram[:p, p:], gram[p:, :p] = B, B.mT
    slope, unsettled = positive_slope(gram, p)
    assert unsettled < 0.05
    eye = torch.eye(p + q, dtype=torch.float64)
    leading = BlockReflection.towards(slope).apply(eye[:p], eye[p:])[:p]
    space = torch.linalg.eigh(gram)[1][:, q:]
    error = (leading - leading @ space @ space.mT).norm()
    start = (eye[:p] - eye[:p] @ space @ space.mT).norm()
    assert error < 0.06 * start


def test_unsettled_slopes_say_so(generator: torch.Generator):
    gram = rows(generator, 8, 8)
    gram = gram + gram.mT - 3 * torch.eye(8, dtype=torch.float64)
    assert positive_slope(gram, 4)[1] > 0.2


@given(n=st.integers(2, 30), seed=st.integers(0, 10**6))
def test_leading_directions_are_orthonormal_and_span_the_largest(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    r = 1 + seed % n
    Q = torch.linalg.qr(torch.randn(2, n, n, generator=generator, dtype=torch.float64))[0]
    values = torch.logspace(0, -6, n, dtype=torch.float64)
    values[1::2] *= -1
    values[r:] *= 0.02  # a gap after the first r
    A = (Q * values) @ Q.mT
    found = leading_directions(A, r)
    assert torch.allclose(found.mT @ found, torch.eye(r, dtype=torch.float64).expand(2, r, r), atol=1e-10)
    own = Q[..., :r]
    assert (own - found @ (found.mT @ own)).norm() < 0.1


def test_leading_directions_of_little_have_no_length() -> None:
    assert not leading_directions(torch.zeros(5, 5), 3).any()
    found = leading_directions(torch.diag(torch.tensor([0.0, 2.0, 0.0, -1.0])), 3)
    assert torch.allclose((found @ found.mT)[[1, 3], [1, 3]], torch.ones(2), atol=1e-5)


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_column_space_of_a_matrix_of_low_rank(generator: torch.Generator, dtype: torch.dtype, stack: tuple[int, ...]):
    left = rows(generator, *stack, 40, 12) * torch.logspace(0, -4, 12, dtype=torch.float64)
    A = (left @ rows(generator, *stack, 12, 90)).to(dtype)
    for rank in (12, 15):
        Q = column_space(A, rank)
        torch.testing.assert_close(Q.mT @ Q, torch.eye(rank, dtype=dtype).expand(*stack, -1, -1))
        assert float((Q @ (Q.mT @ A) - A).norm() / A.norm()) < 20 * torch.finfo(dtype).eps
