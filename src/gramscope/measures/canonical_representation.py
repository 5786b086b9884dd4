"""The canonical representation hypothesis: representations, gradients and weights of a layer align, at both of its ends.

                     representations R    gradients G     weights
    at the inputs    C = HᵀH / n          WᵀΣW            WᵀW         [d, d]
    at the outputs   W C Wᵀ               Σ               WWᵀ         [k, k]

The hypothesis says that in each line the three matrices become proportional (Ziyin, Chuang, Galanti and Poggio 2024). They are
taken uncentred; the bias does not count as part of the outputs. A stack of matrices (grouped convolutions) counts as the
diagonal blocks of one, C with the blocks that belong to the groups.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_matrices, to_double, unit_scale
from gramscope.linalg.factored import FactoredGram
from gramscope.measures.alignment import cosine

Side = Literal["inputs", "outputs"]
Pair = Literal["representations and gradients", "representations and weights", "gradients and weights"]


def canonical_alignment(
    W: Array,
    side: Side,
    pair: Pair,
    C: Array | None = None,
    Sigma: Array | None = None,
    center: bool = False,
) -> Tensor:
    """``ρ`` of two of the three matrices at one end of a layer.

    Args:
        W: weight ``[..., k, d]``.
        side: at the layer's inputs or at its outputs.
        pair: which two.
        C: ``HᵀH`` of the inputs up to a factor, ``[..., d, d]``, needed with representations.
        Sigma: ``Σ δδᵀ`` up to a factor, ``[..., k, k]``, needed with gradients.
        center: Pearson correlation over entries in place of the cosine.

    Returns:
        A float64 number from 0 to 1 (−1 to 1 with ``center``), 1 under the hypothesis; NaN where a side is zero.

    >>> one = torch.eye(2)
    >>> round(canonical_alignment(one, "inputs", "representations and weights", C=torch.ones(2, 2)).item(), 6)
    0.707107
    """
    if side not in ("inputs", "outputs"):
        raise InputError(f"side must be 'inputs' or 'outputs', got {side!r}")
    weight = unit_scale(to_double(as_matrices(W, "W")))
    found: list[Tensor | FactoredGram] = []
    if "representations" in pair:
        inner = _symmetric(C, "C", weight.shape[-1], pair)
        found.append(inner if side == "inputs" else FactoredGram.gram(weight.mT, inner))
    if "gradients" in pair:
        outer = _symmetric(Sigma, "Sigma", weight.shape[-2], pair)
        found.append(outer if side == "outputs" else FactoredGram.gram(weight, outer))
    if "weights" in pair:
        found.append(FactoredGram.gram(weight if side == "inputs" else weight.mT))
    if len(found) != 2:
        raise InputError(f"pair={pair!r} is not one of the three pairs of representations, gradients and weights")
    return cosine(found[0], found[1], center)


def _symmetric(A: Array | None, name: str, size: int, pair: str) -> Tensor:
    if A is None:
        raise InputError(f"the alignment of {pair} needs {name}")
    matrix = unit_scale(to_double(as_matrices(A, name)))
    if matrix.shape[-2:] != torch.Size((size, size)):
        raise InputError(f"{name} has shape {tuple(matrix.shape)}; W needs [..., {size}, {size}]")
    return matrix
