"""The weights of a model that VCL can train, and why it cannot train others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from gramscope.distributed.gathered import check_not_flattened, is_sharded
from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind, EmbeddingKind
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.optim.weight_matrix import WeightMatrix


@dataclass(frozen=True)
class Trainable:
    """The chosen layers, the weights that can be trained, all in registration order, and why other layers have none."""

    layers: tuple[Layer, ...]
    matrices: list[WeightMatrix]
    refused: list[tuple[Layer, str]]

    @property
    def last(self) -> WeightMatrix | Layer:
        """The layer registered last, as its matrix where it has one."""
        final = self.layers[-1]
        return next((matrix for matrix in self.matrices if final in matrix.layers), final)


def find_trainable(model: nn.Module, layers: LayerSelector, bias: bool) -> Trainable:
    """The trainable weights of the chosen layers, and why other chosen layers have none.

    Raises:
        LayerError: a layer asked for by ``layers`` cannot be trained, a weight is not there yet, or only some rows of a
            packed attention weight are chosen.
    """
    root = unwrap(model)
    check_not_flattened(root)
    chosen = select_layers(root, layers, factors=True).layers
    if layers is None:
        chosen = tuple(layer for layer in chosen if not layer.kind.not_for_vcl)
    shared = _outside_users(root, [layer for layer in chosen if not layer.kind.not_for_vcl])
    grouped: dict[tuple[int, str], list[Layer]] = {}
    refused: list[tuple[Layer, str]] = []
    for layer in chosen:
        if layer.parameter is not None and nn.parameter.is_lazy(layer.parameter):
            raise LayerError(f"layer {layer.name!r} is lazy: run one forward pass before making the optimizer")
        reason = _refusal(layer, shared)
        if reason is None:
            part = layer.kind.weight_name if isinstance(layer.kind, AttentionProjectionKind) else ""
            grouped.setdefault((id(layer.parameter), part), []).append(layer)
        elif layers is None:
            refused.append((layer, reason))
        else:
            raise LayerError(f"layer {layer.name!r} {reason}; leave it out of layers=")
    matrices = [_matrix(members, bias) for members in grouped.values()]
    for matrix in matrices:
        _check_packed(matrix, matrices)
    if not matrices:
        listing = "; ".join(f"{layer.name} {reason}" for layer, reason in refused)
        raise LayerError(
            f"no layer of {type(root).__name__} can be trained by VCL: {listing or 'none is of a kind it trains'}"
        )
    return Trainable(chosen, matrices, refused)


def find_embeddings(model: nn.Module) -> list[WeightMatrix]:
    """The embeddings whose weight nothing else uses; not those with sparse gradients."""
    root = unwrap(model)
    users = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False))
    return [
        WeightMatrix(layer.name, layer.parameter, (layer,))
        for layer in select_layers(root).layers
        if isinstance(layer.kind, EmbeddingKind)
        and layer.parameter is not None
        and users[id(layer.parameter)] == 1
        and layer.parameter.requires_grad
        and layer.parameter.numel()
        and not layer.module.sparse
        and not is_sharded(layer.parameter)
    ]


def _matrix(members: list[Layer], bias: bool) -> WeightMatrix:
    layer = members[0]
    parameter = layer.parameter
    assert parameter is not None
    own_bias = None
    if bias and len(members) == 1 and not isinstance(layer.kind, AttentionProjectionKind):
        candidate = layer.module._parameters.get("bias")
        own_bias = candidate if candidate is not None and candidate.requires_grad else None
    return WeightMatrix(layer.name, parameter, tuple(members), own_bias)


def _refusal(layer: Layer, shared: dict[int, str]) -> str | None:
    """Why a layer's weight cannot be trained by VCL."""
    parameter = layer.parameter
    if layer.kind.not_for_vcl:
        return layer.kind.not_for_vcl
    if parameter is None:
        return "has a computed weight (a parametrisation), which cannot be set"
    if not parameter.requires_grad:
        return "is frozen (requires_grad=False)"
    if is_sharded(parameter):
        return (
            "is sharded over processes: VCL decomposes whole matrices and keeps V beside them, which sharding is meant to "
            "avoid. Train it in DistributedDataParallel, or with gs.GramWhitened, which works on shards"
        )
    if parameter.numel() == 0:
        return f"has an empty weight of shape {tuple(parameter.shape)}"
    if id(parameter) in shared:
        return f"shares its weight with {shared[id(parameter)]}, which is not a linear-like layer"
    return None


def _check_packed(matrix: WeightMatrix, matrices: Sequence[WeightMatrix]) -> None:
    """Raise where only some projections of a packed attention weight are chosen."""
    if not matrix.part or matrix.part == "out_proj":
        return
    kind = matrix.layers[0].kind
    assert isinstance(kind, AttentionProjectionKind)
    if kind.weight_attribute(matrix.layers[0].module) != "in_proj_weight":
        return
    parts = {other.part for other in matrices if other.parameter is matrix.parameter}
    missing = {"q_proj", "k_proj", "v_proj"} - parts
    if missing:
        raise LayerError(
            f"layer {matrix.name!r} is part of one packed weight with {', '.join(sorted(missing))}; an optimizer trains "
            "whole parameters, so choose all three projections or none"
        )


def _outside_users(model: nn.Module, layers: Iterable[Layer]) -> dict[int, str]:
    """Parameters that a module other than a linear-like layer uses, such as a tied embedding, with its name."""
    inside = {id(layer.module) for layer in layers}
    inside |= {id(child) for layer in layers for child in layer.module.modules()}
    inside |= {id(m) for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)}
    users: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] = name or type(module).__name__
    return users
