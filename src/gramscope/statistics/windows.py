"""Layers that see each sample in several rows, one sample after the other, as attention in windows does."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.layers.capture import capture
from gramscope.layers.kinds import LinearKind
from gramscope.layers.linear_layer import Layer
from gramscope.layers.model_call import call_model
from gramscope.layers.tape import Tape
from gramscope.layers.validity import of_samples


def windowed_layers(model: nn.Module, tape: Tape, inputs: Any, n: int) -> frozenset[str]:
    """Names of linear layers whose inputs have several rows of each sample, in the order of the samples.

    The first sample is run alone: such a layer then sees the first rows of the whole batch. In a batch of one sample all rows
    are its own.

    Args:
        model: the model.
        tape: a capture that has seen one forward of the model.
        inputs: of that forward.
        n: samples.
    """
    axis = tape.batch_dim
    whole = {record.name: record.applications for record in tape if len(record.applications) == 1}
    several = {name: a.x for name, (a,) in whole.items() if _is_multiple(a.layer, a.x, n, axis)}
    if n == 1 or not several:
        return frozenset(several)
    try:
        with (
            tape.looking_away(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
            capture(model, list(several), gradients=False, batch_dim=axis) as alone,
        ):
            call_model(model, of_samples(inputs, partial(Tensor.narrow, dim=axis, start=0, length=1), n, axis))
    except Exception:
        return frozenset()  # the model does not accept a single sample
    first = {record.name: record.applications[0].x for record in alone}
    return frozenset(name for name, x in several.items() if name in first and _begins_with(x, first[name], n))


def _is_multiple(layer: Layer, x: Tensor, n: int, axis: int) -> bool:
    rows = layer.kind.samples(layer.module, x, axis)
    return isinstance(layer.kind, LinearKind) and rows > n > 0 and rows % n == 0


def _begins_with(x: Tensor, first: Tensor, n: int) -> bool:
    if first.shape[0] * n != x.shape[0] or first.shape[1:] != x.shape[1:]:
        return False
    return torch.allclose(x[: first.shape[0]], first, rtol=1e-3, atol=1e-4 * float(first.abs().max()))
