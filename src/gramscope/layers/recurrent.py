"""The matrices of ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells.

torch computes a whole sequence in one fused function. While such a module is watched, the equations of its cell are run
here instead, step by step: slower, and equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import NamedWeightLayer

#: ``(name of the weight, x [..., d], z [..., k]) -> z``, the output to continue with
Report: TypeAlias = Callable[[str, Tensor, Tensor], Tensor]


class RecurrentLayer(NamedWeightLayer):
    """One weight of a recurrent module: input-hidden, hidden-hidden or projection, per layer and direction.

    The input-hidden matrix is applied to all steps at once, ``[batch, steps, d]``. The others are applied once per step, and
    their applications are the sites.
    """

    not_for_vcl = "is used inside a fused recurrent function"

    @override
    @classmethod
    def weights(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, p in module.named_parameters(recurse=False) if name.startswith("weight"))

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.RNNBase | nn.RNNCellBase)

    @override
    def samples(self, x: Tensor, batch_dim: int = 0) -> int:
        return x.shape[0]

    @override
    def is_unbatched(self, x: Tensor) -> bool:
        return False


class Weights(NamedTuple):
    """Weights and biases of one layer and direction, and the end of their names, such as ``_l0_reverse``."""

    suffix: str
    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None


#: the state is h, or h and c of an LSTM
State: TypeAlias = tuple[Tensor, ...]


def _lstm(zi: Tensor, zh: Tensor, state: State) -> State:
    i, f, g, o = (zi + zh).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(zi: Tensor, zh: Tensor, state: State) -> State:
    (ri, ui, ni), (rh, uh, nh) = zi.chunk(3, -1), zh.chunk(3, -1)
    n = torch.tanh(ni + torch.sigmoid(ri + rh) * nh)
    return ((state[0] - n) * torch.sigmoid(ui + uh) + n,)


def _tanh(zi: Tensor, zh: Tensor, state: State) -> State:
    return (torch.tanh(zi + zh),)


def _relu(zi: Tensor, zh: Tensor, state: State) -> State:
    return (torch.relu(zi + zh),)


Cell: TypeAlias = Callable[[Tensor, Tensor, State], State]
#: torch's functions for sequences and for single steps, each with the equations of its cell
SEQUENCES: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
STEPS: dict[Any, Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}


def run_step(cell: Cell, report: Report, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of :data:`STEPS` with these arguments."""
    x, hx, *rest = args
    state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    weights = Weights("", *rest, **kwargs)
    new = cell(_project(report, "ih", x, weights), _project(report, "hh", state[0], weights), state)
    return new if len(new) > 1 else new[0]


def run_sequence(cell: Cell, names: Sequence[str], report: Report, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """A function of :data:`SEQUENCES` with these arguments, for a batch ``[steps, batch, d]`` or a packed sequence.

    Args:
        cell: the equations.
        names: of the flat weights, as the module has them.
        report: called for every application of a weight.
        args: ``(input, states, weights, biases, layers, dropout, train, bidirectional, batch_first)``, or ``(data,
            batch_sizes, states, weights, …)`` without ``batch_first``.
    """
    packed = isinstance(args[3], list | tuple)
    x, sizes = args[0], args[1] if packed else None
    hx, flat, _biases, layers, dropout, train, bidirectional = args[2:9] if packed else args[1:8]
    batch_first = not packed and args[8]
    alive = None
    if sizes is not None:  # to [steps, batch, d] with zeros after each sequence
        alive = torch.arange(int(sizes[0]), dtype=sizes.dtype, device=sizes.device)[None, :] < sizes[:, None]
        alive = alive.to(x.device).unsqueeze(-1)
        x = x.new_zeros(*alive.shape[:2], x.shape[-1]).masked_scatter(alive, x)
    elif batch_first:
        x = x.transpose(0, 1)
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    directions = 2 if bidirectional else 1
    weights = _by_layer(names, flat)
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            start = tuple(s[index] for s in states)
            out, end = _run_direction(cell, report, x, start, weights[index], bool(direction), alive)
            outputs.append(out)
            ends.append(end)
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, True)
    if alive is not None:
        x = x[alive.squeeze(-1)]
    final = tuple(torch.stack(states) for states in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *final)


def _run_direction(
    cell: Cell, report: Report, x: Tensor, state: State, weights: Weights, reverse: bool, alive: Tensor | None
) -> tuple[Tensor, State]:
    """One layer in one direction: outputs ``[steps, batch, h]`` and the state after the last step."""
    zi = _project(report, "ih", x.transpose(0, 1), weights).transpose(0, 1)
    outputs: list[Tensor] = []
    steps = range(x.shape[0])
    for t in reversed(steps) if reverse else steps:
        before = state[0] if alive is None else state[0] * alive[t]
        new = cell(zi[t], _project(report, "hh", before, weights), state)
        if weights.hr is not None:
            new = (_project(report, "hr", new[0], weights), *new[1:])
        if alive is not None:  # a sequence that has not begun or is over keeps its state
            new = tuple(torch.where(alive[t], n, s) for n, s in zip(new, state, strict=True))
        state = new
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _project(report: Report, name: str, x: Tensor, weights: Weights) -> Tensor:
    """``x Wᵀ + b`` for the matrix ``ih``, ``hh`` or ``hr``."""
    bias = None if name == "hr" else getattr(weights, f"b_{name}")
    return report(f"weight_{name}{weights.suffix}", x, F.linear(x, getattr(weights, name), bias))


def _by_layer(names: Sequence[str], flat: Sequence[Tensor]) -> list[Weights]:
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in zip(names, flat, strict=True):
        role, matrix, suffix = name.split("_", 2)  # weight_ih_l0_reverse
        tensors.setdefault("_" + suffix, {})[matrix if role == "weight" else f"b_{matrix}"] = tensor
    return [Weights(suffix, **of_layer) for suffix, of_layer in tensors.items()]
