"""Checks that the optimizers share: of their arguments, and of gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gramscope.errors import InputError, LayerError, NumericalError, no_such


def refuse_arguments(optimizer: str, given: Mapping[str, Any], known: str, instead: Mapping[str, str]) -> None:
    """Raise an InputError for the first argument that an optimizer does not have.

    Args:
        optimizer: its name.
        given: unknown arguments by name.
        known: the names of its arguments, separated by spaces.
        instead: what to do in place of arguments that other optimizers have.
    """
    for name, value in given.items():
        if name in instead:
            raise InputError(f"{optimizer} has no {name}= (got {value!r}): {instead[name]}")
        raise InputError(f"{optimizer}: {no_such('argument', name, known.split())}")


def check_owners(model: nn.Module, names: Mapping[Tensor, str], optimizer: str) -> None:
    """Raise a LayerError where a parameter of the model has a gradient, but is not among those that an optimizer trains."""
    for name, p in model.named_parameters():
        if p.grad is not None and p not in names:
            raise LayerError(
                f"{name} has a gradient and was frozen, or not in the model, when {optimizer} was made: make a new "
                f"gs.{optimizer}(model)"
            )


def check_gradients(gradients: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """The norms of gradients by name, after one wait for the device.

    Raises:
        NumericalError: a gradient is not finite.
        InputError: a gradient is sparse.
    """
    named = dict(gradients)
    sparse = [name for name, gradient in named.items() if gradient.is_sparse]
    if sparse:
        raise InputError(f"the gradient of {sparse[0]} is sparse: make the embedding with sparse=False")
    norms = torch._foreach_norm(list(named.values())) if named else ()
    sizes = torch.stack([norm.double().to(norms[0].device) for norm in norms]).tolist() if norms else []
    bad = [name for (name, gradient), size in zip(named.items(), sizes, strict=True) if not math.isfinite(size)]
    bad = [name for name in bad if not bool(named[name].isfinite().all())]
    if bad:
        raise NumericalError(
            f"the gradient of {', '.join(bad)} has NaN or infinite values; nothing was changed. Lower the rates, "
            "clip the gradients, or skip such steps (torch.amp.GradScaler does)"
        )
    return dict(zip(named, sizes, strict=True))


def with_numbers(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose parameters have numbers again, which torch's distributed checkpoint turns into text."""
    state = {int(key) if str(key).isdigit() else key: value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state}


def keep_dtypes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """After ``load_state_dict`` give tensors of the state their stored dtypes back; torch casts them to the parameter's."""
    for stored, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        for key, parameter in zip(stored["params"], group["params"], strict=True):
            if key in state_dict["state"]:
                copied = partial(torch.Tensor.to, device=parameter.device, copy=True)
                optimizer.state[parameter] = tree_map_only(Tensor, copied, state_dict["state"][key])
