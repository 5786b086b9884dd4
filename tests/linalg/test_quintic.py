from __future__ import annotations

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from gramscope.linalg.quintic import COEFFICIENTS, quintic_polar


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
