"""``gs.param_groups``: the parameter groups of an optimizer for matrices, such as Muon, and of one for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gramscope.errors import InputError
from gramscope.layers.modules import public_name, unwrap
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.optim.choose_matrices import choose_matrices, head_layers


def param_groups(
    model: nn.Module,
    matrix: Mapping[str, Any] | None = None,
    rest: Mapping[str, Any] | None = None,
    *,
    head: bool = False,
    exclude: LayerSelector = None,
) -> list[dict[str, Any]]:
    """Two parameter groups, ``[matrices, rest]``: weights of hidden linear-like layers, and all other parameters.

    Every parameter that requires a gradient is in exactly one of them. The rest has embeddings (and weights tied to one), the
    head, norms, biases, tokens and positions, and whatever no linear-like layer has as its weight.

    Weights that are not two-dimensional (convolutions ``[out, in, *kernel]``, stacked experts ``[experts, out, in]``) go to the
    rest, because ``torch.optim.Muon`` refuses them. The weight of a fused attention projection stays whole, ``[3k, d]``.

    Args:
        model: any module; compiled and DDP wrappers are looked through.
        matrix: options of the first group, such as ``{"lr": 0.02}``.
        rest: options of the second group.
        head: keep the head among the matrices. The head is what a Hugging Face model names in ``get_output_embeddings()``, else
            the linear-like layer registered last.
        exclude: names, globs or types of further layers that belong to the rest, such as second heads or routers.

    Raises:
        InputError: no matrix is left, an option is not known, or ``matrix`` or ``rest`` holds a reserved key.

    >>> import torch, gramscope as gs
    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> matrices, others = gs.param_groups(net, matrix={"lr": 0.02}, rest={"lr": 3e-4})
    >>> matrices["param_names"], others["param_names"]
    (['1.weight'], ['0.weight', '1.bias', '3.weight', '3.bias', '4.weight', '4.bias'])
    >>> optimizers = torch.optim.Muon([matrices]), torch.optim.AdamW([others])
    """
    for name, given in (("matrix", matrix), ("rest", rest)):
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"{name}={given!r}: give the options of that group as a dict, such as {{'lr': 0.02}}")
        reserved = {"params", "param_names"}.intersection(given or ())
        if reserved:
            raise InputError(f"{name} has the key {min(reserved)!r}, which param_groups sets itself")
    root = unwrap(model)
    trained = {public_name(name): p for name, p in root.named_parameters() if p.requires_grad}
    everything = [{"params": list(trained.values()), "param_names": list(trained)}]
    weights = {id(found.parameter) for found in choose_matrices(everything, root, None, True).matrices}
    left_out = _embeddings(root) | _parameters_of(root, exclude)
    if not head:
        left_out |= {id(layer.parameter) for layer in head_layers(root)}
    names = [name for name, p in trained.items() if id(p) in weights - left_out and p.dim() == 2]
    if not names:
        raise InputError(
            f"{type(root).__name__} has no hidden weight matrix for the first group; look at head= and exclude="
        )
    first: dict[str, Any] = {"params": [trained[name] for name in names], "param_names": names, **(matrix or {})}
    others = [name for name in trained if name not in set(names)]
    return [first, {"params": [trained[name] for name in others], "param_names": others, **(rest or {})}]


def _embeddings(model: nn.Module) -> set[int]:
    """The parameters of embeddings, also where a head is tied to one."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {id(table.weight) for table in tables}


def _parameters_of(model: nn.Module, layers: LayerSelector) -> set[int]:
    return set() if layers is None else {id(layer.parameter) for layer in select_layers(model, layers)}
