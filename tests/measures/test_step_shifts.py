"""A step beside its virtual shift, against dense matrices."""

from __future__ import annotations

import pytest
import torch

from cases import randoms
from gramscope.measures.step_shifts import step_shifts


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (2, 3, 8), (2, 8, 3)])
@pytest.mark.parametrize("at_inputs", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-90])
def test_equals_the_dense_matrices(shape: tuple[int, ...], at_inputs: bool, scale: float) -> None:
    *stack, k, _ = shape
    W, D, root = randoms(shape, shape, (*stack, k, k), seed=1)
    Sigma = root @ root.mT
    gamma = 0.3
    A, B, C = W.mT @ D + D.mT @ W, D.mT @ D, W.mT @ Sigma @ W
    virtual, actual, gram = -gamma * A + gamma**2 * C, -gamma * A + gamma**2 * B, W.mT @ W
    size = virtual.norm() * actual.norm()
    # Scaling D by s and Σ by s² is a step of rate γ/s.
    found = step_shifts(W, D * scale, Sigma * scale**2, C * scale**2 if at_inputs else None)
    rate = gamma / scale
    assert float(found.cosine(rate)) == pytest.approx(float((virtual * actual).sum() / size), abs=1e-12)
    assert float(found.residual(rate)) == pytest.approx(float((actual - virtual).norm() / actual.norm()), rel=1e-9)
    expected = (virtual * gram).sum() / (virtual.norm() * gram.norm())
    assert float(found.gram_cosine(rate)) == pytest.approx(float(expected), abs=1e-12)
    traces = [x.diagonal(dim1=-2, dim2=-1).sum() for x in (virtual, actual)]
    columns = W.shape[:-2].numel() * W.shape[-1]
    assert float(found.null(rate)) == pytest.approx(float(traces[0] * traces[1] / (columns * size)), abs=1e-12)


def test_null_is_the_mean_over_rotations() -> None:
    from gramscope.linalg.psd import random_orthogonal

    W, D, root = randoms((6, 4), (6, 4), (6, 6), seed=2)
    shifts, generator = step_shifts(W, D, root @ root.mT), torch.Generator().manual_seed(0)
    A, B, C = W.mT @ D + D.mT @ W, D.mT @ D, W.mT @ root @ root.mT @ W
    virtual, actual = -0.5 * A + 0.25 * C, -0.5 * A + 0.25 * B
    Q = random_orthogonal(4, generator, (20_000,))
    cosines = (Q @ virtual @ Q.mT * actual).sum((-2, -1)) / (virtual.norm() * actual.norm())
    assert float(shifts.null(0.5)) == pytest.approx(float(cosines.mean()), abs=4 * float(cosines.std()) / 20_000**0.5)
