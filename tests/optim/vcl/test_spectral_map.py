from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from gramscope.optim.vcl.spectral_map import SpectralMap


def test_floor_is_smooth_and_positive_and_cutoff_relative():
    values = torch.tensor([3.0, 1e-3, 0.0, -2.0, -1e6], dtype=torch.float64)
    lifted = SpectralMap(alpha=1.0, floor=0.1).singular_values(values, 5)
    torch.testing.assert_close(lifted[:4], (values + (values**2 + 0.04).sqrt())[:4] / 2)
    torch.testing.assert_close(lifted[4], torch.tensor(1e-2 / 1e6).double())
    cut = SpectralMap(alpha=0.1, cutoff=1e-2).singular_values(values, 5)
    assert (cut > 0).tolist() == [True, False, False, False, False]
    assert (SpectralMap(alpha=0.1).singular_values(values.float(), 5) > 0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_response_is_the_derivative(floor: float, generator: torch.Generator):
    """Of the nearest matrix with the Gram of the moved G."""
    spectrum = SpectralMap(alpha=0.2, floor=floor)
    values = torch.tensor([4.0, 2.0, 2.0, 0.3], dtype=torch.float64)
    E = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    E = E + E.mT
    s = spectrum.singular_values(values, 4)
    first = spectrum.response(values, s) * E

    def moved(t: float) -> Tensor:
        lam, Q = torch.linalg.eigh(torch.diag(values) + t * E)
        root = Q * spectrum.singular_values(lam.flip(0), 4).flip(0) @ Q.mT
        return reference.polar_factor(torch.diag(s) @ root) @ root

    step = 1e-5
    torch.testing.assert_close((moved(step) - moved(-step)) / (2 * step), first, atol=1e-7, rtol=1e-6)
