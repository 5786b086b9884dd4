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
        blocks: of equally many rows, each of which is a matrix of its own, such as query, key and value of a fused layer.
    """

    name: str
    parameter: Tensor = field(repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    blocks: int = 1

    @cached_property
    def shape(self) -> torch.Size:
        """``[k, d]`` or ``[groups, k, d]``."""
        return self.view(torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device="meta")).shape

    @property
    def part(self) -> str:
        """Which projection of an attention layer this is, such as ``q_proj``; empty for other layers."""
        layer = self.layers[0] if self.layers else None
        return layer.weight_name if isinstance(layer, AttentionProjection) else ""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape in matrix form."""
        matrix = self.layers[0].to_matrix(tensor) if self.layers else tensor.flatten(1)
        return matrix if self.blocks == 1 else torch.unflatten(matrix, 0, (self.blocks, -1))

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

    def native(self, matrix: Tensor) -> Tensor:
        """A matrix of :attr:`shape` in the parameter's own form."""
        shape = self.parameter.shape
        matrix = matrix if self.blocks == 1 else matrix.flatten(0, 1)
        return self.layers[0].from_matrix(matrix, shape) if self.layers else matrix.reshape(shape)
