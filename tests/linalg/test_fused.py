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


@pytest.mark.parametrize("k", [8, 40, 70])
def test_passes_over_square_matrices(place: tuple[ModuleType, str], k: int, generator: torch.Generator) -> None:
    kernels, device = place

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    N, base, s, f = draw(k, k), draw(k, k), torch.rand(k, generator=generator) + 0.1, 4
    assert_alike(kernels.symmetrised(N.to(device), base.to(device)), fused.symmetrised(N, base))
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
    assert max(float(found[2]), float(residual)) < 0.02
    y = (z * scale.unsqueeze(-1)).double()
    B = torch.cat([torch.eye(f, dtype=torch.float64), y[f:]])
    turn = torch.eye(k, dtype=torch.float64) + B @ T.double() @ B.mT
    assert (turn @ turn.mT - torch.eye(k)).norm() < 1e-5
    given = z, image, T, b, scale
    assert_alike(kernels.defects(*(x.to(device) for x in given)), fused.defects(*given))


def test_kernels_that_are_wrong_are_not_used(place: tuple[ModuleType, str]) -> None:
    kernels, device = place
    assert fused._disagreements(kernels, torch.device(device)) == []
    with mock.patch.object(kernels, "split", return_value=torch.zeros(8, 2, device=device)):
        assert fused._disagreements(kernels, torch.device(device)) == ["split"]


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
