"""The normal form: every linear-like layer as ``z = W h`` with rows ``[batch, sites, features]``.

A *kind* knows how one type of module maps its native tensors to that form. Measures, statistics and
optimizers never look at the module's type; they see

    h      [batch, sites, d]        the layer's inputs (im2col patches of a convolution, tokens of a sequence)
    delta  [batch, sites, k]        ∂L_i/∂z
    W      [k, d]

and for grouped convolutions one leading axis more, ``[groups, …]`` on each of the three, so that the same broadcasting
formulas hold for a stack of matrices. To support another module type, subclass :class:`LayerKind` and add it to
``KINDS`` in :mod:`gramscope.layers.select`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.linalg.autocast import without_autocast


def rows(x: Tensor, batch_dim: int = 0) -> Tensor:
    """Bring a tensor with features last, ``[d]``, ``[batch, d]`` or ``[…, batch, …, d]``, to ``[batch, sites, d]``."""
    if x.dim() == 1:
        return x.reshape(1, 1, -1)
    if x.dim() > 2 and batch_dim != 0:
        x = x.movedim(batch_dim, 0)
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def sum_outer(delta: Tensor, h: Tensor) -> Tensor:
    """``D = Σ_{i,s} δ_is h_isᵀ``: ``[…, batch, sites, k] × […, batch, sites, d] → […, k, d]``, at least in float32."""
    if delta.dtype in (torch.bfloat16, torch.float16):
        delta = delta.float()
    with without_autocast(delta.device):
        return delta.flatten(-3, -2).mT @ h.to(delta.dtype).flatten(-3, -2)


class LayerKind(ABC):
    """How one module type maps to the normal form. Stateless; one instance serves all modules of the type."""

    #: attribute of the module that holds the weight
    weight_name = "weight"
    #: whether the module's inputs have a fixed number of axes, so that a missing batch axis shows
    fixed_rank = False

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether this kind handles ``module``."""

    def is_standard(self, module: nn.Module) -> bool:
        """Whether the module runs the forward this kind was written for; a subclass may override it."""
        return True

    @abstractmethod
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The weight (or anything of its shape, such as a gradient) as ``[k, d]`` or ``[groups, k, d]``."""

    def from_matrix(self, module: nn.Module, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of :meth:`to_matrix` for a weight of ``shape``."""
        return matrix.reshape(tuple(shape))

    @abstractmethod
    def inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        """The module's input as ``[batch, sites, d]`` (``[groups, batch, sites, d]``)."""

    def is_unbatched(self, module: nn.Module, x: Tensor) -> bool:
        """Whether a native input is one sample without a batch axis."""
        return x.dim() == 1

    def samples(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> int:
        """Rows of a native input: the batch axis of its normal form."""
        return 1 if self.is_unbatched(module, x) else x.shape[0]

    @abstractmethod
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        """The module's output (or its gradient) as ``[batch, sites, k]`` (``[groups, batch, sites, k]``)."""

    def mean_inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        """Inputs averaged over the sites, ``[batch, d]`` (``[groups, batch, d]``)."""
        h = self.inputs(module, x, batch_dim)
        return h.squeeze(-2) if h.shape[-2] == 1 else h.mean(-2)

    def weight_gradient(self, module: nn.Module, x: Tensor, dz: Tensor) -> Tensor:
        """``D = Σ δ hᵀ`` in matrix form from native input and output gradient."""
        return sum_outer(self.outputs(module, dz), self.inputs(module, x))

    def add_weight_gradient(self, module: nn.Module, x: Tensor, dz: Tensor, total: Tensor) -> None:
        """Add ``D`` to ``total`` in place."""
        total.add_(self.weight_gradient(module, x, dz))


class LinearKind(LayerKind):
    """``nn.Linear``: ``y = x Wᵀ + b`` on the last axis."""

    @override
    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    @override
    def is_standard(self, module: nn.Module) -> bool:
        return type(module).forward is nn.Linear.forward

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight

    @override
    def samples(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> int:
        return 1 if x.dim() == 1 else x.shape[batch_dim if x.dim() > 2 else 0]

    @override
    def inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(x, batch_dim)

    @override
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z, batch_dim)

    @override
    def add_weight_gradient(self, module: nn.Module, x: Tensor, dz: Tensor, total: Tensor) -> None:
        delta, h = rows(dz).flatten(0, 1).to(total.dtype), rows(x).flatten(0, 1).to(total.dtype)
        with without_autocast(total.device):
            total.addmm_(delta.mT, h)  # one pass over ``total``, no second matrix of its size


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer that stores its weight as ``[d, k]``."""

    @override
    def matches(self, module: nn.Module) -> bool:
        return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")

    @override
    def is_standard(self, module: nn.Module) -> bool:
        return True

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.mT

    @override
    def from_matrix(self, module: nn.Module, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT


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
        x = self.padded(module, x)
        for axis, (size, stride, dilation) in enumerate(
            zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), start=2
        ):
            x = x.unfold(axis, dilation * (size - 1) + 1, stride)
            if dilation > 1:
                x = x[..., ::dilation]
        return x

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
        if conv.groups == 1:
            return patches.reshape(batch, sites, -1)
        grouped = patches.reshape(batch, sites, conv.groups, channels // conv.groups * math.prod(conv.kernel_size))
        return grouped.permute(2, 0, 1, 3)

    @override
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        conv = _conv(module)
        if z.dim() == len(conv.kernel_size) + 1:
            z = z.unsqueeze(0)
        z = z.flatten(2).mT  # [batch, sites, out]
        if conv.groups == 1:
            return z
        return z.reshape(*z.shape[:2], conv.groups, -1).permute(2, 0, 1, 3)

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


class AttentionProjectionKind(LayerKind):
    """One of the query, key, value and output projections inside ``nn.MultiheadAttention``.

    The query, key and value weights are rows of the packed ``in_proj_weight`` unless key or value sizes differ from the
    embedding's, in which case the module keeps them apart. Inputs and outputs come from :mod:`gramscope.layers.hooks`,
    batch first, or without a batch axis.
    """

    fixed_rank = True
    PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")

    def __init__(self, part: str) -> None:
        self.part = part

    @override
    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def weight_attribute(self, module: nn.Module) -> str:
        """Name of the attribute of the attention module that holds this projection's rows."""
        if self.part == "out_proj":
            return "out_proj.weight"
        return "in_proj_weight" if getattr(module, "_qkv_same_embed_dim", True) else f"{self.part}_weight"

    @override
    def to_matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        if self.weight_attribute(module) != "in_proj_weight":
            return weight
        size = weight.shape[0] // 3
        start = self.PARTS.index(self.part) * size
        return weight[start : start + size]

    @override
    def is_unbatched(self, module: nn.Module, x: Tensor) -> bool:
        return x.dim() == 2

    @override
    def inputs(self, module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(x.unsqueeze(0) if x.dim() == 2 else x)

    @override
    def outputs(self, module: nn.Module, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z.unsqueeze(0) if z.dim() == 2 else z)


def _conv(module: nn.Module) -> nn.Conv2d:
    """The module as a convolution; the 1-, 2- and 3-dimensional ones share all attributes used here."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return module  # type: ignore[return-value]
