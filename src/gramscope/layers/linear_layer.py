"""The normal form: every linear-like layer as ``z = W h`` with rows ``[batch, sites, features]``.

A :class:`Layer` maps the native tensors of one type of module to that form. Measures, statistics and optimizers never look
at the module's type; they see

    h      [batch, sites, d]        the layer's inputs (im2col patches of a convolution, tokens of a sequence)
    delta  [batch, sites, k]        ∂L_i/∂z
    W      [k, d]

and for grouped convolutions one leading axis more, ``[groups, …]`` on each of the three, so that the same broadcasting
formulas hold for a stack of matrices. To support another module type, subclass :class:`Layer` and add it to ``KINDS`` in
:mod:`gramscope.layers.select`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramscope.errors import LayerError
from gramscope.layers.modules import in_eval_mode
from gramscope.linalg.arrays import without_autocast


@dataclass(frozen=True)
class Layer(ABC):
    """One linear-like layer: its name, the module that owns the weight, and how their tensors become ``z = W h``."""

    name: str
    module: nn.Module = field(repr=False)
    #: attribute of the module that holds the weight
    weight_name: str = field(default="weight", repr=False)
    #: module whose forward may use the weight without calling :attr:`module`
    scope: nn.Module | None = field(default=None, repr=False)
    #: name of the layer that this one is a part of, such as a factor of W + BA
    part_of: str = field(default="", repr=False)
    #: seen as one function ``z = W h + b``, so that the output need not be checked
    exact: bool = field(default=False, repr=False)

    #: why VCL does not train such a weight; empty where it does
    not_for_vcl: ClassVar[str] = ""
    #: whether the module's inputs have a fixed number of axes, so that a missing batch axis shows
    fixed_rank: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether ``module`` is such a layer."""

    def is_standard(self) -> bool:
        """Whether the module runs the forward this class was written for; a subclass of the module may override it."""
        return True

    # --- the weight ---------------------------------------------------------------------------------------------------

    def owner(self) -> tuple[nn.Module, str]:
        """The module and attribute under which the weight is found."""
        return self.module, self.weight_name

    @property
    def parameter(self) -> nn.Parameter | None:
        """The leaf parameter that is the weight, or ``None`` when the weight is computed (a parametrisation)."""
        module, name = self.owner()
        return module._parameters.get(name)

    @property
    def groups(self) -> int:
        """Number of stacked matrices: groups of a convolution, experts; 1 otherwise."""
        return 1

    def native_weight(self) -> Tensor:
        """The weight in use in its native shape, detached."""
        return effective_weight(*self.owner())

    def weight(self) -> Tensor:
        """The weight in use, detached, as ``[k, d]`` or ``[groups, k, d]``; a view of the parameter if there is one."""
        return self.to_matrix(self.native_weight())

    @abstractmethod
    def to_matrix(self, weight: Tensor) -> Tensor:
        """The weight (or anything of its shape, such as a gradient) as ``[k, d]`` or ``[groups, k, d]``."""

    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of :meth:`to_matrix` for a weight of ``shape``."""
        return matrix.reshape(tuple(shape))

    @torch.no_grad()
    def assign(self, matrix: Tensor) -> None:
        """Write a matrix of the shape of :meth:`weight` into the parameter, in place."""
        parameter = self.parameter
        if parameter is None:
            raise LayerError(f"layer {self.name!r} has a computed weight (a parametrisation); it cannot be assigned")
        parameter.copy_(self.from_matrix(matrix, parameter.shape))

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        """The module's input as ``[batch, sites, d]`` (``[groups, batch, sites, d]``)."""

    @abstractmethod
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        """The module's output (or its gradient) as ``[batch, sites, k]`` (``[groups, batch, sites, k]``)."""

    def is_unbatched(self, x: Tensor) -> bool:
        """Whether a native input is one sample without a batch axis."""
        return x.dim() == 1

    def samples(self, x: Tensor, batch_dim: int = 0) -> int:
        """Rows of a native input: the batch axis of its normal form."""
        return 1 if self.is_unbatched(x) else x.shape[0]

    def features(self, x: Tensor, batch_dim: int = 0, averaged: bool = False) -> Tensor:
        """The features of the samples at this layer, ``[batch, sites, d]``: its inputs, or their mean over the sites."""
        h = self.inputs(x, batch_dim)
        return h.mean(-2, keepdim=True) if averaged and h.shape[-2] > 1 else h

    def normal_bytes(self, native: int) -> int:
        """Bytes of an output in normal form whose native form takes ``native`` bytes."""
        return native

    def weight_gradient(self, x: Tensor, dz: Tensor) -> Tensor:
        """``D = Σ δ hᵀ`` in matrix form from native input and output gradient."""
        return sum_outer(self.outputs(dz), self.inputs(x))

    def add_weight_gradient(self, x: Tensor, dz: Tensor, total: Tensor) -> None:
        """Add ``D`` to ``total`` in place."""
        total.add_(self.weight_gradient(x, dz))


@torch.no_grad()
def effective_weight(module: nn.Module, name: str) -> Tensor:
    """The weight in use, detached. Reading it changes no buffer (spectral norm iterates only in train mode)."""
    computed = parametrize.is_parametrized(module, name)
    with in_eval_mode(module.get_submodule(f"parametrizations.{name}")) if computed else nullcontext():
        return getattr(module, name).detach()  # type: ignore[no-any-return]


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


def shares_parameter(layer: Layer, model: nn.Module) -> bool:
    """Whether another module of the model uses the layer's weight too, so that its gradient is not the layer's own."""
    parameter = layer.parameter
    if parameter is None:
        return False
    return sum(any(p is parameter for p in module._parameters.values()) for module in model.modules()) > 1
