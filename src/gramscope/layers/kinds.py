"""What a linear layer is, ``z = W h`` in one normal form, and the kinds of them.

The normal form: every linear-like layer as ``z = W h`` with rows ``[batch, sites, features]``.

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from gramscope.errors import LayerError
from gramscope.layers.modules import in_eval_mode, loaded, names_in_code
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
    #: how far, relative to its size, ``z = W h + b`` may be off where the module rounds
    rounding: ClassVar[float] = 0.0

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

    @property
    def remark(self) -> str:
        """What a table says of the layer's weight; empty where it is an ordinary one."""
        return ""

    def stored_weight(self) -> Tensor:
        """The weight in use in its native shape, detached, of a module that is not offloaded."""
        return effective_weight(*self.owner())

    def native_weight(self) -> Tensor:
        """The weight in use in its native shape, detached; read inside accelerate's hook where it is offloaded."""
        with loaded(self.owner()[0]):
            return self.stored_weight()

    def bias(self) -> Tensor | None:
        """The bias in use, detached; ``None`` where there is none."""
        with loaded(self.module):
            bias = getattr(self.module, "bias", None)
            return bias.detach() if isinstance(bias, Tensor) else None

    def weight_source(self) -> Tensor | Callable[[], Tensor]:
        """The weight, or where it is computed or offloaded a function that gives it, so that it need not be kept."""
        return self.weight if self.parameter is None or self.parameter.is_meta else self.weight()

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


class WeightAttribute:
    """The attribute ``weight`` of a class: a tensor, given as one or as a function that makes it each time it is read."""

    def __get__(self, instance: Any, owner: type) -> Tensor:
        source = vars(instance)["weight"]
        return source if isinstance(source, Tensor) else source()

    def __set__(self, instance: Any, source: Tensor | Callable[[], Tensor]) -> None:
        vars(instance)["weight"] = source


def check_weights_have_data(layers: Iterable[Layer]) -> None:
    """Raise for layers whose weights are on the meta device, unless accelerate brings them when they are used."""
    known = list(layers)
    empty = [
        layer.name
        for layer in known
        if layer.parameter is not None and layer.parameter.is_meta and not hasattr(layer.owner()[0], "_hf_hook")
    ]
    if empty:
        raise LayerError(
            f"weights are on meta, without data: {', '.join(empty[:3])} ({len(empty)} of {len(known)} layers); load them first "
            "(load_state_dict(..., assign=True), from_pretrained)"
        )


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


class LinearLayer(Layer):
    """``nn.Linear``: ``y = x Wᵀ + b`` on the last axis."""

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    @override
    def is_standard(self) -> bool:
        return type(self.module).forward is nn.Linear.forward

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight

    @override
    def samples(self, x: Tensor, batch_dim: int = 0) -> int:
        return 1 if x.dim() == 1 else x.shape[batch_dim if x.dim() > 2 else 0]

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(x, batch_dim)

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z, batch_dim)

    @override
    def add_weight_gradient(self, x: Tensor, dz: Tensor, total: Tensor) -> None:
        delta, h = rows(dz).flatten(0, 1).to(total.dtype), rows(x).flatten(0, 1).to(total.dtype)
        with without_autocast(total.device):
            total.addmm_(delta.mT, h)  # one pass over ``total``, no second matrix of its size


class TransposedLinearLayer(LinearLayer):
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer that stores its weight as ``[d, k]``."""

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")

    @override
    def is_standard(self) -> bool:
        return True

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT

    @override
    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT


class OwnLinearLayer(LinearLayer):
    """A module other than ``nn.Linear`` that applies its own ``weight [k, d]`` by ``F.linear``, such as a router of experts."""

    not_for_vcl = "is applied inside another module's forward"

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        known = type(module).__module__.startswith("torch.nn.modules")
        if known or weight is None or weight.dim() != 2:
            return False
        return {"linear", "weight"} <= names_in_code(type(module), "forward")

    @override
    def is_standard(self) -> bool:
        return False


class EmbeddingLayer(Layer):
    """``nn.Embedding``: the linear layer ``z = W h`` on one-hot vectors h of the vocabulary; ``W [d, V]`` is its weight's Wᵀ.

    One-hot vectors are formed only where they are asked for (:meth:`inputs`) and small. The features of the samples are
    the outputs, since a fit on one-hot inputs says nothing. As in torch, ``padding_idx`` receives no gradient.
    """

    not_for_vcl = "is a lookup table"
    #: one-hot inputs are refused above this many entries
    LIMIT = 2**24

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding)

    @override
    def is_standard(self) -> bool:
        return type(self.module).forward is nn.Embedding.forward

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return (weight.to_dense() if weight.is_sparse else weight).mT

    @override
    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT

    @override
    def is_unbatched(self, x: Tensor) -> bool:
        return False

    @override
    def samples(self, x: Tensor, batch_dim: int = 0) -> int:
        return x.shape[batch_dim if x.dim() > 1 else 0] if x.dim() else 1

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        weight = self._weight()
        if x.numel() * weight.shape[0] > self.LIMIT:
            raise LayerError(
                f"the one-hot inputs of an embedding of {weight.shape[0]} rows are too large for {x.numel()} indices; "
                "use .D, .delta and .Sigma"
            )
        hot = torch.nn.functional.one_hot(x, weight.shape[0]).to(weight.dtype)
        return rows(hot.unsqueeze(-2) if x.dim() == 1 else hot, batch_dim)

    @override
    def features(self, x: Tensor, batch_dim: int = 0, averaged: bool = False) -> Tensor:
        z = self._weight()[x]
        z = rows(z.unsqueeze(-2) if x.dim() == 1 else z, batch_dim)
        return z.mean(-2, keepdim=True) if averaged else z

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z, batch_dim)

    @override
    def weight_gradient(self, x: Tensor, dz: Tensor) -> Tensor:
        total = torch.zeros_like(self._weight(), dtype=torch.promote_types(dz.dtype, torch.float32)).mT
        self.add_weight_gradient(x, dz, total)
        return total

    @override
    def add_weight_gradient(self, x: Tensor, dz: Tensor, total: Tensor) -> None:
        ignored = getattr(self.module, "padding_idx", None)
        index, delta = x.reshape(-1), dz.reshape(-1, dz.shape[-1]).to(total.dtype)
        if ignored is not None:
            delta = delta * (index != ignored).unsqueeze(-1)
        total.mT.index_add_(0, index, delta)

    def _weight(self) -> Tensor:
        return self.native_weight()


class NamedWeightLayer(Layer):
    """One of several weights of a module that computes with all of them inside a single function.

    :mod:`gramscope.layers.intercepted_functions` takes the function apart and reports inputs and outputs batch first, so
    ``batch_dim`` does not matter.
    """

    @classmethod
    @abstractmethod
    def weights(cls, module: nn.Module) -> tuple[str, ...]:
        """Names of the weights of a module, for the names of its layers."""

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(x)

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z)


class AttentionProjection(NamedWeightLayer):
    """One of the query, key, value and output projections inside ``nn.MultiheadAttention``.

    The query, key and value weights are rows of the packed ``in_proj_weight`` unless key or value sizes differ from the
    embedding's, in which case the module keeps them apart. A single sequence has no batch axis.
    """

    fixed_rank = True
    PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

    @override
    @classmethod
    def weights(cls, module: nn.Module) -> tuple[str, ...]:
        return cls.PROJECTIONS

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def weight_attribute(self) -> str:
        """Name of the attribute of the attention module that holds this projection's rows."""
        if self.weight_name == "out_proj":
            return "out_proj.weight"
        return "in_proj_weight" if getattr(self.module, "_qkv_same_embed_dim", True) else f"{self.weight_name}_weight"

    @override
    def owner(self) -> tuple[nn.Module, str]:
        if self.weight_name == "out_proj":
            return self.module.get_submodule("out_proj"), "weight"
        return self.module, self.weight_attribute()

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        if self.weight_attribute() != "in_proj_weight":
            return weight
        size = weight.shape[0] // 3
        start = self.PROJECTIONS.index(self.weight_name) * size
        return weight[start : start + size]

    @override
    @torch.no_grad()
    def assign(self, matrix: Tensor) -> None:
        parameter = self.parameter
        assert parameter is not None
        self.to_matrix(parameter).copy_(matrix)

    @override
    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 2

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(x.unsqueeze(0) if x.dim() == 2 else x)

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return rows(z.unsqueeze(0) if z.dim() == 2 else z)
