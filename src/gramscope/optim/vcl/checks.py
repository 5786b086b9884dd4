"""Checks of VCL's arguments, gradients and stored states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, NumericalError
from gramscope.layers.modules import public_name, unwrap
from gramscope.optim.vcl.rules import Anchor, Solver
from gramscope.optim.weight_matrix import WeightMatrix

#: larger values have no square in float64
_MOST_GAMMA = 1e150


def check_facts(stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise an InputError that names the difference unless a stored state has the same layers, anchor and alpha."""
    if "layers" not in stored:
        raise InputError("this state is not one of VCL; was the checkpoint saved with another optimizer?")
    if stored["layers"] != own["layers"]:
        raise InputError(
            f"this state trains the layers {stored['layers']} by VCL, which are not those of this optimizer: {own['layers']}"
        )
    for fact in ("anchor", "alpha"):
        if stored.get(fact) != own[fact]:
            raise InputError(f"this state belongs to {fact}={stored.get(fact)!r}, not {own[fact]!r}")


def error_of_gradients(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> NumericalError | None:
    """An error that names the parameters whose gradients are not finite, if there are any."""
    found = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
    dense = [(p, grad) for p, grad in found if not grad.is_sparse]
    if not dense:
        return None
    norms = torch._foreach_norm([grad for _, grad in dense])
    if bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()):
        return None
    names = {id(p): public_name(name) for name, p in unwrap(model).named_parameters()}
    bad = [names.get(id(p), "a parameter") for p, grad in dense if not bool(grad.isfinite().all())]
    if not bad:
        return None
    return NumericalError(
        f"the gradient of {', '.join(bad)} has NaN or infinite values; weights and state are as before this step"
    )


def check_representable(weight: WeightMatrix, new: Tensor) -> None:
    """Raise a NumericalError if new weights, finite in their own dtype, overflow in that of the parameter."""
    dtype = weight.parameter.dtype
    narrower = torch.finfo(dtype).max < torch.finfo(new.dtype).max / 2
    if narrower and not bool(new.to(dtype).isfinite().all()):
        raise NumericalError(
            f"the VCL step of layer {weight.name!r} has weights too large for {dtype}; weights and state are as before this "
            "step. Lower gamma"
        )


def check_gamma(gamma: float) -> None:
    """Raise an InputError unless gamma is ≥ 0 and its square, which steps use, is finite."""
    if not (isinstance(gamma, int | float) and 0 <= gamma <= _MOST_GAMMA):
        raise InputError(f"gamma={gamma!r}: the step of the virtual update must be a number from 0 to {_MOST_GAMMA:g}")


def check_reduction(reduction: object) -> None:
    """Raise an InputError unless this is a :data:`~gramscope.optim.vcl.model_hooks.Reduction`."""
    if isinstance(reduction, int | float) and not (math.isfinite(reduction) and reduction > 0):
        raise InputError(f"reduction={reduction!r}: the factor must be a positive number")
    if not (reduction in ("mean", "sum") or isinstance(reduction, int | float) or callable(reduction)):
        raise InputError(f"reduction={reduction!r}: give 'mean', 'sum', a number, or a function of the batch size")


#: arguments that belong to Algorithm 1, with their defaults
_ALGORITHM_1 = {
    "rank": None, "anchor": "current", "second_order": True, "floor": 0.0, "cutoff": None, "refresh": 32, "momentum": 0.0,
    "orthogonalise": False, "aim": 0.0, "bias": False, "precision": None,
}  # fmt: skip


def check_averaged(arguments: Mapping[str, Any]) -> None:
    """Raise an InputError that names the first argument which only Algorithm 1 has."""
    for name, default in _ALGORITHM_1.items():
        if arguments[name] != default:
            raise InputError(
                f"{name}={arguments[name]!r} belongs to Algorithm 1: add solver='recursive' (or 'exact'), or leave it out"
            )


def check_arguments(
    gamma: float,
    solver: str,
    anchor: str,
    rank: int | None,
    refresh: int,
    aim: float,
    precision: torch.dtype | None,
) -> None:
    """Raise an InputError that names the first argument with an invalid value; other arguments are checked where they go."""
    check_gamma(gamma)
    if solver not in get_args(Solver):
        raise InputError(f"solver={solver!r}: choose one of {', '.join(map(repr, get_args(Solver)))}")
    if anchor not in get_args(Anchor):
        raise InputError(f"anchor={anchor!r}: choose one of {', '.join(map(repr, get_args(Anchor)))}")
    if not (rank is None or isinstance(rank, int)):
        raise InputError(f"rank={rank!r}: the number of directions to keep must be a whole number")
    if not (isinstance(refresh, int) and refresh >= 1):
        raise InputError(
            f"refresh={refresh!r}: give the largest number of steps from one full step to the next, at least 1"
        )
    if not (isinstance(aim, int | float) and math.isfinite(aim)):
        raise InputError(f"aim={aim!r}: the multiple of the gradient step to aim at must be a finite number")
    if precision not in (None, torch.float32, torch.float64):
        raise InputError(f"precision={precision!r}: the solvers compute in torch.float32 or torch.float64")
