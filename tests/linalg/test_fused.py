"""Triton's kernels against the torch operations they stand for, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from gramscope.errors import RescueWarning
from gramscope.linalg import fused, processor
from gramscope.linalg.factors import Factor, product

COARSE = 2**-7  # the interpreter cuts where devices round to bfloat16


@pytest.fixture(scope="module")
def place() -> tuple[ModuleType, str]:
    """The kernels, and the device they run on; conftest.py has them interpreted where there is no GPU."""
    pytest.importorskip("triton")
    from gramscope.linalg import kernels

    return kernels, "cuda" if torch.cuda.is_available() else "cpu"


def assert_alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        tolerance = COARSE if x.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(x.float().cpu(), y.float().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("shape", [(33, 70), (1, 5), (64, 32)])
def test_split(place: tuple[ModuleType, str], shape: tuple[int, int], inner: int, generator: torch.Generator) -> None:
    kernels, device = place
    A = torch.randn(shape, generator=generator)
    blocks = kernels.split(A.to(device), inner)
    high, again, low, third = blocks.cpu().chunk(4, inner)
    assert torch.equal(high, again)
    assert torch.equal(high, third)
    assert ((high.float() + low.float() - A).abs() <= 2**-15 * A.abs()).all()
    assert blocks.shape == fused.split(A, inner).shape


def test_split_step(place: tuple[ModuleType, str], generator: torch.Generator) -> None:
    kernels, device = place
    source, target = torch.randn(2, 33, 70, generator=generator)
    blocks, wanted = (
        x.cpu().float()
        for x in (kernels.split_step(source.to(device), target.to(device)), fused.split_step(source, target))
    )
    for found in (blocks, wanted):
        high, again, low, third = found.chunk(4, 1)
        assert torch.equal(high, again)
        assert torch.equal(high, third)
        torch.testing.assert_close(high + low, torch.stack([source, target - source]), rtol=2**-14, atol=1e-7)


@pytest.mark.parametrize(("m", "n", "f"), [(30, 70, 3), (64, 64, 16), (130, 200, 20)])
def test_moved_by(place: tuple[ModuleType, str], m: int, n: int, f: int, generator: torch.Generator) -> None:
    kernels, device = place
    given = [torch.randn(*shape, generator=generator) for shape in ((m, n), (m, n), (m, f), (f, f), (f, n))]
    source, moved, left, T, right = (x.double() for x in given)
    wanted = source + moved + left @ T @ right
    ways = [kernels.moved_by(*(x.to(device) for x in given)), fused.moved_by(*(x.clone() for x in given))]
    with mock.patch.object(processor, "on_host", return_value=False):
        ways.append(fused.moved_by(*given))
    ways.append(kernels.moved_by(*(x.to(device).mT.contiguous().mT for x in given)))
    for found in ways:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_small_is_added_before_it_is_rounded(place: tuple[ModuleType, str]) -> None:
    kernels, device = place
    one = torch.ones(2, 2, device=device)
    for way in (kernels.moved_by, fused.moved_by):
        half = 0.75 * 2**-24 * one  # which would be lost alone
        assert torch.equal(way(one, half, 0.5 * half, 0.5 * one, one), (1 + 2**-23) * one), way


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(("m", "n", "f"), [(30, 70, 3), (16, 128, 16), (130, 200, 20)])
def test_narrow(place: tuple[ModuleType, str], m: int, n: int, f: int, pair: bool, generator: torch.Generator) -> None:
    kernels, device = place
    A, wide, C, D = (torch.randn(*shape, generator=generator) for shape in ((m, n), (n, 2 * f), (m, f), (m, 3 * f)))
    B, terms = wide[:, :f], [(2.0, C), (-1.0, D[:, f : 2 * f])]
    left = fused.split(A, 1) if pair else A.bfloat16()
    product = A.double() @ B.double()
    for count in range(3):
        wanted = 0.5 * product + sum(c * x.double() for c, x in terms[:count])
        found = kernels.narrow(
            left.to(device), wide.to(device)[:, :f], 0.5, [(c, x.to(device)) for c, x in terms[:count]]
        )
        other = fused.narrow(left, B, 0.5, terms[:count])
        for x in (found, other):
            assert x.dtype == torch.float32
            assert x.shape == (m, f)
            assert (x.cpu() - wanted).norm() < (1e-4 if pair else 1e-2) * product.norm()
    exact = fused.narrow(A, B, plus=terms)
    torch.testing.assert_close(
        exact.double(), product + 2 * C.double() - D[:, f : 2 * f].double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("k", [8, 40, 70])
def test_passes_over_square_matrices(place: tuple[ModuleType, str], k: int, generator: torch.Generator) -> None:
    kernels, device = place

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    N, base, s, f = draw(k, k), draw(k, k), torch.rand(k, generator=generator) + 0.1, 4
    M, balance, *wanted = fused.symmetrised(N, base, f)
    found = kernels.symmetrised(N.to(device), base.to(device), f)
    assert_alike(found, (M, balance.s, *wanted))
    assert_alike(fused.balanced(base, fused.Balance(M.diagonal().abs(), f)), found[3:])
    for given in (N, 0.5 * N.round()):
        coarse = given.bfloat16() if given is not N else given
        for start in (None, base):
            found = kernels.balanced(coarse.to(device), s.to(device), f, None if start is None else start.to(device))
            assert_alike(found, fused.balanced(coarse, fused.Balance(s, f), start))
    low = N.bfloat16(), base.bfloat16()
    assert_alike([kernels.less_columns(*(x.to(device) for x in (*low, s)))], [fused.less_columns(*low, s)])
    M, gained, K = 0.01 * draw(k, k) + s.diag(), (0.01 * draw(k, k)).bfloat16(), 0.01 * draw(k, k).fill_diagonal_(0)
    blocks, *found = kernels.nearly_diagonal(*(x.to(device) for x in (M, gained, K, s)), f)
    E, *wanted = fused.nearly_diagonal(M, gained, K, s, f)
    assert_alike(found, wanted)
    with mock.patch.object(processor, "on_host", return_value=False):
        elsewhere = fused.nearly_diagonal(M, gained, K, s, f)[0]
    for high, again, low, third in (x.cpu().float().chunk(4, 1) for x in (blocks, elsewhere)):
        assert torch.equal(high, again)
        assert torch.equal(high, third)
        torch.testing.assert_close(high + low, E, rtol=2**-14, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 3000), (7, 4), (3, 1024)])
def test_norms_and_first_rows(
    place: tuple[ModuleType, str], shape: tuple[int, int], generator: torch.Generator
) -> None:
    kernels, device = place
    A = torch.randn(shape, generator=generator)
    for x, y in ((A, None), (A, 2 * A), (A.bfloat16(), None)):
        found = kernels.row_norms(x.to(device), None if y is None else y.to(device))
        torch.testing.assert_close(found.cpu(), fused.row_norms(x, y), rtol=1e-5, atol=0)
    V = torch.randn(shape[0], shape[0], generator=generator)
    assert_alike([kernels.first_rows(V.to(device), A.to(device), 3)], [fused.first_rows(V, A, 3)])


@pytest.mark.parametrize("f", [3, 8, 16, 20])
@pytest.mark.parametrize("k", [30, 200])
def test_the_small_turn(place: tuple[ModuleType, str], k: int, f: int, generator: torch.Generator) -> None:
    kernels, device = place
    z, image, columns, scale = (x * torch.randn(k, f, generator=generator) for x in (0.03, 0.01, 0.1, 1.0))
    z[:f], columns[:f] = 0, 0
    corner, scale = torch.randn(f, f, generator=generator), scale[:, 0].abs()
    given = z, image, columns, corner, scale
    T, b, residual = fused.small_turn(*given, 1e-9)
    found = kernels.small_turn(*(x.to(device) for x in given), 1e-9)
    assert_alike(found[:2], (T, b))
    assert max(float(found[2][0]), float(residual[0])) < 0.02
    assert float(found[2][1]) == pytest.approx(float(T.norm()), rel=1e-5)
    assert float(residual[1]) == pytest.approx(float(T.norm()), rel=1e-5)
    y = (z * scale.unsqueeze(-1)).double()
    B = torch.cat([torch.eye(f, dtype=torch.float64), y[f:]])
    turn = torch.eye(k, dtype=torch.float64) + B @ T.double() @ B.mT
    assert (turn @ turn.mT - torch.eye(k)).norm() < 1e-5
    given = z, image, T, b, scale
    assert_alike([kernels.defects(*(x.to(device) for x in given))], [fused.defects(*given)])


def test_kernels_that_are_wrong_are_not_used(place: tuple[ModuleType, str]) -> None:
    kernels, device = place
    assert fused._disagreements(kernels, torch.device(device)) == []
    with mock.patch.object(kernels, "row_norms", return_value=torch.zeros(2, device=device)):
        assert fused._disagreements(kernels, torch.device(device)) == ["row_norms"]


def test_without_a_compiler_torch_does_it() -> None:
    pytest.importorskip("triton")
    with mock.patch.object(fused, "_disagreements", side_effect=RuntimeError("no C compiler\nat all")):
        fused._working_kernels.cache_clear()
        with pytest.warns(RescueWarning, match=r"not used \(no C compiler\)"):
            assert fused._working_kernels(torch.device("cpu")) is None
    fused._working_kernels.cache_clear()


@pytest.mark.parametrize(("m", "n", "d"), [(30, 40, 50), (1, 200, 3)])
@pytest.mark.parametrize("host", [True, False])
def test_products_of_factors(m: int, n: int, d: int, host: bool, generator: torch.Generator) -> None:
    A, B = torch.randn(m, n, generator=generator), torch.randn(n, d, generator=generator)
    wanted = A.double() @ B.double()
    with mock.patch.object(processor, "on_host", return_value=host):
        for left in (Factor.of(A, 1), Factor.of(A.mT.contiguous(), 0)):
            for right in (Factor.of(B, 0), Factor.of(B.mT.contiguous(), 1)):
                found = product(left, right)
                assert found.dtype == torch.float32
                assert (found - wanted).norm() < (1e-6 if host else 2e-5) * wanted.norm()
