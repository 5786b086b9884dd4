"""The readout: the layer executed last, and the optimizer of every parameter that VCL does not train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gramscope.errors import InputError, LayerError
from gramscope.layers.linear_layer import Layer
from gramscope.optim.weight_matrix import WeightMatrix

#: makes the optimizer of all parameters that VCL does not train
ReadoutFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


def make_readout(factory: ReadoutFactory, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
    """The optimizer of everything that VCL does not train; None where there is nothing.

    Raises:
        InputError: ``factory`` does not return an optimizer that can work beside VCL.
    """
    if not parameters:
        return None
    made = factory(list(parameters)) if callable(factory) else factory
    if not isinstance(made, Optimizer):
        raise InputError(
            "readout= must be a function that returns a torch optimizer, such as "
            f"lambda params: torch.optim.AdamW(params, lr=1e-3); got {type(made).__name__}"
        )
    if isinstance(made, LBFGS):
        raise InputError(
            "readout=LBFGS evaluates the loss several times a step, and VCL once: choose another optimizer"
        )
    given, taken = {id(p) for p in parameters}, {id(p) for group in made.param_groups for p in group["params"]}
    if given != taken:
        raise InputError(
            f"the optimizer made by readout= holds {len(taken)} parameters, not exactly the {len(given)} it was given"
        )
    return made


def head_parameters(head: WeightMatrix | Layer) -> list[nn.Parameter]:
    """The parameters of the layer executed last, also where VCL could not train it."""
    layers = head.layers if isinstance(head, WeightMatrix) else (head,)
    return [p for layer in layers for p in layer.module.parameters()]


def last_executed(
    order: Sequence[tuple[WeightMatrix | Layer, Tensor]], matrices: Sequence[WeightMatrix]
) -> WeightMatrix | Layer:
    """The layer applied last in one forward pass, as its matrix where VCL can train it.

    Args:
        order: each application with its output, in order of execution.
        matrices: all weights that can be trained.

    Raises:
        LayerError: nothing ran, or the output of some matrix does not enter the last layer (a model with two heads).
    """
    if not order:
        raise LayerError(
            "no layer was seen in a forward pass, so the last one executed is not known. Run a forward and backward pass "
            "first; a model that ran under torch.compile before VCL was made is not seen (make VCL before its first call)"
        )
    last, output = order[-1]
    reached = _ancestors(output)
    apart = {
        t.name
        for t, z in order
        if isinstance(t, WeightMatrix) and t is not last and z.grad_fn is not None and z.grad_fn not in reached
    }
    if apart:
        raise LayerError(
            f"which layer is the readout is ambiguous: {last.name!r} ran last, but the outputs of "
            f"{', '.join(sorted(apart))} do not enter it. Name the layers that VCL trains with layers=; there are: "
            f"{', '.join(t.name for t in matrices)}"
        )
    return last


def _ancestors(output: Tensor) -> set[object]:
    """All autograd nodes that ``output`` depends on."""
    found: set[object] = set()
    stack: list[object] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack.extend(edge[0] for edge in node.next_functions)  # type: ignore[attr-defined]
    return found
