"""What a run of the first samples alone shows: where a layer sees the samples, and whether its inputs serve several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import ReentrantError, layers_with_shared_rows
from gramscope.layers.kinds import LinearKind
from gramscope.layers.model_call import OutputSelector, run_captured, select_output
from gramscope.layers.record import Application
from gramscope.layers.tape import Tape
from gramscope.layers.validity import of_samples


def shared_layers(
    model: nn.Module, tape: Tape, inputs: Any, output: Tensor, selector: OutputSelector, n: int
) -> frozenset[str]:
    """Names of layers of which one row of inputs serves several samples (:func:`layers_with_shared_rows`).

    Two samples show it. A model that does not accept two is asked for all, at the cost of two backward passes.

    Args:
        model: the model.
        tape: a capture that has seen one forward of the model.
        inputs: of that forward.
        output: of that forward, chosen by ``selector``.
        selector: which output of the model.
        n: samples.
    """
    names = [record.name for record in tape]
    try:
        with torch.enable_grad(), _run_alone(model, tape, inputs, n, 2, names, gradients=True) as (two, returned):
            return layers_with_shared_rows(two, select_output(returned, selector))
    except Exception:
        try:
            return layers_with_shared_rows(tape, output)
        except (ReentrantError, InputError):  # outputs without gradients, or that are not those of samples
            return frozenset()


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
    try:
        with torch.no_grad(), _run_alone(model, tape, inputs, n, 1, asked, gradients=False) as (alone, _):
            first = {record.name: record.applications[0].x for record in alone}
    except Exception:
        return {}  # the model does not accept a single sample
    found = {name: _axis(x, first[name], n) for name, x in asked.items() if name in first}
    return {name: axis for name, axis in found.items() if axis is not None}


@contextmanager
def _run_alone(
    model: nn.Module, tape: Tape, inputs: Any, n: int, count: int, layers: Iterable[str], gradients: bool
) -> Iterator[tuple[Tape, Any]]:
    """A capture of ``layers`` in a run of the first ``count`` of n samples, unseen by ``tape``, and what the model returned."""
    dim = tape.batch_dim
    few = of_samples(inputs, partial(Tensor.narrow, dim=dim, start=0, length=count), n, dim)
    with (
        tape.looking_away(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
        capture(model, list(layers), gradients=gradients, copy_weights=False, batch_dim=dim) as alone,
    ):
        yield alone, run_captured(model, alone, few)


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
