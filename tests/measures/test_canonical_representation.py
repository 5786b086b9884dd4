from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import randoms, refused
from gramscope.measures.canonical_representation import canonical_alignment

PAIRS = ("representations and gradients", "representations and weights", "gradients and weights")


def correlation(A: Tensor, B: Tensor, center: bool) -> float:
    a, b = A.flatten(), B.flatten()
    a, b = (a - a.mean(), b - b.mean()) if center else (a, b)
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
@pytest.mark.parametrize("center", [False, True])
def test_six_alignments(shape: tuple[int, int], center: bool) -> None:
    W, H, delta = randoms(shape, (20, shape[1]), (20, shape[0]))
    C, Sigma = H.T @ H, delta.T @ delta
    sides = {"inputs": (C, W.T @ Sigma @ W, W.T @ W), "outputs": (W @ C @ W.T, Sigma, W @ W.T)}
    for side, (R, G, Z) in sides.items():
        for pair, (A, B) in zip(PAIRS, ((R, G), (R, Z), (G, Z)), strict=True):
            found = canonical_alignment(W, side, pair, C, Sigma, center)  # type: ignore[arg-type]
            assert float(found) == pytest.approx(correlation(A, B, center), rel=1e-10), (side, pair)


def test_what_is_missing_is_named() -> None:
    W = torch.eye(2)
    refused(canonical_alignment, W, "inputs", PAIRS[1], match="needs C")
    refused(canonical_alignment, W, "outputs", PAIRS[2], match="needs Sigma")
    refused(canonical_alignment, W, "inputs", PAIRS[1], torch.eye(3), match=r"W needs \[..., 2, 2\]")
    refused(canonical_alignment, W, "above", PAIRS[2], match="side must be")
    refused(canonical_alignment, W, "inputs", "weights", match="three pairs")
