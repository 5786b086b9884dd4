"""Mergeable first and second moments of features and targets, in float64; labels count as one-hot rows.

Centred co-moments merge exactly under any split and order (Chan, Golub and LeVeque 1979), and everything that target
linearity, the surrogate, CKA, spectra and neural collapse need follows from them. Their size does not depend on the
number of samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, OneHotRows, Rows, check_pair, check_range, shapes_of, spans
from gramscope.linalg.psd import SymmetricSum


@dataclass(frozen=True)
class Moments:
    """Means and centred co-moments of features h and targets y over ``n`` samples.

    ``C_hy = Σ_i (h_i − h̄)(y_i − ȳ)ᵀ``, and so on. Leading axes (groups) are allowed on everything of h.

    Args:
        n: number of samples.
        mean_h: ``[..., d]``.
        mean_y: ``[c]``.
        C_hh: ``[..., d, d]``, or None where d² is too large to keep.
        C_hy: ``[..., d, c]``.
        C_yy: ``[c, c]``.
    """

    n: int
    mean_h: Tensor
    mean_y: Tensor
    C_hh: Tensor | None
    C_hy: Tensor
    C_yy: Tensor

    def __repr__(self) -> str:
        return shapes_of(self)

    @property
    def HtH(self) -> Tensor:
        """``HᵀH``, uncentred."""
        return self.require_gram() + self.n * _outer(self.mean_h, self.mean_h)

    @property
    def HtY(self) -> Tensor:
        """``HᵀY``, uncentred."""
        return self.C_hy + self.n * _outer(self.mean_h, self.mean_y)

    @property
    def YtY(self) -> Tensor:
        """``YᵀY``, uncentred."""
        return self.C_yy + self.n * _outer(self.mean_y, self.mean_y)

    @classmethod
    def nothing(cls, mean_h: Tensor, c: int) -> Moments:
        """Moments of no samples, with features like these and c targets."""
        zeros, d = mean_h.new_zeros, mean_h.shape[-1]
        return cls(0, zeros(d), zeros(c), None, zeros(d, c), zeros(c, c))

    def to(self, device: torch.device) -> Moments:
        """The same on another device."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in held.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def with_targets(self, kept: Tensor) -> Moments:
        """The same moments with some of the targets alone."""
        return replace(self, mean_y=self.mean_y[kept], C_hy=self.C_hy[..., kept], C_yy=self.C_yy[kept][:, kept])

    def with_centred_targets(self) -> Moments:
        """The same moments for the targets ``y − ȳ``; one-hot labels become the centred ones of the other measures."""
        return replace(self, mean_y=torch.zeros_like(self.mean_y))

    def class_means(self) -> tuple[Tensor, Tensor]:
        """Samples ``[c]`` and mean features ``[c, d]`` of every class, where the targets are one-hot rows of labels."""
        counts = (self.n * self.mean_y).round()
        offsets = (self.C_hy / counts.clamp(min=1)).mT
        return counts, torch.where(counts[:, None] > 0, self.mean_h + offsets, 0.0)

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of both samples, exact for any split and order.

        >>> h = torch.tensor([[1.0], [3.0], [8.0]])
        >>> moments(h[:2], h[:2]).merge(moments(h[2:], h[2:])).C_hy.item(), moments(h, h).C_hy.item()
        (26.0, 26.0)
        """
        if self.C_hy.shape != other.C_hy.shape or (self.C_hh is None) != (other.C_hh is None):
            raise InputError(
                f"moments of different kinds cannot be merged: C_hy {tuple(self.C_hy.shape)} and "
                f"{tuple(other.C_hy.shape)}, C_hh {'kept' if self.C_hh is not None else 'not kept'} and "
                f"{'kept' if other.C_hh is not None else 'not kept'}"
            )
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        share = other.n / (self.n + other.n)
        dh, dy = other.mean_h - self.mean_h, other.mean_y - self.mean_y
        weight = self.n * share
        C_hh = None
        if self.C_hh is not None and other.C_hh is not None:
            C_hh = self.C_hh + other.C_hh + weight * _outer(dh, dh)
        return Moments(
            self.n + other.n,
            self.mean_h + share * dh,
            self.mean_y + share * dy,
            C_hh,
            self.C_hy + other.C_hy + weight * _outer(dh, dy),
            self.C_yy + other.C_yy + weight * _outer(dy, dy),
        )

    def require_gram(self) -> Tensor:
        """``C_hh``, or an error that says it was not collected."""
        if self.C_hh is None:
            raise InputError("these moments were collected without C_hh; collect them with gram=True")
        return self.C_hh


#: entries of the blocks in which arrays are read, 1 MB
CACHED_ENTRIES = 2**17


def moments(H: Array | Rows, Y: Array | Rows, gram: bool = True) -> Moments:
    """Moments of features ``H [n, d]`` and float targets ``Y [n, c]``, or labels as one-hot rows that are not formed.

    Blocks of rows are read once and merged. What :class:`OneHotRows` subtracts does not count.

    >>> m = moments(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]]))
    >>> m.n, m.mean_h.item(), m.C_hy.item()
    (2, 2.0, 1.0)
    """
    features = H if isinstance(H, Rows) else Rows(H, "H")
    targets = Y if isinstance(Y, Rows) else Rows(Y, "Y")
    check_pair(features, targets)
    d, c = features.width, targets.width
    empty = features.block(0, 0)
    whole, total, offsets = (
        Moments.nothing(empty.new_zeros(d), c),
        SymmetricSum(d if gram else 0, device=empty.device),
        [],
    )
    for start, stop in spans(features.n, d + c, least=min(d, 256), entries=CACHED_ENTRIES):
        h = features.block(start, stop)
        if isinstance(targets, OneHotRows):
            part = label_moments(h, targets.index(start, stop).to(h.device), c, gram=False)
        else:
            part = block_moments(h, targets.block(start, stop), gram=False)
        if gram:
            total.add_gram(h - part.mean_h)
            offsets.append(between(whole, part))
        whole = whole.merge(part)
    if not gram:
        return whole
    total.add_gram(torch.cat(offsets))
    return replace(whole, C_hh=total.dense())


def block_moments(h: Tensor, y: Tensor, gram: bool = True) -> Moments:
    """Moments of one float64 block ``h [..., m, d]``, ``y [m, c]``."""
    mean_h, mean_y = h.mean(-2), y.mean(-2)
    h, y = h - mean_h.unsqueeze(-2), y - mean_y
    C_hy = (y.mT @ h).mT  # faster than hᵀy for few targets
    return Moments(h.shape[-2], mean_h, mean_y, h.mT @ h if gram else None, C_hy, y.mT @ y)


def label_moments(h: Tensor, labels: Tensor, c: int, gram: bool = True) -> Moments:
    """Moments of one float64 block ``h [m, d]`` and the one-hot rows of its labels ``[m]`` in 0..c−1, which are not formed.

    >>> m = label_moments(torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([1, 0]), 2)
    >>> m.C_hy.tolist(), m.C_yy.tolist()
    ([[1.0, -1.0]], [[0.5, -0.5], [-0.5, 0.5]])
    """
    m, mean_h = len(h), h.mean(0)
    h = h - mean_h
    counts = torch.bincount(labels, minlength=c).to(h.dtype)
    C_hy = h.new_zeros(c, h.shape[1]).index_add_(0, labels, h).mT
    C_yy = torch.diag(counts) - torch.outer(counts, counts) / m
    return Moments(m, mean_h, counts / m, h.mT @ h if gram else None, C_hy, C_yy)


def between(a: Moments, b: Moments) -> Tensor:
    """The row whose Gram matrix :meth:`Moments.merge` adds to the d×d sums of both, ``[1, d]``."""
    return math.sqrt(a.n * b.n / max(a.n + b.n, 1)) * (b.mean_h - a.mean_h)[None]


def is_constant(n: int, mean: Tensor, scatter: Tensor) -> bool:
    """Whether a sum of squared deviations from ``mean`` is no more than rounding leaves of a constant."""
    check_range(scatter, "a sum of squared deviations")
    return float(scatter) <= n * (8 * torch.finfo(mean.dtype).eps) ** 2 * float(mean.square().sum())


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)
