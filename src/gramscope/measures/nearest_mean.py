"""NC4 of a network's readout: how often it agrees with the nearest class mean, from a second pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.calling import Unpack, batches, call_model, evaluating, model_device, model_dtype, to_device
from gramscope.layers.select import unwrap
from gramscope.layers.tape import capture
from gramscope.linalg.rows import to_double
from gramscope.statistics.features import IGNORED
from gramscope.statistics.layer import LayerStatistics


@torch.no_grad()
def nearest_mean_agreement(
    layer: LayerStatistics,
    model: nn.Module,
    loader: Any,
    unpack: Unpack | None = None,
    eval_mode: bool = True,
    batch_dim: int = 0,
    targets: Callable[[Any, Any], Tensor] | None = None,
    ignore_index: int = IGNORED,
) -> float:
    """Share of samples whose nearest class mean (at the inputs of ``layer``) is the class with the largest score.

    Args:
        layer: statistics of the readout, with class moments of its inputs.
        model, loader, unpack, eval_mode, batch_dim, targets, ignore_index: what the statistics were collected with.
    """
    classes = None if layer.features is None else layer.features.classes
    if classes is None:
        raise InputError("NC4 needs class labels")
    if isinstance(loader, Iterator):
        raise InputError(
            "NC4 reads the data twice, and this loader can be read once; give a DataLoader or a list of batches"
        )
    present = classes.counts > 0
    if int(present.sum()) < 2:
        raise InputError(f"neural collapse needs at least two classes with samples, got {int(present.sum())}")
    labels, means = present.nonzero().flatten(), classes.means[present] - classes.mean
    offsets = means.square().sum(1) / 2
    agree = count = 0
    device, root = model_device(model), unwrap(model)
    with (
        evaluating(root, eval_mode),
        capture(model, [layer.name], outputs=[layer.name], gradients=False, batch_dim=batch_dim) as tape,
    ):
        for inputs, target in batches(loader, unpack, model_dtype(root)):
            inputs, target = to_device(inputs, device), to_device(target, device)
            call_model(model, inputs)
            kept = (target if targets is None else targets(inputs, target)).flatten() != ignore_index
            h, scores = tape[layer.name].h, tape.outputs[layer.name]
            if h.dim() != 3 or h.shape[1] != 1:
                raise InputError(f"NC4 needs one row per sample; layer {layer.name!r} has {h.shape[-2]} sites")
            rows = to_double(h[kept, 0]) - classes.mean
            nearest = labels[(rows @ means.mT - offsets).argmax(1)]
            agree += int((nearest == scores.reshape(h.shape[0], -1)[kept].argmax(1).to(nearest.device)).sum())
            count += rows.shape[0]
            tape.clear()
    return agree / count
