"""The rotation that brings a matrix nearest to another one close by, found in a basis that is nearly right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.beside import Beside
from gramscope.linalg.factors import Factor, product
from gramscope.linalg.fused import (
    Balance,
    apart,
    balanced,
    defects,
    less_columns,
    moved_by,
    narrow,
    nearly_diagonal,
    row_norms,
    small_turn,
    symmetrised,
)
from gramscope.linalg.kept_basis import few, in_basis, own_product
from gramscope.linalg.last_directions import Nearly, image_of, last_directions
from gramscope.linalg.newton_schulz import CONVERGED
from gramscope.linalg.replay import Tensors

EPS = torch.finfo(torch.float32).eps

#: changes beyond this part of ‖W‖ are left to the general method
_LARGEST = 0.03
#: norms whose fourth powers float32 can hold
_NORMS = (1e-8, 1e8)
#: the rotation is found to this part of the change, or to a unit of rounding of W
_PRECISION = 2e-4
#: the Gram may be off by this many units of rounding for lack of orthogonality, and by this many for products to be coarse
_PRECISE, _COARSE = 0.2, 0.1
#: an iteration is expected to leave this much more than the one before, relative to what each began with
_SAFETY = 4
_ITERATIONS = 4
#: where nothing is known on the way only so many of them, the last, have the term of second order
_FULL = 2
#: a basis in which more iterations than this are needed is due to be renewed
_USUAL = 1
#: a basis in which the result is off by this part of what it may be is due to be renewed as well
_CLOSE = 0.8
#: of the block of the last directions the least singular value that is found, relative to the largest
_LEAST = 1e-11
#: H counts as positive definite up to this distance from its diagonal
_DEFINITE = 0.9


def turned_in_basis(given: Tensors) -> dict[str, Tensor]:
    """The nearest matrix to ``target`` with the Gram of ``source`` by a rotation found in the basis ``vectors``.

    ``X = Q source`` is nearest when ``target Xᵀ`` is symmetric and positive definite, or ``H = QᵀM`` is, where
    ``M = target sourceᵀ``. With ``Q = I + K + ½K²``, which is orthogonal up to ``¼K⁴``, and s the diagonal of M, the first of
    these says

        (sᵢ + sⱼ) Kᵢⱼ = (N − Nᵀ)ᵢⱼ,    N = M − K (M − diag s) + ½ K K M.

    Where the basis diagonalises M all but the first term are of second order; where it nearly does, the equation can be
    iterated, and what is multiplied by K may be rounded to bfloat16. The directions of the smallest eigenvalues, for which a
    small change may be a large rotation or a reflection, are left out of K and turned among themselves by the polar factor of
    what H is for them when the others follow (:mod:`~gramscope.linalg.last_directions`). That H is positive definite then is
    shown for the K of the iteration before; it stays so, as the last iteration turns nothing by 90°.

    A source equal to the target is not moved: then K is zero.

    Args:
        given: ``target``, ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``nearest`` ``[k, d]``, and ``figures``, by which :func:`needed_iterations` judges it.
    """
    # Lanes: what is small runs beside the products that fill a device, in the order in which others wait for it.
    source, V = given["source"], given["vectors"]
    f, (last, outward, inward) = few(len(V)), (Beside(V.device, lane) for lane in range(3))
    parts = in_basis(V, source, given["target"])
    X, change = parts
    M, balance, rest, first, low = _products(parts, f)
    s = balance.s
    with outward:
        rows, back = Factor.of(X, 0), Factor.of(V, 1)
        lengths = [row_norms(X), row_norms(change)]
    sizes = (
        (float(processor.norm(lengths[0])), float(processor.norm(lengths[1]))) if processor.on_host(source) else None
    )
    found = _rotation(first, low, M, balance, rest, sizes, last)
    with outward:
        turning = Factor.of(found.K, 1)
    with inward:
        root, angles = s.sqrt(), row_norms(found.K)
        effects = found.effects or [row_norms(b, a) * root for a, b in pairwise((*found.before, found.K))]
    others, coarse, scale = nearly_diagonal(M, found.gained, found.before[-1], s, f)
    square = _square(coarse)
    for beside in (last, outward):
        beside.join()
    KX = product(turning, rows)
    H = Nearly(found.columns[:f], found.columns * scale.unsqueeze(-1), others, coarse, square, scale)
    z = last_directions(H)
    with last:
        image = image_of(H, z)
        among, block, turned = small_turn(z, image, H.columns, H.corner, scale, _LEAST)
        uneven = row_norms(defects(z, image, among, block, scale))
    free = z * scale.unsqueeze(-1)
    with outward:
        directions = free.clone()
        directions.diagonal().fill_(1)
        directions = narrow(back.stored, _rotated(directions, turning, 1))
    with inward:
        small = X[:f] + product(Factor.of(free, 0), rows)
        lost, distance = _lost(X[:f], small), _norms_of_square(coarse, square)
    KKX = _second(turning, found.low, KX, s)
    with inward:
        even = row_norms(torch.stack([s, *lengths, angles, row_norms(KKX), distance, *effects]))
    moved = product(back, Factor.of(KX.add_(KKX, alpha=0.5), 0))
    for beside in (inward, outward, last):
        beside.join()
    with last:
        figures = torch.cat([turned, lost, uneven, even])
    nearest = moved_by(source, moved, directions, among, small)
    last.join()
    return {"nearest": nearest, "figures": figures}


@dataclass(frozen=True)
class _Rotation:
    """The solution K ``[k, k]`` of the equation of :func:`turned_in_basis`, and what belongs to it.

    Attributes:
        K, low: the last iterate, and coarsely.
        before: the one or two before it.
        gained: ``−K (M − diag s) + ½ K K M`` for the one before, coarsely.
        columns: the first columns of ``H = QᵀM``, perhaps for the one before; they hardly depend on its errors.
        effects: by how much each iteration moved the result, by rows, which are as long as columns of antisymmetric
            matrices; empty where nothing can be looked at on the way.
    """

    K: Tensor
    low: Tensor
    before: tuple[Tensor, ...]
    gained: Tensor
    columns: Tensor
    effects: list[Tensor]


def _products(parts: Tensor, f: int) -> tuple[Tensor, Balance, Tensor, Tensor, Tensor]:
    """What is iterated with, of X and its change ``[2, k, d]``.

    Returns:
        ``M = X Xᵀ + change Xᵀ``; the balance for ``|diag M|``; coarsely ``|diag M| − M``; K to first order, exactly zero where
        nothing changes; and coarsely.
    """
    X, change = parts
    if not processor.on_host(X):
        rows = Factor.of(parts.flatten(0, 1), 1)
        own, odd = product(rows, Factor(rows.stored[: len(X)], 1)).chunk(2)
        return symmetrised(own, odd, f)
    odd = change @ X.mT
    M = own_product(X).add_(odd)
    return M, *apart(M, odd, f)


def _rotation(
    first: Tensor,
    low: Tensor,
    M: Tensor,
    balance: Balance,
    rest: Tensor,
    sizes: tuple[float, float] | None,
    beside: Beside,
) -> _Rotation:
    """Iterate ``Kᵢⱼ = firstᵢⱼ + (gained − gainedᵀ)ᵢⱼ/(sᵢ + sⱼ)``, with K zero for i, j < f.

    Args:
        first, low, M, rest: of :func:`_products`.
        balance: s and f.
        sizes: of the source and of its difference from the target, to end when it is time; None: after all iterations.
        beside: where the columns are found meanwhile.
    """
    s, f = balance.s, balance.few
    Ks, effects = [first], [] if sizes is None else [row_norms(first) * s.sqrt()]
    for left in reversed(range(_ITERATIONS)):
        if left == 0 and sizes is None:
            with beside:
                columns = _rotated(M[:, :f], Factor.of(Ks[-1], 1), -1)
        gained = low @ rest
        if sizes is not None or left < _FULL:
            gained.addmm_(low, less_columns(gained, low, s), alpha=-0.5)
        K, low = balanced(gained, balance, first)
        Ks = [*Ks[-2:], K]
        if sizes is not None:
            effects.append(row_norms(K, Ks[-2]) * s.sqrt())
            if _needed([float(processor.norm(x)) for x in effects], _enough(*sizes)) is not None:
                break
    if sizes is not None:
        columns = _rotated(M[:, :f], Factor.of(K, 1), -1)
    return _Rotation(K, low, tuple(Ks[:-1]), gained, columns, effects)


def needed_iterations(found: dict[str, Tensor]) -> int | None:
    """How many iterations more than usual a result of :func:`turned_in_basis` took; None: it cannot be relied on."""
    figures = found["figures"].tolist()
    residual, turned, lost, less, bent, tied, total, size, step, angle, second, distance, *effects = figures
    enough = _enough(size, step)
    left = _left(*effects[-2:])
    blurred = min(turned, 1.0) * (lost + left * less) if turned else 0.0
    straight = angle**2 * second <= 16 * enough  # at least ⅛ K⁴X, by which I + K + ½K² lengthens; ‖K‖² ≤ ½‖K‖_F²
    orthogonal = _excess(second) < _PRECISE * EPS * total and straight and residual < CONVERGED
    definite = distance < _DEFINITE**2 and bent <= enough and tied <= enough and blurred <= enough
    needed = _needed(effects, enough) if comparable(size, step) and orthogonal and definite else None
    close = max(bent, tied, left) > _CLOSE * enough
    return None if needed is None else max(0, needed - _USUAL, int(close))


def comparable(size: float, step: float) -> bool:
    """Whether a matrix of norm ``size`` and one that differs by ``step`` are close, and their products numbers."""
    return _NORMS[0] < size < _NORMS[1] and step < _LARGEST * size


def _enough(size: float, step: float) -> float:
    """How much the result may be off, in ‖·‖_F."""
    return max(2 * EPS * size, _PRECISION * step)


def _needed(effects: Sequence[float], enough: float) -> int | None:
    """After how many iterations what is left of the rotation is small enough, and stays so; None: not after all of them.

    Args:
        effects: by how much each moved the result, in ‖·‖_F; the first may be that of K to first order.
        enough: of :func:`_enough`.
    """
    before = math.inf
    for count, effect in enumerate(effects):
        settled = effect <= enough and _left(before, effect) <= enough
        soon = count > 0 and _SAFETY * effect * effect <= enough * before
        if (settled or soon) and all(later <= enough for later in effects[count + 1 :]):
            return count
        before = effect
    return None


def _left(before: float, last: float) -> float:
    """How much more iterations would move the result that go on as the last two did."""
    return last * last / (before - last) if last < before else math.inf if last else 0.0


def _rotated(B: Tensor, turning: Factor, sign: int) -> Tensor:
    """``(I ± K + ½K²) B``."""
    KB = narrow(turning.stored, B)
    return narrow(turning.stored, KB, 0.5, [(1, B), (sign, KB)])


def _second(turning: Factor, low: Tensor, KX: Tensor, s: Tensor) -> Tensor:
    """``K K X``; coarsely where it can be seen that it is too small for its rounding to matter."""
    if processor.on_host(KX):
        KKX = low @ processor.low(KX)
        if _excess(float(processor.norm(row_norms(KKX)))) < _COARSE * EPS * float(processor.norm(s)):
            return KKX
    return product(turning, Factor.of(KX, 0))


def _excess(second: float) -> float:
    """The most that ``I + K + ½K²`` changes the Gram of X when the norm of ``K K X`` is this."""
    return 0.25 * second**2


def _square(E: Tensor) -> Tensor | None:
    """``E E``, unless it can be seen that E is too small for that to tell more than E."""
    return None if processor.on_host(E) and float(processor.norm(row_norms(E))) < _DEFINITE else E @ E


def _norms_of_square(E: Tensor, square: Tensor | None) -> Tensor:
    """Numbers ``[k]`` whose norm is that of ``E E``, or larger."""
    if square is not None:
        return row_norms(square)
    rows = row_norms(E)
    return rows * processor.norm(rows)


def _lost(rows: Tensor, small: Tensor) -> Tensor:
    """How uncertain the last directions are: the effect of roundings, and what other errors grow by ``[2]``.

    Products round relative to the rows, of which much less may be left; and what they round is turned, by an angle of one.

    Args:
        rows: the first rows of the source in the basis ``[f, d]``.
        small: what is left of them when the others follow.
    """
    rounding = processor.rounding(rows) / rows.shape[1] ** 0.5
    lengths = row_norms(rows)
    less = (lengths / row_norms(small)).nan_to_num_(0.0, math.inf)  # nothing of nothing is lost
    return torch.stack([processor.norm(lengths.mul_(less)).mul_(rounding), less.amax()])
