"""One linear-like layer of a model and its weight."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind, ConvKind, LayerKind
from gramscope.layers.modules import in_eval_mode


@dataclass(frozen=True)
class Layer:
    """One linear-like layer: its name, the module that owns the weight and the kind that maps it to normal form."""

    name: str
    module: nn.Module = field(repr=False)
    kind: LayerKind = field(repr=False)

    @property
    def _owner(self) -> tuple[nn.Module, str]:
        """The module and attribute name under which the weight is found."""
        if isinstance(self.kind, AttentionProjectionKind):
            path = self.kind.weight_attribute(self.module)
            if path == "out_proj.weight":
                return self.module.get_submodule("out_proj"), "weight"
            return self.module, path
        return self.module, self.kind.weight_name

    @property
    def parameter(self) -> nn.Parameter | None:
        """The leaf parameter that is the weight, or ``None`` when the weight is computed (a parametrisation)."""
        module, name = self._owner
        return module._parameters.get(name)

    @property
    def groups(self) -> int:
        """Number of stacked matrices: the groups of a grouped convolution, 1 otherwise."""
        return int(getattr(self.module, "groups", 1)) if isinstance(self.kind, ConvKind) else 1

    def weight(self) -> Tensor:
        """The weight in use, detached, as ``[k, d]`` or ``[groups, k, d]``; a view of the parameter if there is one."""
        module, name = self._owner
        return self.kind.to_matrix(self.module, effective_weight(module, name))

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
