"""The expected gradient outer product of functions whose gradients are known."""

from __future__ import annotations

import torch

from cases import refused
from gramscope.instruments.egop import egop


def test_egop_is_the_mean_outer_product(generator: torch.Generator) -> None:
    X = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    gradients = torch.stack([X[:, 1], X[:, 0], torch.zeros(40)], 1)
    assert torch.allclose(egop(lambda x: x[:, 0] * x[:, 1], X), gradients.T @ gradients / 40)
    # several outputs add up, an output that does not depend on x adds nothing
    both = egop(lambda x: torch.stack([x[:, 0] * x[:, 1], x[:, 2], torch.ones(len(x)).to(x)], 1), X)
    assert torch.allclose(both, gradients.T @ gradients / 40 + torch.diag(torch.tensor([0.0, 0.0, 1.0])))
    assert torch.equal(egop(lambda x: torch.ones(len(x)), X), torch.zeros(3, 3, dtype=torch.float64))
    refused(egop, lambda x: x.sum(), X, match="must map")
