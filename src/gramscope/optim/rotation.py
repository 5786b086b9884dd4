"""The rotation that brings a matrix nearest to another one close by, by conjugate gradients.

Among all orthogonal Q, ``‖Q W − T‖`` is to be small, where ``T = W + D`` and D is small. To first order ``Q = I + K`` with K
antisymmetric, and K minimises ``‖D − K W‖²``, which means

    K S + S K = R        S = W Wᵀ        R = D Wᵀ − W Dᵀ

Conjugate gradients solve this with one product ``S P`` an iteration, since ``P S = −(S P)ᵀ``. The error that they reduce is
``√2 ‖(K − K*) W‖``, the very distance that matters, and each iteration tells by how much it reduced ``‖D − K W‖²``: its *gain*.

The Gram ``(QW)ᵀ(QW)`` does not depend on how well K solves the equation, only on Q being orthogonal. So everything that
finds K is computed coarsely. ``Q = K + √(I + K²) = I + K + ½K² − ⅛K⁴ + …`` is orthogonal; its first terms are computed
precisely and polished by Newton–Schulz steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramscope.optim.orthogonalise import has_bfloat16

#: how much longer than the shortest a step may be, as a part of it
TOLERANCE = 0.02
#: conjugate-gradient iterations at most
MOST_ITERATIONS = 40
#: polishes at most: the term −⅛K⁴, then Newton–Schulz steps, of which two bring ‖K‖₂ = ½ to rounding
MOST_POLISHES = 3
#: a bound on ‖QᵀQ − I‖_F below this counts as rounding of float32
ORTHOGONAL = 5e-8
#: the term −⅛K⁴ is left out where ‖QᵀQ − I‖_F is below this without it: then also many steps stretch W by less than rounding
_NEGLIGIBLE = 1e-9
#: rotations with ‖K‖₂ above this are left to the polar factor
LARGEST_ANGLE = 0.5
#: steps above this part of the weights, in Frobenius norm, are left to the polar factor, so that the 5e-6 of the step by which
#: a product of bfloat16 pairs is off stay below rounding of the weights
LARGEST_STEP = 0.2
LARGEST_STEP_OF_PAIRS = 0.04
#: gains are compared at three points of the iteration: at this part of it, at the square of this part, and at its end
_WINDOW = 0.55
#: at most this ratio of successive gains is used to estimate the sum of all gains to come
_SLOWEST = 0.85
#: a distance below this part of the step is zero to rounding
_ZERO_DISTANCE = 1e-5
#: added to denominators, so that 0/0 gives 0
_TINY = 1e-37
#: in the preconditioner squared row lengths count at least this part of the largest
_SHORTEST_ROW = 1e-6


def rotation(
    source: Tensor, change: Tensor, tolerance: float = TOLERANCE, iterations: int = MOST_ITERATIONS
) -> tuple[Tensor, list[Figures]]:
    """``Q − I`` for the rotation Q that brings ``source`` near ``source + change``, and for each matrix how well.

    Args:
        source, change: W and D above, ``[batch, k, d]``, float32.
        tolerance: the iteration ends when the estimated excess distance is below this.
        iterations: of conjugate gradients at most.
    """
    W, D = coarse(source), coarse(change)
    S = coarse_product(W, W.mT)
    cross = coarse_product(D, W.mT)
    steps = torch.linalg.vector_norm(change, dim=(-2, -1)).square()
    sizes = torch.stack([steps, S.diagonal(dim1=-2, dim2=-1).sum(-1)])
    found = [Figures(step, weights) for step, weights in sizes.mT.tolist()]
    if not any(one.usable() for one in found):
        return torch.zeros_like(S), found
    E, angle, residual = _orthogonal(_antisymmetric_solution(S, cross - cross.mT, found, tolerance, iterations))
    for one, *bounds in zip(found, angle.tolist(), residual.tolist(), strict=True):
        one.angle, one.residual = bounds
    return E, found


@dataclass
class Figures:
    """How well one rotation was found.

    Attributes:
        step: ``‖D‖²``.
        weights: ``‖W‖²``.
        angle: a bound on ``‖K‖₂``.
        residual: a bound on ``‖QᵀQ − I‖_F``.
        gained: by how much ``‖D − K W‖²`` has fallen after 0, 1, 2, … iterations.
    """

    step: float
    weights: float
    angle: float = 0.0
    residual: float = 0.0
    gained: list[float] = field(default_factory=lambda: [0.0])

    def usable(self, largest_step: float = LARGEST_STEP) -> bool:
        """Whether step and rotation are small enough for an equation of first order."""
        return self.step <= largest_step**2 * self.weights and self.angle <= LARGEST_ANGLE

    @property
    def orthogonal(self) -> bool:
        """Whether Q is orthogonal to rounding."""
        return self.residual <= ORTHOGONAL

    def excess(self) -> float:
        """By how much ``‖QW − T‖`` exceeds the least distance, as a part of it: an estimate.

        Let the gains between q²n and qn iterations sum to A and those between qn and n to B, q = 0.55. A remainder that falls
        like a power of n then has ``B²/(A − B)`` left after n iterations; one that falls exponentially has less. B/A counts
        as 0.85 where it is larger. The estimate is infinite while it does not show that the least distance is above zero.
        """
        n = len(self.gained) - 1
        if n < 2:
            return math.inf
        end, middle, start = self.gained[n], self._gained(_WINDOW * n), self._gained(_WINDOW**2 * n)
        squared = self.step - end
        if squared <= _ZERO_DISTANCE**2 * self.step:
            return 0.0
        ratio = min((end - middle) / (middle - start), _SLOWEST) if middle > start else _SLOWEST
        left = (end - middle) * ratio / (1 - ratio)
        return math.sqrt(squared / (squared - left)) - 1 if left < squared else math.inf

    def enough(self, tolerance: float) -> bool:
        """Whether the iteration may end: the estimate is within the tolerance; before the sixth gain, within a tenth of it."""
        return self.excess() <= (tolerance if len(self.gained) > 6 else 0.1 * tolerance)

    def _gained(self, n: float) -> float:
        """``gained`` after n iterations, between whole numbers interpolated."""
        whole = int(n)
        part = n - whole
        return self.gained[whole] if not part else (1 - part) * self.gained[whole] + part * self.gained[whole + 1]


def _antisymmetric_solution(S: Tensor, R: Tensor, found: list[Figures], tolerance: float, iterations: int) -> Tensor:
    """K with ``K S + S K ≈ R`` ``[batch, k, k]``, until the figures of all matrices, which get the gains, say enough.

    The preconditioner is the diagonal of the operator, ``S_ii + S_jj``.
    """
    lengths = S.diagonal(dim1=-2, dim2=-1)
    lengths = lengths.clamp_min(_SHORTEST_ROW * lengths.amax(-1, keepdim=True)).add(_TINY)
    inverse = (lengths.unsqueeze(-1) + lengths.unsqueeze(-2)).reciprocal_()
    S = coarse(S)
    K = torch.zeros_like(R)
    residual = R
    direction = residual * inverse
    size = _inner(residual, direction)
    for _ in range(iterations):
        image = coarse_product(S, coarse(direction))
        image = image - image.mT
        step = size / (_inner(direction, image) + _TINY)
        K.addcmul_(direction, step)
        residual.addcmul_(image, step, value=-1)
        image = torch.mul(residual, inverse, out=image)
        before, size = size, _inner(residual, image)
        for one, gain in zip(found, (0.5 * before * step).flatten().tolist(), strict=True):
            if not one.enough(tolerance):
                one.gained.append(one.gained[-1] + gain)
        unfinished = [not one.enough(tolerance) for one in found]
        if not any(unfinished):
            break
        if not all(unfinished):  # a size of zero keeps a matrix as it is
            size = size * torch.tensor(unfinished, dtype=torch.bool, device=R.device).reshape(-1, 1, 1)
        direction = torch.addcmul(image, direction, size / (before + _TINY))
    return K


def _inner(A: Tensor, B: Tensor) -> Tensor:
    """``⟨A, B⟩`` of every pair of matrices, ``[batch, 1, 1]``."""
    return (A * B).sum((-2, -1), keepdim=True)


def _orthogonal(K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``Q − I`` for an orthogonal Q near ``I + K``, and bounds ``[batch]`` on ``‖K‖₂`` and ``‖QᵀQ − I‖_F``."""
    square = precise_product(K, K)
    E = torch.add(K, square, alpha=0.5)  # QᵀQ − I is ¼K⁴
    size = torch.linalg.matrix_norm(square)
    angle, residual, enough = size.sqrt(), 0.25 * size.square(), _NEGLIGIBLE
    for polish in range(MOST_POLISHES):
        if bool((residual <= enough).all()):
            break
        if polish == 0:
            quartic = coarse_product(*2 * (coarse(square),))
            E.sub_(quartic, alpha=0.125)  # QᵀQ − I is −⅛K⁶ and the rounding of K⁴
            size, enough = torch.linalg.matrix_norm(quartic), ORTHOGONAL
            angle = torch.minimum(angle, size**0.25)
            residual = 0.125 * size**1.5 + 0.25 * rounding(K) * size
        else:
            excess = precise_product(E.mT.contiguous(), E).add_(E).add_(E.mT)  # QᵀQ − I
            size = torch.linalg.matrix_norm(excess)
            residual = 0.75 * size.square() + 0.25 * size**3
            if polish < MOST_POLISHES - 1:  # the next polish would remove the rounding of this product
                E.sub_(excess.add_(coarse_product(coarse(E), coarse(excess))), alpha=0.5)
                residual += rounding(K) * angle * size
            else:
                E.sub_(excess.add_(precise_product(E, excess)), alpha=0.5)
    return E, angle, residual


def largest_step(A: Tensor) -> float:
    """The largest step, as a part of the weights, for which products of this device are precise enough."""
    return LARGEST_STEP_OF_PAIRS if A.is_cuda and has_bfloat16(A.device) else LARGEST_STEP


def coarse(A: Tensor) -> Tensor:
    """``A`` as :func:`coarse_product` takes it: bfloat16 where the device multiplies that faster, else float32."""
    return A.to(torch.bfloat16 if has_bfloat16(A.device) else torch.float32)


def coarse_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` in float32 of stacks ``[batch, …]`` from :func:`coarse`, to about three digits or better."""
    if A.dtype == torch.bfloat16 and A.is_cuda:
        return torch.bmm(A, B, out_dtype=torch.float32)
    return torch.bmm(A, B).float()


def rounding(A: Tensor) -> float:
    """The part of an entry by which :func:`coarse` may round it."""
    return 2**-8 if has_bfloat16(A.device) else 2**-23


def precise_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` of float32 stacks ``[batch, …]``, to 5e-6 of ``‖A‖‖B‖`` or better, whatever the user allows torch to round.

    On CUDA a float32 matrix is the sum of two bfloat16 matrices to 16 binary digits, ``A ≈ A₁ + A₂``, and
    ``A₁B₁ + A₁B₂ + A₂B₁`` is one bfloat16 product of three times the inner dimension, summed in float32. On the CPU it is a
    float32 product, or a float64 one where ``torch.backends.mkldnn`` lets float32 products round further.
    """
    if A.is_cuda and has_bfloat16(A.device):
        (A1, A2), (B1, B2) = _split(A), _split(B)
        return torch.bmm(torch.cat([A1, A1, A2], -1), torch.cat([B1, B2, B1], -2), out_dtype=torch.float32)
    allowed = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none")
    if A.device.type == "cpu" and allowed not in ("none", "ieee"):
        return torch.bmm(A.double(), B.double()).float()
    return torch.bmm(A, B)


def _split(A: Tensor) -> tuple[Tensor, Tensor]:
    high = A.bfloat16()
    return high, (A - high).bfloat16()
