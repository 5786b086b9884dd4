"""Average gradient outer product and pre-activation tangent kernel of a network's layers ([NFA]).

    K = (1/n) Σ_i J_iᵀ J_i  [k, k],     J_i = ∂f(x_i)/∂z_i          AGOP = Wᵀ K W  [d, d]

Sites of one sample (patches, tokens) are summed; patches make a convolution's AGOP ``d = in/groups · kernel`` wide.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError, Note, ResultWarning, check_arguments, checks_names, joined
from gramscope.layers.batches import Unpack, is_array, split_batch
from gramscope.layers.model_call import OutputSelector, model_device
from gramscope.layers.select import LayerSelector
from gramscope.linalg.budget import MEMORY, Budget
from gramscope.statistics.collect import collect
from gramscope.statistics.matrix_sums import Kernel
from gramscope.statistics.result import LayerStatistics
from gramscope.statistics.run import run
from gramscope.statistics.sums import Plan

#: samples of the batches that a tensor of inputs is cut into, so that memory does not grow with it
BATCH = 512
#: the same on the CPU, where larger batches are no faster
CPU_BATCH = 64

#: arguments of :func:`gramscope.collect` that these functions hand on
OPTIONS = ("output", "sketch", "generator", "memory", "batch_dim", "unpack", "eval_mode", "process_group")


class TangentKernel(NamedTuple):
    """``K`` of a layer and, against a reference network, ``K̄ = (1/n) Σ (J_i − J_i⁰)ᵀ(J_i − J_i⁰)``."""

    K: Tensor
    K_centered: Tensor


def agop(model: nn.Module, inputs: Any, layers: LayerSelector = None, **options: Any) -> dict[str, Tensor]:
    """Average gradient outer product at the input of every layer, ``{layer: [d, d]}``, in the weights' precision.

    Layers the output does not depend on are left out, with a :class:`~gramscope.errors.ResultWarning`.

    Args:
        model: any module.
        inputs: a tensor or NumPy array ``[n, …]`` or a mapping of keyword inputs, cut into batches; or a loader, a data set or
            a pair ``(x, y)``, whose targets are not used. A list of tensors of one dtype has a batch in each. Outputs at
            padding (``attention_mask``) are left out.
        layers: names, globs or types; ``None`` for every linear-like layer.
        options: ``output``, ``sketch``, ``generator``, ``memory``, ``batch_dim``, ``unpack``, ``eval_mode`` and
            ``process_group``, as for :func:`gramscope.collect`.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Linear(3, 1, bias=False)
    >>> G = gs.agop(net, torch.rand(8, 3))["(model)"]
    >>> torch.allclose(G, net.weight.T @ net.weight)
    True
    """
    result = {}
    for layer in _kernels(model, inputs, layers, None, options):
        W = layer.weight.to(layer.K.device, torch.promote_types(layer.weight.dtype, torch.float32))
        with torch.autocast(W.device.type, enabled=False):
            result[layer.name] = W.mT @ (layer.K.to(W.dtype) @ W)
    return result


def tangent_kernel(
    model: nn.Module, inputs: Any, layers: LayerSelector = None, reference: nn.Module | None = None, **options: Any
) -> dict[str, Any]:
    """``{layer: K}``, or ``{layer: TangentKernel(K, K_centered)}`` when a reference network is given.

    ``K = (1/n) Σ J_iᵀJ_i`` is ``[k, k]`` in float64. The centred kernel needs both Jacobians at every sample; K and K⁰ do
    not determine it, so the reference (usually a copy of the network at initialisation) is evaluated alongside.
    Arguments are those of :func:`agop`.

    >>> import copy, torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> gs.tangent_kernel(net, torch.rand(8, 3))["0"].shape
    torch.Size([4, 4])
    >>> gs.tangent_kernel(net, torch.rand(8, 3), reference=copy.deepcopy(net))["0"].K_centered.abs().max().item()
    0.0
    """
    stats = _kernels(model, inputs, layers, reference, options)
    if reference is None:
        return {layer.name: layer.K for layer in stats}
    return {layer.name: TangentKernel(layer.K, layer.K_centered) for layer in stats}


@checks_names
def dual_tangent_kernel(
    model: nn.Module,
    inputs: Any,
    layers: LayerSelector = None,
    *,
    blocks: bool = False,
    output: OutputSelector = None,
    memory: int = MEMORY,
    batch_dim: int = 0,
    unpack: Unpack | None = None,
) -> dict[str, Tensor]:
    """The n×n dual ``𝒦_ij = ⟨J_i, J_j⟩``; with ``blocks`` the ``[n·c, n·c]`` matrix of all ``J_i J_jᵀ``, sample-major.

    Its size grows with n² by definition; every sample's Jacobian is held while it is formed. Layers of which one row of inputs
    serves several samples are left out. Arguments are those of
    :func:`agop`.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> dual_tangent_kernel(net, torch.rand(8, 3))["0"].shape
    torch.Size([8, 8])
    """
    jacobians: dict[str, list[list[Tensor]]] = {}
    sequences = True
    reading: dict[str, Any] = {"output": output, "unpack": unpack, "batch_dim": batch_dim}
    plan = Plan((Kernel,), layers=layers, jacobians=True, budget=Budget(memory), **reading)
    with closing(run(model, inputs if unpack is not None else _cut(inputs, model, batch_dim), None, plan)) as stream:
        for seen in stream:
            if seen.J is not None and plan.notes.has(seen.layer, "Kernel"):
                if seen.first == 0:
                    jacobians.setdefault(seen.layer, []).append([])
                # [m, groups…, batch, sites, k] -> [batch, sites, m, groups…, k] -> [batch, m, everything]
                J = seen.positions.tokens_first(seen.J.movedim((-3, -2), (0, 1)))
                jacobians[seen.layer][-1].append(J.movedim(2, 1).flatten(2).double())
                sequences = sequences and bool(seen.positions.lengths)
            del seen
    result = {}
    for name, blocks_of in jacobians.items():
        batched = [torch.cat(found, dim=1) for found in blocks_of]
        shapes = [tuple(J.shape) for J in batched]
        if len({shape[1:] for shape in shapes}) > 1 and not sequences:
            raise InputError(f"layer {name!r} has different sites in different batches ({shapes}); no dual exists")
        sizes = [max(sizes) for sizes in zip(*shapes, strict=True)]  # shorter sequences end with zeros
        J = torch.cat([F.pad(p, (0, sizes[2] - p.shape[2], 0, sizes[1] - p.shape[1])) for p in batched])
        flat = J.flatten(0, 1) if blocks else J.flatten(1)
        result[name] = flat @ flat.mT
    return result


def _kernels(
    model: nn.Module, inputs: Any, layers: LayerSelector, reference: nn.Module | None, options: dict[str, Any]
) -> list[LayerStatistics]:
    """Statistics of the layers with Jacobians; a warning names the others."""
    check_arguments(options, OPTIONS)
    data = inputs if options.get("unpack") is not None else _cut(inputs, model, options.get("batch_dim", 0))
    kept: dict[str, Any] = {"features": False, "gradients": False, "jacobians": True}
    statistics = collect(model, data, layers=layers, reference=reference, **kept, **options)
    without = [layer.name for layer in statistics if layer.JtJ is None]
    if without:
        none = (Note("no Jacobians", "no Jacobians"),)
        reasons = "; ".join(f"{name}: {joined(statistics.notes.get(name, none))}" for name in without)
        warnings.warn(f"left out {reasons}", ResultWarning, stacklevel=3)
    return [layer for layer in statistics if layer.JtJ is not None]


def _cut(inputs: Any, model: nn.Module, batch_dim: int) -> Any:
    """Tensors and arrays as batches; loaders as they are."""
    if isinstance(inputs, list) and all(map(is_array, inputs)) and len({str(x.dtype) for x in inputs}) == 1:
        return [(x, None) for x in inputs]
    if is_array(inputs):
        values: dict[Any, Any] = {0: inputs}
    elif isinstance(inputs, Mapping) and inputs:
        values = dict(inputs)
    else:
        return inputs
    long = {name for name, value in values.items() if is_array(value) and value.ndim > batch_dim}
    sizes = {values[name].shape[batch_dim] for name in long}
    whole = len(sizes) != 1 or 0 in sizes
    batched, size = [], CPU_BATCH if model_device(model).type == "cpu" else BATCH
    for start in [0] if whole else range(0, max(sizes), size):
        index = (slice(None),) * batch_dim + (slice(start, start + size),)
        cut = {name: value[index] if name in long and not whole else value for name, value in values.items()}
        batched.append(split_batch(cut) if isinstance(inputs, Mapping) else (cut[0], None))
    return batched
