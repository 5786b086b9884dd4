"""One linear-like layer of a model and its weight."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind, LayerKind
from gramscope.layers.modules import in_eval_mode


@dataclass(frozen=True)
class Layer:
    """One linear-like layer: its name, the module that owns the weight and the kind that maps it to normal form."""

    name: str
    module: nn.Module = field(repr=False)
    kind: LayerKind = field(repr=False)
    #: module whose forward may use the weight without calling :attr:`module`
    scope: nn.Module | None = field(default=None, repr=False)
    #: name of the layer that this one is a part of, such as a factor of W + BA
    part_of: str = field(default="", repr=False)
    #: seen as one function ``z = W h + b``, so that the output need not be checked
    exact: bool = field(default=False, repr=False)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The leaf parameter that is the weight, or ``None`` when the weight is computed (a parametrisation)."""
        module, name = self.kind.owner(self.module)
        return module._parameters.get(name)

    @property
    def groups(self) -> int:
        """Number of stacked matrices: groups of a convolution, experts; 1 otherwise."""
        return self.kind.groups(self.module)

    def weight(self) -> Tensor:
        """The weight in use, detached, as ``[k, d]`` or ``[groups, k, d]``; a view of the parameter if there is one."""
        computed = self.kind.computed_weight(self.module)
        weight = effective_weight(*self.kind.owner(self.module)) if computed is None else computed
        return self.kind.to_matrix(self.module, weight)

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape (a gradient, an optimizer's proposal) in matrix form."""
        return self.kind.to_matrix(self.module, tensor)

    @torch.no_grad()
    def assign(self, matrix: Tensor) -> None:
        """Write a matrix of the shape of :meth:`weight` into the parameter, in place."""
        parameter = self.parameter
        if parameter is None:
            raise LayerError(f"layer {self.name!r} has a computed weight (a parametrisation); it cannot be assigned")
        if isinstance(self.kind, AttentionProjectionKind):
            self.kind.to_matrix(self.module, parameter).copy_(matrix)
        else:
            parameter.copy_(self.kind.from_matrix(self.module, matrix, parameter.shape))


@torch.no_grad()
def effective_weight(module: nn.Module, name: str) -> Tensor:
    """The weight in use, detached. Reading it changes no buffer (spectral norm iterates only in train mode)."""
    computed = parametrize.is_parametrized(module, name)
    with in_eval_mode(module.get_submodule(f"parametrizations.{name}")) if computed else nullcontext():
        return getattr(module, name).detach()  # type: ignore[no-any-return]
