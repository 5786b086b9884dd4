from __future__ import annotations

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from gramscope.optim.orthogonalise import COEFFICIENTS, _through_gram, quintic_polar


def test_it_is_torch_muons_iteration() -> None:
    g = torch.Generator().manual_seed(1)
    for shape in ((3, 7, 5), (3, 5, 7), (2, 4, 4)):
        stack = torch.randn(shape, generator=g)
        expected = [_zeropower_via_newtonschulz(m, COEFFICIENTS, 5, 1e-7) for m in stack]
        found = quintic_polar(stack.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, torch.stack(expected), rtol=2e-2, atol=2e-2)


def test_zero_and_tiny_matrices_stay_finite() -> None:
    assert not quintic_polar(torch.zeros(3, 5)).any()
    assert quintic_polar(torch.full((3, 5), 1e-30)).isfinite().all()


def test_the_wide_form_is_the_same_iteration() -> None:
    g = torch.Generator().manual_seed(2)
    stack = torch.randn(3, 6, 40, generator=g, dtype=torch.float64)
    stack[1, 3:] = stack[1, :3]  # of lower rank
    expected = quintic_polar(stack)
    torch.testing.assert_close(_through_gram(stack), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(_through_gram(stack.float()), expected.float(), rtol=0, atol=1e-3)
    assert not _through_gram(torch.zeros(3, 12)).any()
    assert _through_gram(torch.full((3, 12), 1e-30)).isfinite().all()
