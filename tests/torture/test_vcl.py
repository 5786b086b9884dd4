"""One step of virtual covariance learning on extreme weights and inputs, against Algorithm 1 in exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import NumericalError
from torture.exact import Numbers, eigen, exact
from torture.matrices import CASES, ORDINARY, Case

GAMMA = 0.25
#: of the error of WᵀW, in rounding units of the weights times its largest entry
BOUND = 256
USED = [case for case in CASES if case.dtype in (torch.float32, torch.float64) and not case.name.startswith("no ")]


def new_gram(W: Numbers, H: Numbers, delta: Numbers) -> Numbers:
    """``WᵀW`` after a step at α = ½: the largest min(k, d) eigenvalues of G, as far as they are positive."""
    D, Sigma = delta.T @ H, delta.T @ delta
    M = -GAMMA * D + GAMMA**2 / 2 * Sigma @ W
    values, Q = eigen(W.T @ W + W.T @ M + M.T @ W)
    values = np.array([max(x, 0) if i < min(W.shape) else 0 * x for i, x in enumerate(values)], dtype=object)
    return (Q * values) @ Q.T


def step(W: Tensor, H: Tensor, delta: Tensor, solver: str) -> Tensor:
    """The weights after a step."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=W.dtype)
    with torch.no_grad():
        layer.weight.copy_(W)
    before = layer.weight.detach().clone()
    optimizer = gs.VCL(layer, GAMMA, 0.5, reduction="sum", layers="*", solver=solver)  # type: ignore[arg-type]
    try:
        (layer(H.to(W.dtype)) * delta.to(W.dtype)).sum().backward()
        optimizer.step()
    except NumericalError:
        torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=0, equal_nan=True)
        raise
    finally:
        optimizer.close()
    return layer.weight.detach()


@pytest.mark.filterwarnings("ignore:.*taken as zero:gramscope.errors.RescueWarning")
@pytest.mark.filterwarnings("ignore:all weights of .* are zero:gramscope.errors.ResultWarning")
@pytest.mark.parametrize("solver", ["exact", "recursive"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 6), (4, 4)], ids=str)
@pytest.mark.parametrize("case", USED, ids=lambda case: case.name)
def test_step(case: Case, shape: tuple[int, int], solver: str) -> None:
    k, d = (1, 1) if case.kind == "one by one" else shape
    W, H = case.matrix((k, d), "W"), case.matrix((4, d), "H")
    delta = ORDINARY.matrix((len(H), k), "delta")
    try:
        found = step(W, H, delta, solver)
    except NumericalError:
        assert case.refused or case.exponent >= 100, "the squares of these weights are within reach"
        return
    assert not case.refused
    assert bool(found.isfinite().all())
    want = new_gram(exact(W), exact(H), exact(delta))
    error = np.max(abs(exact(found.double()).T @ exact(found.double()) - want))
    limits = torch.finfo(W.dtype)
    size = np.max(abs(want)) + np.max(abs(exact(W).T @ exact(W)))
    assert error <= BOUND * limits.eps * size + limits.tiny  # weights whose squares are zero become zero
