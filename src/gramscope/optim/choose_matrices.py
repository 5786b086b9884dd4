"""Choose the weight matrices that an optimizer works on, and say why other parameters are not among them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import check_not_flattened, is_sharded
from gramscope.errors import InputError, LayerError, ResultWarning
from gramscope.layers.kinds import AttentionProjection, EmbeddingLayer, Layer
from gramscope.layers.modules import public_name, unwrap
from gramscope.layers.recurrent import RecurrentLayer
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.optim.processes import why_not_sharded
from gramscope.optim.weight_matrix import WeightMatrix
from gramscope.text_table import text_table


@dataclass(frozen=True)
class Choice:
    """The chosen matrices, every other parameter with the reason why it is not one of them, and the names of all.

    ``head`` are the layers of the output weight where it was left out.
    """

    matrices: tuple[WeightMatrix, ...]
    others: dict[str, str]
    names: dict[Tensor, str]
    head: tuple[Layer, ...] = ()

    def table(self, verb: str, otherwise: str = "") -> str:
        """A table: parameter, its shape as matrices, and ``verb``, or ``otherwise`` and why not."""
        rows = [("parameter", "matrix", "")]
        for matrix in self.matrices:
            frozen = "" if matrix.parameter.requires_grad else ", but frozen now (requires_grad=False)"
            rows.append((matrix.name, _shape(matrix.shape), verb + frozen))
        rows += [(name, "", f"{otherwise or 'not ' + verb}: {reason}") for name, reason in self.others.items()]
        return "\n".join(text_table(rows, left=3))


def choose_matrices(
    groups: Sequence[dict[str, Any]], model: nn.Module | None, layers: LayerSelector, readout: bool | str
) -> Choice:
    """The matrices among the parameter groups of an optimizer that is wrapped.

    With a model these are the weights of all linear-like layers in matrix form, or of those that ``layers`` names, except for
    embeddings; without, all tensors of two or more dimensions, read as ``[shape[0], -1]``. For ``readout="auto"`` see
    :func:`_readout_left_out`.

    Raises:
        InputError: an argument has no meaning here, or no matrix is left.
    """
    if readout not in (True, False, "auto"):
        raise InputError(f"readout={readout!r}: give 'auto', True or False")
    if model is None and (layers is not None or not readout):
        raise InputError("layers= and readout=False need model=, to know its layers")
    names = _names(groups, model)
    known = {id(p): p for group in groups for p in group["params"]}
    others: dict[str, str] = {}
    if model is None:
        chosen = [WeightMatrix(names[key], p) for key, p in known.items() if p.dim() >= 2]
        _warn_about_groups(chosen)
    else:
        check_not_flattened(model)
        chosen, others = _layer_matrices(model, names)
        left_out = _readout_left_out(chosen[-1], model, readout) if chosen and layers is None else ""
        if left_out:
            others[chosen.pop().name] = left_out
        if layers is not None:
            wanted = {layer.name for layer in select_layers(model, layers, factors=True)}
            others |= {m.name: "not among layers=" for m in chosen if not any(x.name in wanted for x in m.layers)}
            chosen = [matrix for matrix in chosen if matrix.name not in others]
    reasons = [_refusal(matrix, known) for matrix in chosen]
    others |= {matrix.name: reason for matrix, reason in zip(chosen, reasons, strict=True) if reason}
    matrices = [matrix for matrix, reason in zip(chosen, reasons, strict=True) if not reason]
    if not matrices:
        listing = "; ".join(f"{name}: {reason}" for name, reason in others.items())
        raise InputError(f"there is no weight matrix to work on{': ' + listing if listing else ''}")
    return _choice(matrices, others, list(known.values()), names)


def _choice(
    matrices: Sequence[WeightMatrix],
    others: dict[str, str],
    parameters: Sequence[Tensor],
    names: Mapping[int, str],
    head: tuple[Layer, ...] = (),
) -> Choice:
    """The choice, with a reason for every other parameter."""
    taken = {id(matrix.parameter) for matrix in matrices}
    for p in parameters:
        name = names[id(p)]
        if id(p) not in taken and not any(other == name or other.startswith(name + "[") for other in others):
            vector = f"{p.dim()}-dimensional, not a matrix"
            others[name] = vector if p.dim() < 2 else "no linear-like layer has it as its weight"
    return Choice(tuple(matrices), others, {p: names[id(p)] for p in parameters}, head)


def choose_trained(
    model: nn.Module, layers: LayerSelector, *, by_gradient: bool, split: Mapping[str, int] | None = None
) -> Choice:
    """The matrices that an optimizer with steps of its own trains.

    With ``layers=None`` these are the weights of all linear-like layers, except for the head where there are others
    (:func:`head_layers`). An optimizer that needs gradients alone (``by_gradient``) also trains weights whose layer has inputs
    that are not seen, such as those of recurrent modules and fused experts, and lookup tables that nothing else uses.
    ``split`` gives the number of equal blocks of a layer's outputs that are matrices of their own.

    Raises:
        InputError: a layer does not have so many blocks.
        LayerError: a layer asked for by ``layers`` cannot be trained, or none can.
    """
    root = unwrap(model)
    check_not_flattened(root)
    trained = [p for p in root.parameters() if p.requires_grad]
    names = _names([{"params": trained}], root)
    candidates, others = _layer_matrices(root, names)
    for pattern, blocks in (split or {}).items():
        found = {layer.name for layer in select_layers(root, pattern, factors=True)}
        candidates = [_split(m, blocks) if found & {layer.name for layer in m.layers} else m for m in candidates]
    if by_gradient and layers is None:
        tables = _own_tables(root, names)
        others = {name: reason for name, reason in others.items() if name not in {table.name for table in tables}}
        candidates = [*candidates, *tables]
    several = sum(not _untrainable(matrix, by_gradient) for matrix in candidates) > 1
    wanted = None if layers is None else {layer.name for layer in select_layers(root, layers, factors=True)}
    head = head_layers(root) if wanted is None and several else ()
    matrices: list[WeightMatrix] = []
    for matrix in candidates:
        asked = wanted is not None and any(layer.name in wanted for layer in matrix.layers)
        reason = _untrainable(matrix, by_gradient)
        if wanted is not None and not asked:
            others[matrix.name] = "not among layers="
        elif asked and reason:
            raise LayerError(f"layer {matrix.layers[0].name!r} {reason}; leave it out of layers=")
        elif any(layer.name == last.name for layer in matrix.layers for last in head):
            others[matrix.name] = "the readout"
        elif reason:
            others[matrix.name] = reason
        else:
            matrices.append(matrix)
    reached = {layer.name for matrix in matrices for layer in matrix.layers}
    if wanted is not None and wanted - reached:
        name = min(wanted - reached)
        raise LayerError(
            f"layer {name!r}: {others.get(name + '.weight', 'has no weight of its own')}; leave it out of layers="
        )
    if not matrices:
        listing = "; ".join(f"{name} {reason}" for name, reason in others.items())
        raise LayerError(f"no layer of {type(root).__name__} can be trained: {listing}")
    for matrix in matrices:
        _check_packed(matrix, matrices)
    return _choice(matrices, others, trained, names, head)


def _split(matrix: WeightMatrix, blocks: int) -> WeightMatrix:
    if len(matrix.shape) != 2 or not isinstance(blocks, int) or blocks < 1 or matrix.shape[0] % blocks:
        raise InputError(
            f"split: {matrix.name} of shape {tuple(matrix.shape)} has no {blocks!r} equal blocks of outputs"
        )
    return replace(matrix, blocks=blocks)


def head_layers(model: nn.Module) -> tuple[Layer, ...]:
    """The layer that gives the output, or several with its weight.

    It is the one that a Hugging Face model names in ``get_output_embeddings()``, else the one whose weight is that of an
    embedding, else the linear-like layer registered last, of whatever kind. A recurrent layer is no head.
    """
    layers = [layer for layer in select_layers(model, factors=True) if not isinstance(layer, EmbeddingLayer)]
    output = getattr(model, "get_output_embeddings", None)
    named = getattr(output() if callable(output) else None, "weight", None)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    wanted = {id(named)} if isinstance(named, Tensor) else tables
    found = [layer for layer in layers if id(layer.parameter) in wanted] or layers[-1:]
    return tuple(layer for layer in found if not isinstance(layer, RecurrentLayer))


def _own_tables(model: nn.Module, names: dict[int, str]) -> list[WeightMatrix]:
    """The embeddings whose weight no other module has."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    tables = [layer for layer in select_layers(model) if isinstance(layer, EmbeddingLayer)]
    return [
        WeightMatrix(names[id(layer.parameter)], layer.parameter, (layer,))
        for layer in tables
        if layer.parameter is not None and users[id(layer.parameter)] == 1 and not layer.module.sparse
    ]


def _untrainable(matrix: WeightMatrix, by_gradient: bool) -> str:
    """Why a matrix cannot be trained by steps of our own; empty where it can."""
    p, layer = matrix.parameter, matrix.layers[0]
    if layer.not_for_vcl and not by_gradient:
        return layer.not_for_vcl
    if not p.requires_grad:
        return "is frozen (requires_grad=False)"
    if is_sharded(p) and not by_gradient:
        return "is sharded over processes: use DistributedDataParallel, or gs.FreeMuon, which works on shards"
    if is_sharded(p) and why_not_sharded(matrix):
        return why_not_sharded(matrix)
    if p.is_meta:
        return "is on the meta device: load its weights first"
    if p.numel() == 0:
        return f"is empty, of shape {tuple(p.shape)}"
    return ""


def _check_packed(matrix: WeightMatrix, matrices: Sequence[WeightMatrix]) -> None:
    """Raise where only some projections of a packed attention weight are chosen."""
    parts = {other.part for other in matrices if other.parameter is matrix.parameter}
    if matrix.name.endswith("]") and len(parts) < 3:
        raise LayerError(
            f"{matrix.name} is part of one packed weight of three projections; an optimizer trains whole parameters, so "
            "choose all three or none"
        )


def _readout_left_out(last: WeightMatrix, model: nn.Module, readout: bool | str) -> str:
    """Why the last layer is left to the wrapped optimizer; empty where it is not.

    ``readout="auto"`` does so for a head with one row per word of a vocabulary: tied to an embedding, with as many outputs as
    an embedding of the model has rows, or with at least eight times as many outputs as inputs.
    """
    if readout != "auto":
        return "" if readout else "the readout (last linear-like layer), left out by readout=False"
    tables = {name: m for name, m in unwrap(model).named_modules() if isinstance(m, nn.Embedding)}
    for name, table in tables.items():
        if table.weight is last.parameter:
            return f"the readout, left out by readout='auto': its weight is that of the embedding {public_name(name)}"
    k, d = last.shape[-2:]
    if k >= 8 * d or any(table.num_embeddings == k and k > d for table in tables.values()):
        return f"the readout, left out by readout='auto': {k} outputs of {d} inputs, a vocabulary rather than classes"
    return ""


def _layer_matrices(model: nn.Module, names: dict[int, str]) -> tuple[list[WeightMatrix], dict[str, str]]:
    """Weights of the linear-like layers, each once, and the reasons why other layers or modules have none."""
    others: dict[str, str] = {}
    seen: dict[tuple[int, int], tuple[str, nn.Parameter, list[Layer]]] = {}
    available = select_layers(model, factors=True)
    tables = [layer for layer in available if isinstance(layer, EmbeddingLayer)]
    for layer in available:
        parameter = layer.parameter
        if layer in tables:
            continue
        if parameter is None:
            how = "quantised" if layer.remark else "computed by a parametrisation"
            others[f"{layer.name}.weight"] = f"{how}, so it cannot be set"
            continue
        name = names.get(id(parameter), f"{layer.name}.weight")
        if isinstance(layer, AttentionProjection) and name.endswith("in_proj_weight"):
            name = f"{name}[{layer.weight_name}]"
        key = (id(parameter), int(layer.to_matrix(parameter.detach()).storage_offset()))
        if key in seen:
            others[f"{layer.name}.weight"] = f"the same tensor as {seen[key][0]}"
        seen.setdefault(key, (name, parameter, []))[2].append(layer)
    matrices = [WeightMatrix(name, parameter, tuple(layers)) for name, parameter, layers in seen.values()]
    for layer in tables:
        p = layer.parameter
        if p is not None and not any(p is m.parameter for m in matrices):
            others[names.get(id(p), f"{layer.name}.weight")] = "a lookup table: its input is an index, not a vector"
    modules = dict(unwrap(model).named_modules())
    for name, reason in available.unsupported.items():
        module = modules.get(name if name != "(model)" else "")
        own = [] if module is None else [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        others.update(
            {names[id(p)]: reason for p in own if id(p) in names and not any(p is m.parameter for m in matrices)}
        )
    return matrices, others


def _refusal(matrix: WeightMatrix, known: dict[int, Tensor]) -> str | None:
    """Why this matrix cannot be worked on, or None."""
    p = matrix.parameter
    if id(p) not in known:
        return "is not in the optimizer"
    if is_sharded(p) and why_not_sharded(matrix):
        return why_not_sharded(matrix)
    if p.dim() < 2:
        return f"has shape {tuple(p.shape)}, which is not that of a matrix"
    if p.is_meta:
        return "is on the meta device: load its weights first"
    if p.numel() == 0:
        return f"is empty, of shape {tuple(p.shape)}"
    if not p.is_floating_point():
        return f"is {p.dtype}; only real floating-point weights have a Gram here"
    return None


def _names(groups: Sequence[dict[str, Any]], model: nn.Module | None) -> dict[int, str]:
    """A name for every parameter: the model's, else the optimizer's, else its position in the groups."""
    names: dict[int, str] = {}
    for g, group in enumerate(groups):
        given = group.get("param_names") or [f"group {g}, parameter {i}" for i in range(len(group["params"]))]
        for p, name in zip(group["params"], given, strict=True):
            names[id(p)] = _unique(name, set(names.values()))
    if model is not None:
        names.update({id(p): public_name(name) for name, p in unwrap(model).named_parameters()})
    return names


def _unique(name: str, taken: set[str]) -> str:
    """The name, with a number added where another parameter has the same one."""
    return next(new for new in (name, *(f"{name} ({i})" for i in range(2, len(taken) + 3))) if new not in taken)


def _warn_about_groups(matrices: Sequence[WeightMatrix]) -> None:
    deep = [matrix.name for matrix in matrices if matrix.parameter.dim() > 2]
    if deep:
        warnings.warn(
            f"{', '.join(deep)}: taken as one matrix [out, in·kernel] each; a grouped convolution has one per group, which "
            "cannot be known from the tensor. Pass model= if there is one",
            ResultWarning,
            stacklevel=4,
        )


def _shape(shape: torch.Size) -> str:
    k, d = shape[-2:]
    return f"{k} × {d}" if len(shape) == 2 else f"{shape[:-2].numel()} of {k} × {d}"
