"""Directions of float64 features as short as rounding: are they zero, or is something there?

Features that depend on each other exactly (one of them twice, frequencies that sum to 1) have directions of length zero, of
which a decomposition in float64 leaves some 1e-16. Features that differ by their last digits have directions of the same
computed length, along which targets may lie. Products ``Hv`` with twice the digits tell them apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.linalg.psd import EPS
from gramscope.linalg.ridge import CHANCE, Reduced, reduce_rows
from gramscope.linalg.row_blocks import Rows

#: most directions that are looked at
DIRECTIONS = 8
#: most entries times directions; for more samples, the part of a target along a direction of rounding is small
ENTRIES = 4_000_000
#: how many times longer than rounding a product is that rounding does not explain
CLEAR = 4.0


def accurate_product(H: Tensor, v: Tensor) -> Tensor:
    """``Hv [n]`` as if computed with twice the digits and rounded (Ogita, Rump & Oishi 2005, Dot2).

    >>> H = torch.tensor([[1.0, 1e-20, -1.0]], dtype=torch.float64)
    >>> accurate_product(H, torch.ones(3, dtype=torch.float64)).item()
    1e-20
    """
    total, error = H.new_zeros(H.shape[0]), H.new_zeros(H.shape[0])
    for h, x in zip(H.mT, v, strict=True):
        product = h * x
        (h_high, h_low), (x_high, x_low) = _halves(h), _halves(x)
        lost = h_low * x_low - (((product - h_high * x_high) - h_low * x_high) - h_high * x_low)
        new = total + product
        added = new - total
        error += (total - (new - added)) + (product - added) + lost
        total = new
    return total + error


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as a sum of two numbers of 26 digits."""
    shifted = (2.0**27 + 1) * x
    high = shifted - (shifted - x)
    return high, x - high


def _product(H: Tensor, v: Tensor, centred: bool) -> Tensor:
    product = accurate_product(H, v)
    if centred:  # the mean is subtracted before the product is rounded
        product = accurate_product(torch.cat([H, H.new_ones(H.shape[0], 1)], 1), torch.cat([v, -product.mean()[None]]))
    return product


def hidden_part(H: Rows, Y: Rows, problem: Reduced) -> float:
    """The part of ``‖Y‖²`` along directions of H that ``problem`` took as zero and that are not.

    Directions that rounding of the features explains count only where targets have more than a chance part along them.
    """
    below = problem.singular_values <= problem.tolerance
    count = min(int(below.sum()), DIRECTIONS, ENTRIES // (H.n * H.width))
    if problem.right is None or count == 0:
        return 0.0
    features, directions = H.block(0, H.n), problem.right[below]
    if count < directions.shape[0]:
        mixing = torch.randn(
            count, directions.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        directions = mixing.to(directions) @ directions
    directions = directions if problem.scale is None else directions / problem.scale
    products = torch.stack([_product(features, v, problem.intercept) for v in directions], 1)
    length = torch.linalg.vector_norm(products, dim=0)
    rounding = EPS * features.abs() @ directions.abs().mT
    real = (products.abs() > CLEAR * rounding).double().mean(0) > 0.5
    used = real if bool(real.any()) else length > 0
    if not bool(used.any()):
        return 0.0
    wider = Rows(torch.cat([features, products[:, used] / length[used]], 1), H.name)
    residual = float(problem.residual(0.0))
    seen = residual - float(reduce_rows(wider, Y, problem.intercept, equilibrate=True).residual(0.0))
    chance = -math.expm1(-count * CHANCE**2 / max(H.n - problem.rank, 1))
    if not bool(real.any()) and seen <= chance * residual:
        return 0.0
    return max(0.0, seen) * int(below.sum()) / count
