"""A basis of eigenvectors that is kept while a matrix moves, and renewed by products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.psd import eigh, symmetric_product
from gramscope.linalg.replay import Tensors

#: so many directions, or this part of them, those of the smallest eigenvalues, are treated as one
_FEW, _PART = 8, 64
#: eigenvectors are told apart where their eigenvalues differ by this part of them
_GAP = 0.07
#: one step brings columns this close to orthonormal to 1e-4 of it; a basis that is farther is of no use
ORTHONORMAL = 1e-2


@dataclass
class KeptBasis:
    """An orthogonal matrix whose columns are nearly eigenvectors of ``W Wᵀ``, and what is known of its use.

    Attributes:
        vectors: ``[k, k]`` in float32, or None.
        worn: a renewal is due.
        age: how many steps it has served since the last.
        lasts: how many it is expected to.
        failures: how many steps in a row failed in new or renewed bases.
        pause: for how many steps no other is tried.
    """

    vectors: Tensor | None = None
    worn: bool = False
    age: int = 0
    lasts: int = 64
    failures: int = 0
    pause: int = 0

    @property
    def used(self) -> bool:
        """Whether there is anything to remember."""
        return self.vectors is not None or self.failures > 0

    def fits(self, k: int) -> bool:
        """Whether it can be of use to matrices of k rows."""
        return self.vectors is None or self.vectors.shape == (k, k)

    def to(self, device: torch.device) -> KeptBasis:
        """A copy on this device."""
        return replace(self, vectors=None if self.vectors is None else self.vectors.to(device, copy=True))


def few(k: int) -> int:
    """How many of k directions, those of the smallest eigenvalues, need not be told apart."""
    return min(k, max(_FEW, k // _PART))


def working(vectors: Tensor) -> Tensor:
    """A basis in the precision to work in: float64 where that is as fast."""
    return vectors.to(torch.float32 if processor.on_host(vectors) else torch.float64)


def in_basis(A: Tensor, V: Tensor) -> Tensor:
    """``Vᵀ A``, its first rows, which may be small, to their own rounding."""
    result = V.mT @ A.to(V.dtype)
    if V.dtype != torch.float64:
        f = few(len(V))
        result[:f] = V[:, :f].double().mT @ A.double()
    return result


def new_basis(source: Tensor) -> Tensor:
    """Eigenvectors of ``source sourceᵀ`` ``[k, k]``, eigenvalues ascending; in float32 the small ones would be lost."""
    W = source.double()
    return eigh(symmetric_product(W.mT, W.mT, block=128) if processor.on_host(W) else W @ W.mT)[1].to(source.dtype)


def renewed_basis(given: Tensors) -> dict[str, Tensor]:
    """A basis turned towards the eigenvectors of ``source sourceᵀ`` by products alone.

    With G the matrix in the basis and q its diagonal, ``I + Z + ½Z²`` where ``Z_ij = G_ij/(q_j − q_i)`` diagonalises it to
    first order. Eigenvalues closer than ``_GAP`` of their sum, and the few smallest, are not told apart.

    Args:
        given: ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``vectors``, and ``residual``, their distance from orthonormal ones before the last step towards them.
    """
    V = working(given["vectors"])
    Y = in_basis(given["source"], V)
    G = (Y @ Y.mT).float()
    q = G.diagonal().clone()
    f = few(len(q))
    gap = q - q.unsqueeze(-1)
    gap[:f, :f] = 0
    damped = gap.square().add_((q + q.unsqueeze(-1)).mul_(_GAP).square_())
    Z = processor.low(G.mul_(gap).div_(damped))
    VZ = processor.low(V) @ Z
    V = V.add(VZ).add_(VZ @ Z, alpha=0.5)
    for _ in range(2):
        rest = V.mT @ V
        rest.diagonal().sub_(1)
        residual = torch.linalg.vector_norm(rest)
        V = torch.addmm(V, V, rest, alpha=-0.5)
        if processor.on_host(V) and float(residual) < ORTHONORMAL:
            break
    V = V[:, q.argsort()]
    return {"vectors": V.to(given["vectors"].dtype), "residual": residual}
