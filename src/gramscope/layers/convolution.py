"""Convolutions in patch space: one row per output position, one matrix per group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import LayerKind


class ConvKind(LayerKind):
    """``nn.Conv1d/2d/3d`` in patch space: ``d = (in/groups) · Π kernel``, one site per output position."""

    fixed_rank = True

    @override
    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)

    @override
    def is_standard(self, module: nn.Module) -> bool:
        return any(
            type(module).forward is base.forward and type(module)._conv_forward is base._conv_forward  # type: ignore[attr-defined]
            for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        )

    @override
    def is_unbatched(self, module: nn.Module, x: Tensor) -> bool:
        return x.dim() == len(_conv(module).kernel_size) + 1

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        groups = _conv(module).groups
        if groups == 1:
            return weight.flatten(1)
        return weight.reshape(groups, weight.shape[0] // groups, -1)

    @override
    def groups(self, module: nn.Module) -> int:
        return _conv(module).groups

    def padded(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input with the module's own padding made explicit, ``[batch, channels, *spatial]``."""
        conv = _conv(module)
        if self.is_unbatched(module, x):
            x = x.unsqueeze(0)
        widths = conv._reversed_padding_repeated_twice
        if not any(widths):
            return x
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(x, widths, mode=mode)

    def windows(self, module: nn.Module, x: Tensor) -> Tensor:
        """Every patch as a view: ``[batch, channels, *positions, *kernel]``, no memory taken."""
        conv = _conv(module)
        return _windows(self.padded(module, x), conv.kernel_size, conv.stride, conv.dilation)

    @override
    def mean_inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        conv = _conv(module)
        axes = len(conv.kernel_size)
        mean = self.windows(module, x).mean(tuple(range(2, 2 + axes)))  # [batch, channels, *kernel]
        if conv.groups == 1:
            return mean.flatten(1)
        return mean.reshape(mean.shape[0], conv.groups, -1).movedim(1, 0)

    @override
    def inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        conv = _conv(module)
        axes = len(conv.kernel_size)
        x = self.windows(module, x)
        # [batch, channels, *positions, *kernel] -> [batch, sites, channels, *kernel]
        batch, channels = x.shape[:2]
        positions = list(range(2, 2 + axes))
        kernel = list(range(2 + axes, 2 + 2 * axes))
        patches = x.permute(0, *positions, 1, *kernel)
        sites = math.prod(patches.shape[1 : 1 + axes])
        return _grouped(patches.reshape(batch, sites, channels * math.prod(conv.kernel_size)), conv.groups)

    @override
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        conv = _conv(module)
        if z.dim() == len(conv.kernel_size) + 1:
            z = z.unsqueeze(0)
        return _grouped(z.flatten(2).mT, conv.groups)

    @override
    def weight_gradient(self, module: nn.Module, x: Tensor, dz: Tensor) -> Tensor:
        """The convolution's own weight gradient: no patches are formed."""
        conv = _conv(module)
        axes = len(conv.kernel_size)
        x = self.padded(module, x)
        dz = dz.unsqueeze(0) if dz.dim() == axes + 1 else dz
        dz = dz.float() if dz.dtype in (torch.bfloat16, torch.float16) else dz
        gradient = torch.ops.aten.convolution_backward(
            dz,
            x.to(dz.dtype),
            dz.new_empty(1).expand(conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size),  # its shape
            None,
            conv.stride,
            [0] * axes,
            conv.dilation,
            False,
            [0] * axes,
            conv.groups,
            [False, True, False],
        )[1]
        return self.to_matrix(module, gradient)


class TransposedConvKind(LayerKind):
    """``nn.ConvTranspose1d/2d/3d``: every input position is a site, whose patch ``W h`` is added to the output.

    ``z`` is the patch before patches that overlap are added, ``k = (out/groups) · Π kernel``; its gradient is the patch of the
    output's gradient.
    """

    fixed_rank = True
    not_for_vcl = "is a transposed convolution"

    @override
    def matches(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            return False
        standard = any(
            type(module).forward is base.forward
            for base in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        )
        return standard and all(more < step for more, step in zip(module.output_padding, module.stride, strict=True))

    @override
    def is_unbatched(self, module: nn.Module, x: Tensor) -> bool:
        return x.dim() == len(_transposed(module).kernel_size) + 1

    @override
    def groups(self, module: nn.Module) -> int:
        return _transposed(module).groups

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        groups = self.groups(module)
        matrices = weight.reshape(groups, weight.shape[0] // groups, -1).mT
        return matrices[0] if groups == 1 else matrices

    @override
    def from_matrix(self, module: nn.Module, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT.reshape(tuple(shape))

    @override
    def inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        x = x.unsqueeze(0) if self.is_unbatched(module, x) else x
        return _grouped(x.flatten(2).mT, self.groups(module))

    @override
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        conv = _transposed(module)
        axes = len(conv.kernel_size)
        z = z.unsqueeze(0) if z.dim() == axes + 1 else z
        sizes: Any = conv.padding
        z = F.pad(z, [width for size in reversed(sizes) for width in (size, size)])
        windows = _windows(z, conv.kernel_size, conv.stride, conv.dilation)
        patches = windows.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
        return _grouped(patches.flatten(1 + axes).flatten(1, axes), conv.groups)


def _windows(x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Tensor:
    """Every patch of ``[batch, channels, *spatial]`` as a view: ``[batch, channels, *positions, *kernel]``."""
    for axis, (size, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True), start=2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)
        if dilation > 1:
            x = x[..., ::dilation]
    return x


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[batch, sites, features]``, or ``[groups, batch, sites, features/groups]``."""
    return x if groups == 1 else x.reshape(*x.shape[:2], groups, -1).permute(2, 0, 1, 3)


def _conv(module: nn.Module) -> nn.Conv2d:
    """The module as a convolution; the 1-, 2- and 3-dimensional ones share all attributes used here."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return module  # type: ignore[return-value]


def _transposed(module: nn.Module) -> nn.ConvTranspose2d:
    assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return module  # type: ignore[return-value]
