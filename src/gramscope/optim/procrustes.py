"""The matrix with a given Gram that is nearest to a given matrix (an orthogonal Procrustes problem)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError
from gramscope.linalg.cuda_graph import Replay, Tensors
from gramscope.optim.polar import PolarMethod, polar
from gramscope.optim.products import has_bfloat16, precise_product
from gramscope.optim.rotation import (
    LARGEST_STEP,
    LARGEST_STEP_OF_PAIRS,
    MOST_ITERATIONS,
    MOST_POLISHES,
    Figures,
    rotation,
)

#: numbers of iterations that are recorded as CUDA graphs
_RECORDED = (2, 3, 4, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, MOST_ITERATIONS)
#: one polish more is needed above each of these angles
_ANGLES = (7e-3, 0.07, 0.2)
#: rotations of first order are not tried on targets this many times larger than the source, whose squares may overflow
_FARTHEST = 2.0**30
#: Cholesky factors are trusted while their diagonals span less than this
_SPAN = 1e-3


class Nearest(NamedTuple):
    """Matrices of given Grams.

    Attributes:
        matrix: ``[…, k, d]``.
        excess: for each matrix how much farther it is from the target than the nearest one, as a part of that distance; an
            estimate, and zero where the nearest one was found to rounding.
    """

    matrix: Tensor
    excess: list[float]


class Effort(NamedTuple):
    """What a recorded CUDA graph computes: iterations of conjugate gradients, and polishes of the rotation."""

    iterations: int
    polishes: int


class NearestWithGram:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, for callers that come again and again.

    The answer is ``polar(target sourceᵀ) source``. ``"auto"`` finds a rotation to first order by conjugate gradients
    (:mod:`gramscope.optim.rotation`), which gives the Gram to rounding and the least distance to within ``tolerance``. Where
    the step is above a fifth of the weights or the rotation above half a radian, and for float64, it takes the polar factor,
    computed in float64.

    On CUDA the rotation is a CUDA graph. Its number of iterations is fixed while it runs; the figures of one call choose the
    number for the next call with the same shape (:attr:`efforts`).

    Args:
        method: ``"auto"``, or how to compute the polar factor, see :func:`~gramscope.optim.polar.polar`.
        tolerance: how much farther than the least distance the result of ``"auto"`` may be from the target.
    """

    def __init__(self, method: PolarMethod = "auto", tolerance: float = 0.02) -> None:
        if not 0 < tolerance < 1:
            raise InputError(
                f"tolerance={tolerance!r} must be between 0 and 1, such as 0.02; method='svd' finds the nearest matrix itself"
            )
        self.method: PolarMethod = method
        self.tolerance = tolerance
        #: what to compute on CUDA, by shape
        self.efforts: dict[str, Effort] = {}
        self._replays: dict[Effort, Replay] = {}

    def __call__(self, target: Tensor, source: Tensor) -> Nearest:
        """The nearest matrices of stacks ``[batch, k, d]`` of one shape, dtype and device.

        Raises:
            NumericalError: the matrices have entries that are not finite, or the result has entries too large for its dtype.
        """
        if source.numel() == 0:
            return Nearest(source.clone(), [0.0] * len(source))
        if self.method != "auto" or source.dtype == torch.float64:
            return Nearest(_by_polar(target, source, self.method), [0.0] * len(source))
        X, figures = self._rotated(target.float(), source.float())
        excess = [one.excess() for one in figures]
        unscaled = [i for i, one in enumerate(figures) if not one.scaled]
        zero = [i for i in unscaled if not bool(source[i].any())]
        unscaled = [i for i in unscaled if i not in zero]
        if zero:
            _check_finite(target[zero])
            X[zero] = 0.0
            excess = [0.0 if i in zero else value for i, value in enumerate(excess)]
        if unscaled:
            X[unscaled], values = self._rescaled(target[unscaled].float(), source[unscaled].float())
            excess = [values.pop(0) if i in unscaled else value for i, value in enumerate(excess)]
        most = LARGEST_STEP_OF_PAIRS if _by_graph(source) else LARGEST_STEP
        large = [i for i, one in enumerate(figures) if one.scaled and not (one.usable(most) and one.orthogonal)]
        if large:
            X[large] = _by_polar(target[large], source[large], "auto").to(X.dtype)
            excess = [0.0 if i in large else value for i, value in enumerate(excess)]
        X = X.to(source.dtype)
        if source.dtype == torch.float16:
            _check_representable(X)
        return Nearest(X, excess)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replays": {}}

    def _rotated(self, target: Tensor, source: Tensor) -> tuple[Tensor, list[Figures]]:
        """The rotated source, and how well the rotation was found."""
        k, d = source.shape[-2:]
        if k > 2 * d:
            return self._in_basis(target, source)
        given = {"target": target, "source": source}
        if not _by_graph(source):
            found = _rotate(given, MOST_ITERATIONS, None, self.tolerance)
            return found["nearest"], Figures.read(found["figures"])
        shape = "×".join(map(str, source.shape))
        effort = self.efforts.get(shape)
        if effort is None:
            found = _rotate(given, MOST_ITERATIONS, None, self.tolerance)
        else:
            found = self._replays.setdefault(effort, Replay(partial(_rotate, **effort._asdict())))(given)
        figures = Figures.read(found["figures"])
        self.efforts[shape] = next_effort(figures, self.tolerance)
        unfinished = any(one.usable() and not one.orthogonal for one in figures)
        if effort is not None and unfinished and effort.polishes < MOST_POLISHES:
            self.efforts[shape] = self.efforts[shape]._replace(polishes=effort.polishes + 1)
            return self._rotated(target, source)
        return found["nearest"], figures

    def _in_basis(self, target: Tensor, source: Tensor) -> tuple[Tensor, list[Figures]]:
        """The same for tall matrices, in an orthonormal basis of the columns of source and change: never k×k."""
        change = target - source
        basis: Tensor = torch.linalg.qr(torch.cat([source, change], -1))[0]
        within, moved = (precise_product(basis.mT.contiguous(), x) for x in (source, change))
        E, figures = rotation(within, moved, MOST_ITERATIONS, tolerance=self.tolerance)
        return source + precise_product(basis, precise_product(E, within)), Figures.read(figures)

    def _rescaled(self, target: Tensor, source: Tensor) -> tuple[Tensor, list[float]]:
        """The same for weights so large or small that their squares are not: scaled by a power of two, which is exact."""
        _check_finite(target, source)
        exponent = torch.frexp(source.abs().amax((-2, -1), keepdim=True)).exponent
        aim = torch.ldexp(target, -exponent)
        if not bool(
            (aim.abs() < _FARTHEST).all()
        ):  # a target of another order of magnitude: no rotation of first order
            return _by_polar(target, source, "auto"), [0.0] * len(source)
        X, excess = self(aim, torch.ldexp(source, -exponent))
        X = torch.ldexp(X, exponent)
        _check_representable(X)
        return X, excess


def nearest_with_gram(target: Tensor, source: Tensor, method: PolarMethod = "auto", tolerance: float = 0.02) -> Tensor:
    """:class:`NearestWithGram` of matrices ``[…, k, d]``, once."""
    if target.shape != source.shape or source.dim() < 2:
        raise InputError(
            f"target and source must be matrices of one shape, got {tuple(target.shape)} and {tuple(source.shape)}"
        )
    if source.numel() == 0:
        return source.clone()
    k, d = source.shape[-2:]
    found = NearestWithGram(method, tolerance)(target.reshape(-1, k, d), source.reshape(-1, k, d))
    return found.matrix.reshape(source.shape)


def next_effort(figures: list[Figures], tolerance: float) -> Effort:
    """What the next call should compute, from the figures of one call.

    That is the least recorded number of iterations after which the estimate was within the tolerance for all matrices, or the
    next larger number where it never was.
    """
    usable = [one for one in figures if one.usable()]
    done = figures[0].iterations
    enough = (n for n in _RECORDED if n > done or all(one.enough(tolerance, n) for one in usable))
    largest = max((one.angle for one in usable), default=0.0)
    return Effort(next(enough, MOST_ITERATIONS), sum(largest > angle for angle in _ANGLES))


def _by_graph(matrix: Tensor) -> bool:
    """Whether the rotation is a CUDA graph, with products of bfloat16 pairs."""
    return matrix.is_cuda and has_bfloat16(matrix.device)


def _rotate(given: Tensors, iterations: int, polishes: int | None, tolerance: float | None = None) -> dict[str, Tensor]:
    """``Q source``, and the figures of :func:`~gramscope.optim.rotation.rotation`, from tensors by name."""
    source = given["source"]
    E, figures = rotation(source, given["target"] - source, iterations, polishes, tolerance)
    return {"nearest": source + precise_product(E, source), "figures": figures}


def _by_polar(target: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """``polar(target sourceᵀ) source`` in float64 (float32 on devices without it), in the dtype of ``source``.

    In float32 the directions of singular values below 3e-4 of the largest would be lost in rounding. For tall matrices the
    product has rank d < k. There the result is ``target L₁⁻ᵀ polar(L₁ᵀL₂) L₂ᵀ`` with the Cholesky factors of both Grams, all
    d×d, or, where these are too ill-conditioned, ``polar(target Rᵀ) R`` with ``source = Y R``.
    """
    precise = torch.float32 if source.device.type == "mps" else torch.float64
    T, W = target.to(precise), source.to(precise)
    _check_finite(T, W)
    # the polar factor does not depend on the size of the target, and the result is linear in the source
    exponent = _exponents(W)
    T, W = torch.ldexp(T, -_exponents(T)), torch.ldexp(W, -exponent)
    found = torch.ldexp(_scaled_polar(T, W, source, method), exponent).to(source.dtype)
    _check_representable(found)
    return found


def _scaled_polar(T: Tensor, W: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """:func:`_by_polar` of matrices whose largest entries are near 1."""
    tolerance = None if source.dtype == torch.float64 else 1e-11
    if source.shape[-2] <= source.shape[-1]:
        return polar(T @ W.mT, method, tolerance=tolerance) @ W
    if method != "svd":
        L, failed = torch.linalg.cholesky_ex(torch.stack([T.mT @ T, W.mT @ W]))
        diagonal = L.diagonal(dim1=-2, dim2=-1)
        if bool(((failed == 0) & (diagonal.amin(-1) > _SPAN * diagonal.amax(-1))).all()):
            L1, L2 = L.unbind()
            turned = polar(L1.mT @ L2, method, tolerance=tolerance) @ L2.mT
            found: Tensor = T @ torch.linalg.solve_triangular(L1.mT, turned, upper=True)
            return found
    Y: Tensor
    R: Tensor
    Y, R = torch.linalg.qr(W)
    return polar(T @ R.mT, method, toward=Y, tolerance=tolerance) @ R


def _exponents(A: Tensor) -> Tensor:
    """For each matrix the e for which its largest entry lies in [2^(e−1), 2^e), ``[…, 1, 1]``."""
    limit = 126 if A.dtype == torch.float32 else 1022
    return torch.frexp(A.abs().amax((-2, -1), keepdim=True)).exponent.clamp(-limit, limit)


def _check_finite(*matrices: Tensor) -> None:
    if not all(bool(A.isfinite().all()) for A in matrices):
        raise NumericalError(f"matrices of shape {tuple(matrices[0].shape)} have NaN or infinite entries")


def _check_representable(found: Tensor) -> None:
    if not bool(found.isfinite().all()):
        raise NumericalError(
            f"the nearest matrices of shape {tuple(found.shape)} with this Gram have entries too large for {found.dtype}"
        )
