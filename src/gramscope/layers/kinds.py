"""The kinds of linear layers, each with its module's own shapes; convolutions, recurrent layers and experts have own files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import LayerError
from gramscope.layers.linear_layer import Layer, rows
from gramscope.layers.modules import names_in_code
from gramscope.linalg.arrays import without_autocast


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


class LoraLayer(LinearLayer):
    """A LoRA layer: ``z = (W + Σ s BA) h + b``, where W is frozen and A and B are trained.

    Where adapters are dropped out or changed in another way (DoRA), the output is not of that form, which is checked.
    """

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        base = module._modules.get("base_layer")
        adapters = isinstance(module._modules.get("lora_A"), nn.ModuleDict) and hasattr(module, "get_delta_weight")
        return (
            adapters and base is not None and any(kind.matches(base) for kind in (LinearLayer, TransposedLinearLayer))
        )

    @override
    def is_standard(self) -> bool:
        return False

    @override
    @torch.no_grad()
    def native_weight(self) -> Tensor:
        layer: Any = self.module
        weight: Tensor = layer.base_layer.weight.detach()
        if layer.disable_adapters or layer.merged:
            return weight
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        return weight

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT if TransposedLinearLayer.matches(self.module.get_submodule("base_layer")) else weight

    def factors(self) -> Iterator[nn.Module]:
        """The modules with W, A and B."""
        for name in ("base_layer", "lora_A", "lora_B"):
            yield from self.module.get_submodule(name).modules()


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
        assert isinstance(self.module, nn.Embedding)
        return self.module.weight.detach()


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
