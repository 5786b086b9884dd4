"""Convolutions in patch space: one row per output position, one matrix per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import Layer


class SpatialLayer(Layer):
    """What convolutions and transposed convolutions share: channels come second, and positions after them."""

    fixed_rank = True

    @property
    def conv(self) -> nn.Conv2d:
        """The module; convolutions of all kinds share the attributes used here."""
        assert isinstance(self.module, nn.modules.conv._ConvNd)
        return self.module  # type: ignore[return-value]

    @override
    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.conv.kernel_size) + 1

    @property
    @override
    def groups(self) -> int:
        return self.conv.groups

    def batched(self, x: Tensor) -> Tensor:
        """A native input or output as ``[batch, channels, *positions]``."""
        return x.unsqueeze(0) if self.is_unbatched(x) else x

    def windows(self, x: Tensor) -> Tensor:
        """Every patch of ``[batch, channels, *spatial]`` as a view: ``[batch, channels, *positions, *kernel]``."""
        conv = self.conv
        sizes = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
        for axis, (size, stride, dilation) in enumerate(sizes, start=2):
            x = x.unfold(axis, dilation * (size - 1) + 1, stride)
            if dilation > 1:
                x = x[..., ::dilation]
        return x

    def patches(self, x: Tensor) -> Tensor:
        """Every patch of ``[batch, channels, *spatial]`` as a row, ``[…, batch, sites, channels · Π kernel]``."""
        axes = len(self.conv.kernel_size)
        x = self.windows(x).permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
        return self.grouped(x.flatten(1 + axes).flatten(1, axes))

    def grouped(self, x: Tensor) -> Tensor:
        """``[batch, sites, features]``, or ``[groups, batch, sites, features/groups]``."""
        groups = self.groups
        return x if groups == 1 else x.reshape(*x.shape[:2], groups, -1).permute(2, 0, 1, 3)


class ConvLayer(SpatialLayer):
    """``nn.Conv1d/2d/3d`` in patch space: ``d = (in/groups) · Π kernel``, one site per output position."""

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)

    @override
    def is_standard(self) -> bool:
        return any(
            type(self.module).forward is base.forward and type(self.module)._conv_forward is base._conv_forward  # type: ignore[attr-defined]
            for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        )

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        groups = self.groups
        return weight.flatten(1) if groups == 1 else weight.reshape(groups, weight.shape[0] // groups, -1)

    def padded(self, x: Tensor) -> Tensor:
        """The input with the module's own padding made explicit, ``[batch, channels, *spatial]``."""
        conv, x = self.conv, self.batched(x)
        widths = conv._reversed_padding_repeated_twice
        if not any(widths):
            return x
        return F.pad(x, widths, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)

    @override
    def features(self, x: Tensor, batch_dim: int = 0, averaged: bool = False) -> Tensor:
        if not averaged:
            return self.inputs(x)
        windows = self.windows(self.padded(x))
        mean = windows.mean(tuple(range(2, windows.dim() // 2 + 1)))  # [batch, channels, *kernel]; no patch is formed
        return self.grouped(mean.flatten(1).unsqueeze(1))

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return self.patches(self.padded(x))

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return self.grouped(self.batched(z).flatten(2).mT)

    @override
    def weight_gradient(self, x: Tensor, dz: Tensor) -> Tensor:
        """The convolution's own weight gradient: no patches are formed."""
        conv, dz = self.conv, self.batched(dz)
        dz = dz.float() if dz.dtype in (torch.bfloat16, torch.float16) else dz
        none = [0] * len(conv.kernel_size)
        gradient = torch.ops.aten.convolution_backward(
            dz,
            self.padded(x).to(dz.dtype),
            dz.new_empty(1).expand(conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size),  # its shape
            None,
            conv.stride,
            none,
            conv.dilation,
            False,
            none,
            conv.groups,
            [False, True, False],
        )[1]
        return self.to_matrix(gradient)


class TransposedConvLayer(SpatialLayer):
    """``nn.ConvTranspose1d/2d/3d``: every input position is a site, whose patch ``W h`` is added to the output.

    ``z`` is the patch before patches that overlap are added, ``k = (out/groups) · Π kernel``; its gradient is the patch of the
    output's gradient.
    """

    not_for_vcl = "is a transposed convolution"

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if not isinstance(module, kinds) or all(type(module).forward is not base.forward for base in kinds):
            return False
        return all(more < step for more, step in zip(module.output_padding, module.stride, strict=True))

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        groups = self.groups
        matrices = weight.reshape(groups, weight.shape[0] // groups, -1).mT
        return matrices[0] if groups == 1 else matrices

    @override
    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT.reshape(tuple(shape))

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return self.grouped(self.batched(x).flatten(2).mT)

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        sizes: Any = self.conv.padding
        return self.patches(F.pad(self.batched(z), [width for size in reversed(sizes) for width in (size, size)]))
