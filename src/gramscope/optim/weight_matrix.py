"""A weight in matrix form, whatever layer applies it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gramscope.layers.kinds import AttentionProjectionKind
from gramscope.layers.linear_layer import Layer


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A parameter, or some rows of it, as one matrix ``[k, d]`` or a stack ``[groups, k, d]``.

    Attributes:
        name: for messages.
        parameter: the tensor.
        layers: the linear-like layers that apply it; without any the tensor is read as ``[shape[0], -1]``.
        bias: the layer's bias where it is the last column of the matrix, the weight of a constant input 1.
    """

    name: str
    parameter: Tensor = field(repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    bias: Tensor | None = field(default=None, repr=False)

    @cached_property
    def shape(self) -> torch.Size:
        """``[k, d]`` or ``[groups, k, d]``."""
        return self.read().shape

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, and the bias where it belongs to the matrix."""
        return [self.parameter] if self.bias is None else [self.parameter, self.bias]

    @property
    def part(self) -> str:
        """Which projection of an attention layer this is, such as ``q_proj``; empty for other layers."""
        kind = self.layers[0].kind if self.layers else None
        return kind.weight_name if isinstance(kind, AttentionProjectionKind) else ""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape in matrix form, without the bias."""
        if not self.layers:
            return tensor.flatten(1)
        layer = self.layers[0]
        return layer.kind.to_matrix(layer.module, tensor)

    def read(self) -> Tensor:
        """The weights, detached."""
        return self._joined(self.parameter, self.bias)

    def gradient(self) -> Tensor | None:
        """The gradient in the same form; None where a parameter has none."""
        grads = [parameter.grad for parameter in self.parameters]
        if any(grad is None for grad in grads):
            return None
        return self._joined(*grads)

    @torch.no_grad()
    def assign(self, matrix: Tensor) -> None:
        """Write a matrix of :attr:`shape` into the parameters."""
        if self.bias is not None:
            self.bias.copy_(matrix[..., -1].reshape(self.bias.shape))
            matrix = matrix[..., :-1]
        own = self.view(self.parameter.detach())
        if own.untyped_storage().data_ptr() == self.parameter.untyped_storage().data_ptr():
            own.copy_(matrix)
        else:  # some layouts (channels last) have no view as a matrix
            self.parameter.copy_(self.native(matrix))

    def native(self, matrix: Tensor, shape: torch.Size | None = None) -> Tensor:
        """A matrix, or some of its columns, in the parameter's own form, or in that of a part of it of another ``shape``."""
        shape = self.parameter.shape if shape is None else shape
        return (
            self.layers[0].kind.from_matrix(self.layers[0].module, matrix, shape)
            if self.layers
            else matrix.reshape(shape)
        )

    def rows(self, layer: Layer, x: Tensor) -> Tensor:
        """A layer's native input as ``[…, b, d]``, with the constant column where the bias belongs to the matrix."""
        h = layer.kind.inputs(layer.module, x).flatten(-3, -2)
        return h if self.bias is None else torch.cat([h, torch.ones_like(h[..., :1])], -1)

    def summed(self, layer: Layer, x: Tensor, dz: Tensor) -> Tensor:
        """``Σ δ hᵀ`` of a layer's native input and output gradient, ``[…, k, d]``."""
        D = layer.kind.weight_gradient(layer.module, x, dz)
        if self.bias is None:
            return D
        total = layer.kind.outputs(layer.module, dz).to(D.dtype).sum((-3, -2))
        return torch.cat([D, total.unsqueeze(-1)], -1)

    def _joined(self, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        matrix = self.view(weight.detach())
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.detach().reshape(*matrix.shape[:-1], 1)], -1)
