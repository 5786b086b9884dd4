"""The ansatz from a kernel in parts, against the dense formula, random eigenvectors and many sketches."""

from __future__ import annotations

import pytest
import torch

import gramscope as gs
from cases import randoms
from gramscope.measures.alignment import corrupted
from gramscope.measures.kernel_alignment import kernel_alignment


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (2, 3, 8), (2, 8, 3)])
@pytest.mark.parametrize("at_inputs", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_one_part_equals_the_ansatz(shape: tuple[int, ...], at_inputs: bool, center: bool) -> None:
    *stack, k, d = shape
    W, root = randoms(shape, (*stack, k, k), seed=1)
    K = root @ root.mT
    part = W.mT @ K @ W if at_inputs and k > d else K
    found = kernel_alignment(W, part[None], at_inputs and k > d).value(center)
    assert found.value == pytest.approx(float(gs.nfa(W, K, center=center)), abs=1e-12)
    assert found.error is None


@pytest.mark.parametrize("center", [False, True])
def test_null_is_what_random_eigenvectors_give(center: bool) -> None:
    W, root = randoms((12, 20), (12, 12), seed=3)
    W = W * torch.linspace(0.2, 3.0, 12, dtype=torch.float64)[:, None]
    K = root @ root.mT
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([gs.nfa(W, corrupted(K, generator), center=center) for _ in range(400)])
    # A quotient of expectations stands for the expectation of the quotient.
    assert kernel_alignment(W, K[None], False).null(center) == pytest.approx(float(draws.mean()), abs=0.02)
    aligned = W @ W.T
    assert kernel_alignment(W, aligned[None], False).null(center) < float(gs.nfa(W, aligned, center=center)) - 0.05


@pytest.mark.parametrize("shape", [(6, 12), (12, 6)])
def test_sketches_agree_within_their_error(shape: tuple[int, int]) -> None:
    k, d = shape
    W, root = randoms(shape, (40, k), seed=4)
    exact = float(gs.nfa(W, root.mT @ root))
    generator = torch.Generator().manual_seed(0)
    ratios, values = [], []
    for _ in range(300):
        signs = torch.randint(2, (4, 30, 40), generator=generator, dtype=torch.float64) * 2 - 1
        J = signs @ root  # four independent parts of 30 combinations each
        parts = J.mT @ J
        found = kernel_alignment(W, W.T @ parts @ W if k > d else parts, at_inputs=k > d).value()
        assert found.error is not None
        values.append(found.value)
        ratios.append((found.value - exact) / found.error)
    spread = torch.tensor(ratios).square().sort().values
    assert 0.4 < float(spread[150]) ** 0.5 < 1.2  # the median of |t| with three degrees of freedom is 0.76
    mean = torch.tensor(values)
    assert abs(float(mean.mean()) - exact) < 0.2 * float(mean.std()) + 4 * float(mean.std()) / 300**0.5
