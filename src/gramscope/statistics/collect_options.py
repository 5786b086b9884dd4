"""What a collection keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.statistics.features import Tokens


@dataclass(frozen=True)
class Options:
    """What a collection keeps, checked; the fields are arguments of :func:`gramscope.statistics.collect.collect`.

    ``layouts`` says for each module output where its features are (:func:`gramscope.statistics.layouts.layout`).
    """

    gradients: bool
    covariance: bool
    features: bool
    jacobians: bool | str
    sketch: int | None
    gram: bool | str
    residuals: bool
    autograd: bool
    tokens: Tokens
    ignore_index: int
    layouts: dict[str, str]
    memory: int
    batch_dim: int
    eval_mode: bool
    dtype: torch.dtype
    at_inputs: frozenset[str] = frozenset()
    snapshot: bool = True
    probed: bool = False
    visit: Callable[[str, Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float64, torch.float32):
            raise InputError(f"dtype={self.dtype}: sums are kept in torch.float64 or torch.float32")
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory <= 0:
            raise InputError(f"memory={self.memory!r}: give a positive whole number of bytes")
        for name in ("features", "gradients", "covariance", "residuals", "autograd", "eval_mode", "snapshot", "probed"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}: give True or False")
        for name in ("gram", "jacobians"):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) != "auto":
                raise InputError(f"{name}={getattr(self, name)!r}: give True, False or 'auto'")

    @property
    def needs_graph(self) -> bool:
        """Whether anything must be differentiated."""
        return self.gradients or bool(self.jacobians)

    def to_dict(self, layers: Sequence[str], reference: bool) -> dict[str, Any]:
        """The options that must agree for statistics to be merged."""
        names = ("gradients", "features", "gram", "residuals", "autograd", "jacobians", "sketch", "ignore_index")
        return {
            "layers": sorted(layers),
            "outputs": sorted(self.layouts),
            "tokens": "a function" if callable(self.tokens) else self.tokens,
            "covariance": self.covariance and self.gradients,
            "reference": reference,
            "batch_dim": self.batch_dim,
            "eval_mode": self.eval_mode,
            **{name: getattr(self, name) for name in names},
            **({"at_inputs": sorted(self.at_inputs)} if self.at_inputs else {}),
            **({"probed": self.memory} if self.probed else {}),
        }
