from __future__ import annotations

import torch

import reference
from gramscope.linalg.virtual_shift import shift_factor


def test_it_gives_the_shift_of_the_moved_features(generator: torch.Generator) -> None:
    W, h, delta = (torch.randn(*shape, generator=generator).double() for shape in ((3, 4), (5, 6), (5, 3)))
    D, Sigma = delta.mT @ h, delta.mT @ delta
    wide = torch.nn.functional.pad(W, (0, 2))
    M = shift_factor(W, D, Sigma, 0.3)  # W has no weight on the last two features
    torch.testing.assert_close(wide.mT @ M + M.mT @ wide, reference.virtual_shift(wide, h, delta, 0.3))
    torch.testing.assert_close(shift_factor(W, D, None, 0.3), -0.3 * D)
