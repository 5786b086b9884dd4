from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from gramscope.optim import orthogonalise
from gramscope.optim.orthogonalise import COEFFICIENTS, _through_gram_, orthogonalised, quintic_polar_


def test_it_is_torch_muons_iteration() -> None:
    g = torch.Generator().manual_seed(1)
    for shape in ((3, 7, 5), (3, 5, 7), (2, 4, 4)):
        stack = torch.randn(shape, generator=g)
        expected = [_zeropower_via_newtonschulz(m, COEFFICIENTS, 5, 1e-7) for m in stack]
        found = orthogonalised(stack.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, torch.stack(expected), rtol=2e-2, atol=2e-2)


def test_zero_and_tiny_matrices_stay_finite() -> None:
    assert not quintic_polar_(torch.zeros(2, 3, 5)).any()
    assert quintic_polar_(torch.full((2, 3, 5), 1e-30)).isfinite().all()


def test_the_wide_form_is_the_same_iteration() -> None:
    g = torch.Generator().manual_seed(2)
    stack = torch.randn(3, 6, 40, generator=g, dtype=torch.float64)
    stack[1, 3:] = stack[1, :3]  # of lower rank
    expected = quintic_polar_(stack.clone())
    torch.testing.assert_close(_through_gram_(stack.clone()), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(_through_gram_(stack.float()), expected.float(), rtol=0, atol=1e-3)
    assert not _through_gram_(torch.zeros(1, 3, 12)).any()
    assert _through_gram_(torch.full((1, 3, 12), 1e-30)).isfinite().all()


@pytest.mark.parametrize("shape", [(2, 6, 40), (6, 9), (7, 7), (40, 6), (2, 9, 5), (5, 13)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_matrices_are_computed_in_pieces_with_the_same_result(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    D = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    whole = orthogonalised(D)
    monkeypatch.setattr(orthogonalise, "_LARGE", 10)
    assert orthogonalised(D).dtype == dtype
    torch.testing.assert_close(orthogonalised(D), whole, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.1)
