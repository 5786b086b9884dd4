"""The readout: the optimizer of every parameter that VCL does not train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn
from torch.optim import LBFGS, Optimizer

from gramscope.errors import InputError
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
