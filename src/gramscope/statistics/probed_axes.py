"""Where the samples are in the inputs of layers that do not have one row for each: found by running one sample alone."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.layers.capture import capture
from gramscope.layers.kinds import LinearKind
from gramscope.layers.model_call import call_model
from gramscope.layers.record import Application
from gramscope.layers.tape import Tape
from gramscope.layers.validity import of_samples


def probed_axes(model: nn.Module, tape: Tape, inputs: Any, n: int) -> dict[str, int]:
    """The axis along which linear layers see the samples, one after the other, by name.

    It is asked for layers with another number of rows than samples, as attention in windows has (several rows for each
    sample) and models that put positions first, and for those that have as many positions as samples. With the first sample
    alone, such a layer sees the first part of what it saw of the whole batch. In a batch of one sample all rows are its own.

    Args:
        model: the model.
        tape: a capture that has seen one forward of the model.
        inputs: of that forward.
        n: samples.
    """
    applied = {record.name: record.applications for record in tape if len(record.applications) == 1}
    asked = {name: a.x for name, (a,) in applied.items() if _is_asked(a, n, tape.batch_dim)}
    if n == 1 or not asked:
        return dict.fromkeys(asked, 0)
    dim = tape.batch_dim
    try:
        with (
            tape.looking_away(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
            capture(model, list(asked), gradients=False, batch_dim=dim) as alone,
        ):
            call_model(model, of_samples(inputs, partial(Tensor.narrow, dim=dim, start=0, length=1), n, dim))
    except Exception:
        return {}  # the model does not accept a single sample
    first = {record.name: record.applications[0].x for record in alone}
    found = {name: _axis(x, first[name], n) for name, x in asked.items() if name in first}
    return {name: axis for name, axis in found.items() if axis is not None}


def _is_asked(a: Application, n: int, axis: int) -> bool:
    other = a.layer.kind.samples(a.layer.module, a.x, axis) != n
    doubtful = a.x.dim() > 2 and a.x.shape[0] == a.x.shape[1]
    return isinstance(a.layer.kind, LinearKind) and a.x.dim() > 1 and n > 0 and (other or doubtful)


def _axis(x: Tensor, first: Tensor, n: int) -> int | None:
    """The axis along which ``x`` has n times the size of ``first`` and begins with it."""
    for axis in range(min(x.dim(), first.dim()) - 1):
        size = first.shape[axis]
        begin = x.narrow(axis, 0, min(size, x.shape[axis]))
        fits = x.shape[axis] == n * size and begin.shape == first.shape
        if fits and torch.allclose(begin, first, rtol=1e-3, atol=1e-4 * float(first.abs().max())):
            return axis
    return None
