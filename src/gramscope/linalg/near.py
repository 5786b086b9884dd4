"""The nearest matrix with a given Gram when the given matrices are close, and when callers come again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.kept_basis import ORTHONORMAL, KeptBasis, new_basis, renewed_basis, told_apart
from gramscope.linalg.replay import Tensors
from gramscope.linalg.turning import comparable, needed_iterations, turned_in_basis

Step: TypeAlias = Callable[[Tensors], dict[str, Tensor]]

#: a basis that has failed more often in a row, also renewed, is given up
_TRIES = 3
#: the longest pause after bases that fail is 4 to this power, less one
_PATIENCE = 2


@dataclass(frozen=True)
class Steps:
    """What :func:`nearest_nearby` is made of: these functions, or :class:`~gramscope.linalg.replay.Replay` of them."""

    turned: Step = turned_in_basis
    renewed: Step = renewed_basis


def nearest_nearby(target: Tensor, source: Tensor, kept: KeptBasis, steps: Steps | None = None) -> Tensor | None:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, where ``target`` is close to ``source``; else None.

    See :func:`~gramscope.linalg.turning.turned_in_basis`. The eigenbasis is the expensive part, and of use for many steps of a
    slowly moving matrix.

    Args:
        target, source: ``[k, d]``, k ≤ d, in float32.
        kept: the basis of an earlier call, which may be of any quality, or none; changed in place.
        steps: how to go about it.
    """
    if kept.pause:
        kept.pause -= 1
        return None
    steps = steps or Steps()
    for vectors in _bases(target, source, kept, steps):
        found = steps.turned({"target": target, "source": source, "vectors": vectors})
        more = needed_iterations(found)
        if more is not None:
            kept.at_first = kept.at_first if kept.age else more
            kept.vectors, kept.age, kept.failures = vectors, kept.age + 1, 0
            kept.worn = more > kept.at_first or kept.age >= kept.lasts
            return found["nearest"]
    return None


def _bases(target: Tensor, source: Tensor, kept: KeptBasis, steps: Steps) -> Iterator[Tensor]:
    """The kept basis, then it renewed, then a new one; when these are used up, none are tried for a while."""
    if kept.vectors is not None and not kept.worn:
        yield kept.vectors
        if not _comparable(target, source):
            return
        kept.lasts = max(1, kept.age)  # one that fails is renewed earlier from now on
    elif kept.age >= kept.lasts:
        kept.lasts += max(1, kept.lasts // 4)  # and one that has not failed later
    if kept.vectors is not None:
        better = steps.renewed({"source": source, "vectors": kept.vectors})
        orthonormal = float(better["residual"]) < ORTHONORMAL
        kept.vectors, kept.worn = told_apart(better["vectors"], better["corner"]) if orthonormal else None, True
    kept.age = 0
    if kept.vectors is not None:
        yield kept.vectors
    if not _comparable(target, source):
        return
    if kept.vectors is None or processor.on_host(source):  # elsewhere it takes longer than the general method
        yield new_basis(source)
    kept.failures += 1
    kept.pause = 4 ** min(max(kept.failures - _TRIES, 0), _PATIENCE) - 1
    if processor.on_host(source) or kept.failures > _TRIES:
        kept.vectors = None


def _comparable(target: Tensor, source: Tensor) -> bool:
    return comparable(*(float(torch.linalg.vector_norm(x)) for x in (source, target - source)))
