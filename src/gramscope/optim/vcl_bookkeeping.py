"""What surrounds the mathematics of VCL: the table of who trains what, checks and copies of state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gramscope.errors import InputError, NumericalError
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import public_name, unwrap
from gramscope.optim.vcl_rules import Anchor
from gramscope.optim.vcl_targets import Target
from gramscope.optim.vcl_unit import Solver, Unit

#: makes the optimizer of all parameters that VCL does not train
ReadoutFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


def summary_table(
    model: nn.Module,
    units: Sequence[Unit],
    head: Target | Layer | None,
    settled: bool,
    readout: Optimizer | None,
    refused: Sequence[tuple[Layer, str]],
) -> str:
    """A table of all parameters of a model: shape, and which optimizer trains each."""
    weights = {id(p) for p in ([] if head is None else head_parameters(head)) if p.dim() > 1}
    by = {id(p): unit for unit in units for p in unit.target.parameters}
    other = "nothing" if readout is None else type(readout).__name__
    rows = [("parameter", "shape", "trained by")]
    for name, p in unwrap(model).named_parameters():
        shape = " × ".join(map(str, p.shape)) or "scalar"
        if id(p) in by:
            unit = by[id(p)]
            who = f"VCL {unit.solver}" + (f", rank {unit.rank}" if unit.solver == "recursive" else "")
        elif not p.requires_grad:
            who = "nothing (frozen)"
        else:
            who = other
            if id(p) in weights:
                who += " (readout)" if settled else " (readout, unless the first forward shows another last layer)"
        rows.append((public_name(name), shape, who))
    rows += [(layer.name, "", f"not by VCL: {reason}") for layer, reason in refused]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in rows)


def head_parameters(head: Target | Layer) -> list[nn.Parameter]:
    """The parameters of the layer executed last, also where VCL could not train it."""
    layers = head.layers if isinstance(head, Target) else (head,)
    return [p for layer in layers for p in layer.module.parameters()]


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


def check_facts(stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a stored state of other layers or rules.

    Raises:
        InputError: naming what differs.
    """
    if stored.get("layers") != own["layers"]:
        raise InputError(
            f"this state trains the layers {stored.get('layers')} by VCL, which are not those of this optimizer: "
            f"{own['layers']}"
        )
    for fact in ("anchor", "alpha"):
        if stored.get(fact) != own[fact]:
            raise InputError(f"this state belongs to {fact}={stored.get(fact)!r}, not {own[fact]!r}")


def check_finite_gradients(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse gradients that are not finite.

    Raises:
        NumericalError: naming the parameters.
    """
    found = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
    dense = [(p, grad) for p, grad in found if not grad.is_sparse]
    if not dense:
        return
    norms = torch._foreach_norm([grad for _, grad in dense])
    if bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()):
        return
    names = {id(p): public_name(name) for name, p in unwrap(model).named_parameters()}
    bad = [names.get(id(p), "a parameter") for p, grad in dense if not bool(grad.isfinite().all())]
    if bad:
        raise NumericalError(
            f"the gradient of {', '.join(bad)} has NaN or infinite values; weights and state are as before this step"
        )


def copied_to(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of nested state on a device, dtypes as they are."""
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            copied[key] = value.to(device, copy=True)
        else:
            copied[key] = copied_to(value, device) if isinstance(value, Mapping) else value
    return copied


def check_gamma(gamma: float) -> None:
    """Refuse a step that is no step.

    Raises:
        InputError: with the value.
    """
    if not (isinstance(gamma, int | float) and 0 <= gamma < math.inf):
        raise InputError(f"gamma={gamma!r}: the step of the virtual update must be a number of at least 0")


def check_arguments(
    gamma: float,
    solver: str,
    anchor: str,
    rank: int | None,
    refresh: int,
    aim: float,
    precision: torch.dtype | None,
) -> None:
    """Refuse arguments of VCL that no other part checks.

    Raises:
        InputError: naming the argument and its value.
    """
    check_gamma(gamma)
    if solver not in get_args(Solver):
        raise InputError(f"solver={solver!r}: choose one of {', '.join(map(repr, get_args(Solver)))}")
    if anchor not in get_args(Anchor):
        raise InputError(f"anchor={anchor!r}: choose one of {', '.join(map(repr, get_args(Anchor)))}")
    if not (rank is None or isinstance(rank, int)):
        raise InputError(f"rank={rank!r}: the number of directions to keep must be a whole number")
    if not (isinstance(refresh, int) and refresh >= 1):
        raise InputError(
            f"refresh={refresh!r}: a full step is due at least every so many steps; 1 makes all of them full"
        )
    if not (isinstance(aim, int | float) and math.isfinite(aim)):
        raise InputError(f"aim={aim!r}: the part of the gradient step to go along with must be a number")
    if precision not in (None, torch.float32, torch.float64):
        raise InputError(f"precision={precision!r}: the solvers compute in torch.float32 or torch.float64")
