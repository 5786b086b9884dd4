"""The rotation that brings a matrix nearest to another one close by, by conjugate gradients.

Among all orthogonal Q, ``‖Q W − T‖`` is to be small, where ``T = W + D`` and D is small. To first order ``Q = I + K`` with K
antisymmetric, and K minimises ``‖D − K W‖²``, which means

    K S + S K = R        S = W Wᵀ        R = D Wᵀ − W Dᵀ

Conjugate gradients solve this with one product ``S P`` an iteration, since ``P S = −(S P)ᵀ``. The error that they reduce is
``√2 ‖(K − K*) W‖``, the very distance that matters, and each iteration tells by how much it reduced ``‖D − K W‖²``: its *gain*.

The Gram ``(QW)ᵀ(QW)`` does not depend on how well K solves the equation, only on Q being orthogonal. So everything that
finds K is computed coarsely. ``Q = I + K + ½K²``, whose ``QᵀQ − I`` is ``¼K⁴``, is computed precisely and polished by
Newton–Schulz steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.products import coarse, coarse_product, precise_product

#: conjugate-gradient iterations at most
MOST_ITERATIONS = 40
#: Newton–Schulz steps at most: two bring ‖K‖ = ½ to rounding
MOST_POLISHES = 3
#: ‖QᵀQ − I‖ counts as rounding below this: a thousand steps that all stretch W by half of it stay within float32's precision
ORTHOGONAL = 1e-9
#: rotations with ‖K‖₂ above this are left to the polar factor
LARGEST_ANGLE = 0.5
#: steps above this part of the weights, in Frobenius norm, are left to the polar factor
LARGEST_STEP = 0.2
#: squared row lengths outside this range are scaled first, so that S neither overflows nor underflows
SQUARED_LENGTHS = (1e-20, 1e20)
#: the ratio of gains by which the sum of all gains to come is estimated is at most this
_SLOWEST = 0.9
#: a distance below this part of the step is zero to rounding
_DISTANCE = 1e-5
#: rows shorter than this part of the longest do not make the preconditioner larger
_SHORTEST_ROW = 1e-6


def rotation(
    source: Tensor, change: Tensor, iterations: int, polishes: int | None = None, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """``Q − I`` for the rotation Q that brings ``source`` near ``source + change``, and figures that say how well.

    Args:
        source, change: W and D above, ``[batch, k, d]``, float32.
        iterations: of conjugate gradients.
        polishes: Newton–Schulz steps; None takes as many as it needs, which reads numbers back from the device.
        tolerance: end the iteration when the estimated excess distance is below this, which reads numbers back too.

    Returns:
        ``Q − I`` ``[batch, k, k]``, and what :class:`Figures` reads, ``[5 + iterations, batch]``.
    """
    W, D = coarse(source), coarse(change)
    S = coarse_product(W, W.mT)
    cross = coarse_product(D, W.mT)
    lengths = S.diagonal(dim1=-2, dim2=-1)
    step = torch.linalg.vector_norm(change, dim=(-2, -1)).square()
    known = [step, lengths.sum(-1), lengths.amax(-1)]
    if tolerance is not None and not any(figures.usable for figures in Figures.read(torch.stack(known))):
        return torch.zeros_like(S), torch.stack(known)
    K, gains = _antisymmetric_solution(S, cross - cross.mT, step, iterations, tolerance)
    E, angle, residual = _orthogonal(K, polishes)
    return E, torch.stack([*known, angle, residual, *gains])


@dataclass(frozen=True)
class Figures:
    """How well one rotation was found.

    Attributes:
        step: ``‖D‖²``.
        weights: ``‖W‖²``.
        longest: the largest squared length of a row of W.
        angle: a bound on ``‖K‖₂``.
        residual: a bound on ``‖QᵀQ − I‖_F``.
        gains: how much each iteration reduced ``‖D − K W‖²``.
    """

    step: float
    weights: float
    longest: float
    angle: float = 0.0
    residual: float = 0.0
    gains: tuple[float, ...] = ()

    @classmethod
    def read(cls, figures: Tensor) -> list[Figures]:
        """The figures of every matrix of a stack; this waits for the device."""
        return [cls(*column[:5], gains=tuple(column[5:])) for column in figures.mT.tolist()]

    @property
    def scaled(self) -> bool:
        """Whether the squares of the weights are finite and neither so large nor so small that S loses digits."""
        return SQUARED_LENGTHS[0] < self.longest < SQUARED_LENGTHS[1]

    @property
    def usable(self) -> bool:
        """Whether step and rotation are small enough for an equation of first order."""
        return self.scaled and self.step <= LARGEST_STEP**2 * self.weights and self.angle <= LARGEST_ANGLE

    @property
    def orthogonal(self) -> bool:
        """Whether Q is orthogonal to rounding."""
        return self.residual <= ORTHOGONAL

    def excess(self, iterations: int | None = None) -> float:
        """``‖QW − T‖`` over the least possible distance, less one, as estimated after so many iterations (None: all)."""
        return estimated_excess(self.step, self.gains[:iterations])


def estimated_excess(step: float, gains: Sequence[float]) -> float:
    """By how much ``‖D − K W‖`` exceeds its minimum, relatively, from the gains of the iterations so far.

    Let the gains between n/4 and n/2 iterations sum to A and those between n/2 and n to B. A remainder that falls like a power
    of n then has ``B²/(A − B)`` left after n iterations; one that falls exponentially has less. B/A counts as 0.9 where it is
    larger. The estimate is infinite while it does not show that the minimum is above zero.

    Args:
        step: ``‖D‖²``, the value of ``‖D − K W‖²`` at K = 0.
        gains: by how much each iteration reduced it.
    """
    n = len(gains)
    if n < 2:
        return math.inf
    first, second = _sum(gains, n / 4, n / 2), _sum(gains, n / 2, n)
    ratio = min(second / first, _SLOWEST) if first > 0 else _SLOWEST
    left, squared = second * ratio / (1 - ratio), step - sum(gains)
    if squared <= _DISTANCE**2 * step:
        return 0.0
    return math.sqrt(squared / (squared - left)) - 1 if left < squared else math.inf


def few_enough(gains: Sequence[float], step: float, tolerance: float) -> bool:
    """Whether the iteration may end: the estimate is within the tolerance, or within a tenth of it before the sixth gain."""
    return estimated_excess(step, gains) <= (tolerance if len(gains) >= 6 else 0.1 * tolerance)


def _sum(gains: Sequence[float], start: float, end: float) -> float:
    """The sum of ``gains[start:end]`` with parts of the gains at fractional ends."""
    return sum(gain * max(0.0, min(end, i + 1) - max(start, i)) for i, gain in enumerate(gains))


def _antisymmetric_solution(
    S: Tensor, R: Tensor, step: Tensor, iterations: int, tolerance: float | None
) -> tuple[Tensor, list[Tensor]]:
    """K with ``K S + S K ≈ R`` ``[batch, k, k]``, and the gain ``[batch]`` of each iteration.

    The preconditioner is the diagonal of the operator, ``S_ii + S_jj``.
    """
    lengths = S.diagonal(dim1=-2, dim2=-1)
    lengths = lengths.clamp_min(_SHORTEST_ROW * lengths.amax(-1, keepdim=True))
    inverse = (lengths.unsqueeze(-1) + lengths.unsqueeze(-2)).reciprocal_().nan_to_num_(0.0, 0.0)
    S = coarse(S)
    K = torch.zeros_like(R)
    residual = R
    direction = residual * inverse
    size = _inner(residual, direction)
    steps = step.tolist() if tolerance is not None else []
    gains: list[Tensor] = []
    seen: list[list[float]] = []
    for _ in range(iterations):
        image = coarse_product(S, coarse(direction))
        image = image - image.mT
        length = _ratio(size, _inner(direction, image))
        K.addcmul_(direction, length)
        residual = torch.addcmul(residual, image, length, value=-1)
        gains.append(0.5 * (size * length).flatten())
        if tolerance is not None:
            seen.append(gains[-1].tolist())
            if all(few_enough(one, s, tolerance) for one, s in zip(zip(*seen, strict=True), steps, strict=True)):
                break
        image = torch.mul(residual, inverse, out=image)
        before, size = size, _inner(residual, image)
        direction = torch.addcmul(image, direction, _ratio(size, before), out=direction)
    return K, gains


def _inner(A: Tensor, B: Tensor) -> Tensor:
    """``⟨A, B⟩`` of every pair of matrices, ``[batch, 1, 1]``."""
    return (A * B).sum((-2, -1), keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and zero where b is not positive or the quotient not finite: there the iteration has ended."""
    return torch.where(b > 0, a / b, 0.0).nan_to_num_(0.0, 0.0, 0.0)


def _orthogonal(K: Tensor, polishes: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """``Q − I`` for an orthogonal Q near ``I + K``, and bounds ``[batch]`` on ``‖K‖₂`` and ``‖QᵀQ − I‖_F``."""
    square = precise_product(K, K)
    size = torch.linalg.matrix_norm(square)
    angle, residual = size.sqrt(), 0.25 * size.square()
    E = torch.add(K, square, alpha=0.5)
    for polish in range(MOST_POLISHES if polishes is None else polishes):
        if polishes is None and bool((residual <= ORTHOGONAL).all()):
            break
        excess = (E + E.mT).add_(precise_product(E.mT.contiguous(), E))  # QᵀQ − I, at first ¼K⁴
        size = torch.linalg.matrix_norm(excess)
        if polish == 0:
            angle = torch.minimum(angle, (4 * size) ** 0.25)
        E = E.sub_(excess.add_(precise_product(E, excess)), alpha=0.5)
        residual = 0.75 * size.square() + 0.25 * size**3
    return E, angle, residual
