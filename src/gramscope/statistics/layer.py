"""What is kept of one layer: additive sums and mergeable moments, sized by the layer and not by the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import shapes_of
from gramscope.statistics.feature_statistics import FeatureStatistics, merge_features

#: the fields of :class:`LayerStatistics` that add up
SUMS = (
    "D",
    "Sigma",
    "autograd",
    "JtJ",
    "JtJ_centered",
    "input_covariance",
    "kernel_parts",
    "centered_parts",
    "covariance_probes",
    "kernel_probes",
    "centered_probes",
)
#: those that are symmetric
SYMMETRIC = ("Sigma", "JtJ", "JtJ_centered", "input_covariance", "kernel_parts", "centered_parts")
#: those kept in parts
PARTED = ("kernel_parts", "centered_parts", "kernel_probes", "centered_probes")


class NotCollected(InputError):
    """A statistic that a measure needs was not asked for, or was left out."""


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over samples and sites of one layer; every one of them adds up over batches, processes and machines.

    Args:
        name: the layer.
        weight: ``W [k, d]`` (``[groups, k, d]``) the sums belong to.
        n: samples seen.
        D: ``Σ δ hᵀ [k, d]``, the weight gradient of the summed loss.
        Sigma: ``Σ δ δᵀ [k, k]``.
        autograd: the parameter's own gradient of the summed loss ``[k, d]``, for checking ``D``.
        JtJ: ``Σ_i J_iᵀJ_i [k, k]``; the tangent kernel is ``K = JtJ / n``.
        JtJ_centered: the same of ``J_i − J_i⁰`` against a reference network.
        features: moments of the layer's inputs and the targets.
        shared: whether another module uses the same parameter, so that ``autograd`` holds its part of the gradient too.
        terms: what the mean loss divides by, ``D / terms`` is its gradient: samples, or positions with a loss of their own.
        input_covariance: ``WᵀΣW = Σ g gᵀ [d, d]``, kept in place of Σ with ``at_inputs`` where k > d.
        kernel_parts: with ``at_inputs``, in place of JtJ: ``[parts, k, k]`` that add up to it, or ``[parts, d, d]`` that
            add up to ``WᵀJᵀJW`` where k > d. One part of all outputs, or several independent random sketches of them.
            With ``probed`` too, ``[parts, k, k]`` unless ``at_inputs`` is given.
        centered_parts: the same in place of ``JtJ_centered``.
        covariance_probes: ``ΣWΩ [k, r]`` with the random signs Ω of :func:`gramscope.linalg.stochastic.probes`, in place of
            Σ with ``probed`` where exact measures do not fit the memory budget.
        kernel_probes: ``[parts, k, m]`` in place of K in the same way: parts that add up to ``JᵀJ`` times the thin matrices of
            :func:`gramscope.statistics.layer_sums.thin_of_kernel` of W and, with a reference, of ``W − W₀``.
        centered_probes: with a reference the same in place of ``JtJ_centered``, of ``W − W₀`` and of ``W₀``.
    """

    name: str
    weight: Tensor
    n: int
    D: Tensor | None = None
    Sigma: Tensor | None = None
    autograd: Tensor | None = None
    JtJ: Tensor | None = None
    JtJ_centered: Tensor | None = None
    features: FeatureStatistics | None = None
    shared: bool = False
    terms: int = 0
    input_covariance: Tensor | None = None
    kernel_parts: Tensor | None = None
    centered_parts: Tensor | None = None
    covariance_probes: Tensor | None = None
    kernel_probes: Tensor | None = None
    centered_probes: Tensor | None = None

    def __repr__(self) -> str:
        return shapes_of(self)

    @property
    def loss_terms(self) -> int:
        """What the mean loss divides by; the samples for statistics that were stored without it."""
        return self.terms or self.n

    @property
    def at_inputs(self) -> bool:
        """Whether the kernel, where it is kept as parts, is ``WᵀKW`` of the layer's inputs."""
        return self.kernel_parts is not None and self.kernel_parts.shape[-1] < self.weight.shape[-2]

    @property
    def kernel(self) -> Tensor:
        """``[parts, …, s, s]`` that add up to K, or to ``WᵀKW`` with :attr:`at_inputs`."""
        if self.JtJ is not None:
            return self.K.unsqueeze(0)
        return self._need(self.kernel_parts, "jacobians=True") / self.n

    @property
    def kernel_centered(self) -> Tensor:
        """``[parts, …, k, k]`` that add up to ``K̄``."""
        if self.centered_parts is not None:
            return self.centered_parts / self.n
        return self._need(self.JtJ_centered, "reference=<the network at initialisation>").unsqueeze(0) / self.n

    @property
    def K(self) -> Tensor:
        """Tangent kernel ``K = (1/n) Σ J_iᵀJ_i``, ``[k, k]``."""
        if self.JtJ is None and self.kernel_parts is not None and not self.at_inputs:
            return self.kernel_parts.sum(0) / self.n
        return self._need(self.JtJ, "jacobians=True") / self.n

    @property
    def K_centered(self) -> Tensor:
        """``K̄ = (1/n) Σ (J_i − J_i⁰)ᵀ(J_i − J_i⁰)``, ``[k, k]``."""
        return self.kernel_centered.sum(0)

    @property
    def gradient(self) -> Tensor:
        """``D``, or an error that says it was not collected."""
        return self._need(self.D, "a loss")

    @property
    def covariance(self) -> Tensor:
        """``Σ``, or an error that says it was not collected."""
        return self._need(self.Sigma, "a loss and covariance=True")

    def _need(self, value: Tensor | None, what: str) -> Tensor:
        if value is None:
            raise NotCollected(f"layer {self.name!r}: this was not collected; collect with {what}")
        return value


@dataclass(frozen=True)
class NetworkStatistics:
    """What is kept of the whole network.

    Args:
        n: samples seen.
        loss_sum: ``Σ_i L_i``.
        correct: correctly classified targets, out of ``counted``; ``None`` for real targets.
        counted: targets that count for the accuracy.
        output: moments of the network's output and the targets.
        terms: what the mean loss divides by: samples, or positions with a loss of their own; 0 without a loss.
    """

    n: int = 0
    loss_sum: float = 0.0
    correct: int | None = None
    counted: int = 0
    output: FeatureStatistics | None = None
    terms: int = 0

    @property
    def loss(self) -> float:
        """Mean loss of a sample, or of a position where each has its own (:mod:`gramscope.layers.losses`)."""
        return self.loss_sum / max(self.terms or self.n, 1)

    @property
    def accuracy(self) -> float | None:
        """Fraction of correctly classified targets."""
        return None if self.correct is None else self.correct / max(self.counted, 1)


Part = TypeVar("Part")


def merge_optional(a: Part | None, b: Part | None, merge_both: Callable[[Part, Part], Part]) -> Part | None:
    """Merge if both exist, else take the one that does."""
    if a is None or b is None:
        return a if b is None else b
    return merge_both(a, b)


def add_parts(a: Tensor, b: Tensor) -> Tensor:
    """Sums kept in parts ``[parts, …]``: a single part, which is exact, counts as equal shares of several."""
    parts = max(a.shape[0], b.shape[0])
    a, b = (x.expand(parts, *x.shape[1:]) / parts if x.shape[0] == 1 < parts else x for x in (a, b))
    return add(a, b.to(a.dtype))


def add(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` of one shape."""
    if a.shape != b.shape:
        raise InputError(f"cannot merge sums of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a + b.to(a.device)


def merge_layers(a: LayerStatistics, b: LayerStatistics) -> LayerStatistics:
    """Statistics of the union of two samples seen by the same layer with the same weight; a sum that is absent is zero."""
    if a.name != b.name or a.weight.shape != b.weight.shape:
        raise InputError(
            f"cannot merge layer {a.name!r} {tuple(a.weight.shape)} with {b.name!r} {tuple(b.weight.shape)}"
        )
    if not torch.equal(a.weight, b.weight.to(a.weight)):
        raise InputError(f"layer {a.name!r}: the two statistics were collected with different weights")
    how = dict.fromkeys(SUMS, add) | dict.fromkeys(PARTED, add_parts)
    sums = {name: merge_optional(getattr(a, name), getattr(b, name), how[name]) for name in SUMS}
    features = merge_optional(a.features, b.features, merge_features)
    return replace(a, n=a.n + b.n, features=features, shared=a.shared or b.shared, **sums)  # type: ignore[arg-type]


def merge_networks(a: NetworkStatistics, b: NetworkStatistics) -> NetworkStatistics:
    """Network statistics of the union of two samples, of which one may be empty."""
    if a.n == 0 or b.n == 0:
        return b if a.n == 0 else a
    correct = None if a.correct is None or b.correct is None else a.correct + b.correct
    return NetworkStatistics(
        a.n + b.n,
        a.loss_sum + b.loss_sum,
        correct,
        a.counted + b.counted,
        merge_optional(a.output, b.output, merge_features),
        sum(part.terms or (part.n if part.loss_sum else 0) for part in (a, b)),  # stored ones may have no terms
    )
