"""Least squares and ridge regression from products ``Hᵀ(HP)`` alone, for features too wide for ``HᵀH`` and too many to keep.

Each product is one pass over the rows. The first one is of random probes, and gives a low-rank approximation of ``HᵀH`` for a
preconditioner (Frangella, Tropp and Udell 2023). Every other one is a step of conjugate gradients for all targets at once and
lowers the residual by a known amount: the residual of the fit is known without a further pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.linalg.stochastic import FEWEST, probes

#: eigenvalues below this part of the largest count as equal for the preconditioner: few rows have many of zero
LEAST = 1e-10
#: a step that explains less of a target ends its fit: what follows is rounding
SETTLED = 1e-9
#: steps over which the speed of convergence is judged
RECENT = 4


class IterativeFit:
    """The ridge fit of targets ``Y [n, c]`` on ``H [n, d]``, step by step.

    Args:
        cross: ``HᵀY [d, c]`` in float64.
        squares: ``‖y‖²`` of every target, ``[c]``.
        ridge: λ ≥ 0.

    >>> H, y = torch.eye(3, dtype=torch.float64)[:, :2], torch.tensor([[1.0], [2.0], [2.0]], dtype=torch.float64)
    >>> fit = IterativeFit(H.mT @ y, y.square().sum(0), 0.0)
    >>> for _ in range(4):
    ...     fit.step(H.mT @ (H @ fit.direction))
    >>> round(float(fit.residuals), 9)
    4.0
    """

    def __init__(self, cross: Tensor, squares: Tensor, ridge: float) -> None:
        self._ridge = ridge
        self._squares = squares
        self._left = cross.clone()  # HᵀY − (HᵀH + λ)β
        self._beta = torch.zeros_like(cross)
        self._earlier = (self._beta, self._beta)
        self._gained: list[Tensor] = []
        self._open = torch.ones_like(squares, dtype=torch.bool)  # targets whose fit still changes
        self._basis: Tensor | None = None
        d = cross.shape[0]
        #: the P of which ``Hᵀ(HP)`` is needed next
        self.direction = torch.linalg.qr(probes(d, min(FEWEST, d), cross))[0]

    def step(self, product: Tensor) -> None:
        """Go on with ``Hᵀ(H direction)``."""
        if self._basis is None:
            self._precondition(product)
            self.direction = self._conditioned(self._left)
            self._size = (self._left * self.direction).sum(0)
            return
        product = product + self._ridge * self.direction
        curvature = (self.direction * product).sum(0)
        length = torch.where(curvature > 0, self._size / curvature.clamp_min(1e-300), 0.0)
        if len(self._gained) % RECENT == 0:
            self._earlier = (self._earlier[1], self._beta)
        self._beta = self._beta + length * self.direction
        self._left -= length * product
        self._gained.append(length * self._size)
        self._open &= self._gained[-1] > SETTLED * self._squares
        z = self._conditioned(self._left)
        before, self._size = self._size, (self._left * z).sum(0)
        turned = torch.where(before > 0, self._size / before.clamp_min(1e-300), 0.0) * self.direction
        self.direction = (z + turned) * self._open

    @property
    def coefficients(self) -> tuple[Tensor, Tensor]:
        """β ``[d, c]`` as it is now, and as it was four to seven steps ago."""
        return self._beta, self._earlier[0]

    @property
    def residuals(self) -> Tensor:
        """``‖y − Hβ‖²`` of every target; at least that of the best fit, but for a ridge."""
        gained = torch.stack(self._gained).sum(0) if self._gained else torch.zeros_like(self._squares)
        return (self._squares - gained - self._ridge * self._beta.square().sum(0)).clamp_min(0.0)

    def remaining(self) -> float:
        """About how much all residuals together will still fall: recent gains continued as a geometric series."""
        if not bool(self._open.any()):
            return 0.0
        recent = [float(gain.sum()) for gain in self._gained[-RECENT - 1 :]]
        if len(recent) <= RECENT:
            return math.inf
        if recent[-1] <= 0.0:
            return 0.0
        ratio = min((recent[-1] / recent[0]) ** (1 / RECENT), 0.99) if recent[0] > 0 else 0.99
        return recent[-1] * ratio / (1 - ratio)

    def _precondition(self, product: Tensor) -> None:
        """Nyström's approximation ``HᵀH ≈ U diag(values) Uᵀ`` from the product with an orthonormal matrix."""
        omega = self.direction
        shift = torch.finfo(product.dtype).eps * product.norm() + 1e-300
        product = product + shift * omega
        core = omega.mT @ product
        L = torch.linalg.cholesky_ex((core + core.mT) / 2)[0]
        U, s, _ = torch.linalg.svd(
            torch.linalg.solve_triangular(L.mT, product, upper=True, left=False), full_matrices=False
        )
        values = (s.square() - shift).clamp_min(0.0)
        self._basis = U
        least = values[-1].clamp_min(LEAST * float(values[0])) + self._ridge + 1e-300
        self._weights = (least / (values + self._ridge + 1e-300)).clamp_max(1.0)

    def _conditioned(self, x: Tensor) -> Tensor:
        """The inverse of the approximation, with its least value elsewhere, times that value."""
        assert self._basis is not None
        along = self._basis.mT @ x
        result: Tensor = x + self._basis @ ((self._weights - 1).unsqueeze(1) * along)
        return result
