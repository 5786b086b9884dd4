"""A basis of eigenvectors that is kept while a matrix moves, and renewed by products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.beside import Beside
from gramscope.linalg.factors import Factor, product
from gramscope.linalg.fused import first_rows
from gramscope.linalg.psd import eigh, symmetric_product
from gramscope.linalg.replay import Tensors

#: so many directions, or this part of them, those of the smallest eigenvalues, are treated as one
_FEW, _PART = 8, 64
#: eigenvectors are told apart where their eigenvalues differ by this part of them
_GAP = 0.07
#: one step brings columns this close to orthonormal to 1e-4 of it; a basis that is farther is of no use
ORTHONORMAL = 1e-2
#: so many steps towards orthonormal columns at most, and where nothing can be looked at on the way
_POLISHES = 3


@dataclass
class KeptBasis:
    """An orthogonal matrix whose columns are nearly eigenvectors of ``W Wᵀ``, and what is known of its use.

    Attributes:
        vectors: ``[k, k]`` in float32, or None.
        worn: a renewal is due.
        age: how many steps it has served since the last.
        at_first: how many iterations more than usual the first of them took.
        lasts: how many it is expected to.
        failures: how many steps in a row failed in new or renewed bases.
        pause: for how many steps no other is tried.
    """

    vectors: Tensor | None = None
    worn: bool = False
    age: int = 0
    at_first: int = 0
    lasts: int = 64
    failures: int = 0
    pause: int = 0

    @property
    def used(self) -> bool:
        """Whether there is anything to remember."""
        return self.vectors is not None or self.failures > 0

    @property
    def fresh(self) -> bool:
        """Whether it is about to be used as it is."""
        return self.vectors is not None and not self.worn and not self.pause

    def fits(self, k: int) -> bool:
        """Whether it can be of use to matrices of k rows."""
        return self.vectors is None or self.vectors.shape == (k, k)

    def to(self, device: torch.device) -> KeptBasis:
        """A copy on this device."""
        return replace(self, vectors=None if self.vectors is None else self.vectors.to(device, copy=True))


def few(k: int) -> int:
    """How many of k directions, those of the smallest eigenvalues, need not be told apart."""
    return min(k, max(_FEW, k // _PART))


def in_basis(V: Tensor, source: Tensor, target: Tensor | None = None) -> Tensor:
    """``Vᵀ source``, and ``Vᵀ (target − source)`` ``[1 or 2, k, d]``.

    The first rows of ``Vᵀ source``, which may be small, are right to their own rounding.
    """
    f = few(len(V))
    if processor.on_host(V):
        given = [source] if target is None else [source, target - source]
        result = source.new_empty(len(given), *source.shape)
        for x, to in zip(given, result, strict=True):
            torch.mm(V.mT, x, out=to)
        result[0, :f] = first_rows(V, source, f)
        return result
    step, beside = Factor.of(source, 0) if target is None else Factor.of_step(source, target), Beside(V.device)
    with beside:
        first = first_rows(V, source, f)
    result = product(Factor.of(V, 0), step).view(-1, *source.shape)
    beside.join()
    result[0, :f] = first
    return result


def own_product(X: Tensor) -> Tensor:
    """``X Xᵀ`` ``[k, k]``."""
    if processor.on_host(X):
        return symmetric_product(X.mT, X.mT, block=128)
    rows = Factor.of(X, 1)
    return product(rows, rows)


def new_basis(source: Tensor) -> Tensor:
    """Eigenvectors of ``source sourceᵀ`` ``[k, k]``, eigenvalues ascending; in float32 the small ones would be lost."""
    W = source.double()
    _, vectors = eigh(symmetric_product(W.mT, W.mT, block=128) if processor.on_host(W) else W @ W.mT)
    return vectors.to(source.dtype, memory_format=torch.contiguous_format)


def renewed_basis(given: Tensors) -> dict[str, Tensor]:
    """A basis turned towards the eigenvectors of ``source sourceᵀ`` by products alone.

    With G the matrix in the basis and q its diagonal, ``I + Z + ½Z²`` where ``Z_ij = G_ij/(q_j − q_i)`` diagonalises it to
    first order. Eigenvalues closer than ``_GAP`` of their sum are not told apart, and the few smallest only by
    :func:`told_apart`.

    Args:
        given: ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``vectors``; ``corner``, the matrix in the basis for the few smallest eigenvalues ``[f, f]``; and ``residual``, the
        distance of the vectors from orthonormal ones before the last step towards these.
    """
    V = given["vectors"]
    (Y,) = in_basis(V, given["source"])
    G = own_product(Y)
    q = G.diagonal().clone()
    f = few(len(q))
    gap = q - q.unsqueeze(-1)
    gap[:f, :f] = 0
    damped = gap.square().add_((q + q.unsqueeze(-1)).mul_(_GAP).square_())
    Z = processor.low(G.mul_(gap).div_(damped))
    VZ = processor.low(V) @ Z
    V, residual = _orthonormal(V.add(VZ).add_(VZ @ Z, alpha=0.5))
    V = V[:, q.argsort()]
    first = first_rows(V, given["source"], f).double()
    return {"vectors": V, "corner": first @ first.mT, "residual": residual}


def told_apart(vectors: Tensor, corner: Tensor) -> Tensor:
    """A basis with its first columns turned to eigenvectors of the ``corner`` of :func:`renewed_basis`; changes it."""
    f = len(corner)
    turn = eigh(torch.nan_to_num(corner.cpu()))[1].to(vectors.device)
    vectors[:, :f] = (vectors[:, :f].double() @ turn).float()
    return vectors


def _orthonormal(V: Tensor) -> tuple[Tensor, Tensor]:
    """V after steps ``V(3I − VᵀV)/2``, and ``‖VᵀV − I‖_F`` before the last."""
    for left in reversed(range(_POLISHES)):
        if left or processor.on_host(V):
            across = Factor.of(V, 0)
            rest = product(across, across)
        else:
            precise = V.double()
            rest = precise.mT @ precise
        rest.diagonal().sub_(1)
        rest = rest.float()
        V = V.sub(product(Factor.of(V, 1), Factor.of(rest, 0)), alpha=0.5)
        if left == 0 or processor.on_host(V):
            residual = processor.norm(rest)
            if processor.on_host(V) and float(residual) < ORTHONORMAL:
                break
    return V, residual
