"""A weight in matrix form, whatever layer applies it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gramscope.layers.kinds import AttentionProjection, Layer


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A parameter, or some rows of it, as one matrix ``[k, d]`` or a stack ``[groups, k, d]``.

    Attributes:
        name: for messages.
        parameter: the tensor.
        layers: the linear-like layers that apply it; without any the tensor is read as ``[shape[0], -1]``.
        blocks: the number of equal blocks of outputs that are matrices of their own, ``[blocks, k/blocks, d]``.
    """

    name: str
    parameter: Tensor = field(repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    blocks: int = 1

    @cached_property
    def shape(self) -> torch.Size:
        """``[k, d]`` or ``[groups, k, d]``."""
        return self.read().shape

    @property
    def part(self) -> str:
        """Which projection of an attention layer this is, such as ``q_proj``; empty for other layers."""
        layer = self.layers[0] if self.layers else None
        return layer.weight_name if isinstance(layer, AttentionProjection) else ""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape in matrix form."""
        if not self.layers:
            return tensor.flatten(1)
        matrix = self.layers[0].to_matrix(tensor)
        return matrix.unflatten(-2, (self.blocks, -1)) if self.blocks > 1 else matrix  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """The weights, detached."""
        return self.view(self.parameter.detach())

    def gradient(self) -> Tensor | None:
        """The gradient in the same form."""
        grad = self.parameter.grad
        return None if grad is None else self.view(grad.detach())

    @torch.no_grad()
    def assign(self, matrix: Tensor, into: Tensor | None = None) -> None:
        """Write a matrix of :attr:`shape` into the parameter, or into another tensor like it."""
        into = (self.parameter if into is None else into).detach()
        own = self.view(into)
        if own.untyped_storage().data_ptr() == into.untyped_storage().data_ptr():
            own.copy_(matrix)
        else:  # some layouts (channels last) have no view as a matrix
            into.copy_(self.native(matrix))

    def native(self, matrix: Tensor, shape: torch.Size | None = None) -> Tensor:
        """A matrix, or some of its columns, in the parameter's own form, or in that of a part of it of another ``shape``."""
        shape = self.parameter.shape if shape is None else shape
        matrix = matrix.flatten(-3, -2) if self.blocks > 1 else matrix
        return self.layers[0].from_matrix(matrix, shape) if self.layers else matrix.reshape(shape)
