"""Optimizers' states from a checkpoint that somebody changed: every option and count of steps of every method."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.training.config_tables import MethodTable
from gramscope_lab.training.methods import Method, build_method
from gramscope_lab.training.options import METHODS

BAD = [-1, 0, 3, -0.5, 1e400, math.nan, None, "x", [], {}, [-1, 2], (-1.0, -1.0), True]
FORMS: list[dict[str, Any]] = [
    *({"name": name} for name in METHODS if not name.startswith(("whiten-adam", "gram-fixed"))),
    {"name": "gram-fixed-adamw"},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "vcl", "readout": "adamw", "warm_up_epochs": 1.0},
    {"name": "vcl", "solver": "exact"},
]


def make(form: dict[str, Any]) -> tuple[nn.Module, Method]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, build_method(MethodTable.from_table(form), model, steps_per_epoch=2)


def advance(model: nn.Module, method: Method, steps: int) -> Tensor:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 3, generator=g), torch.arange(6) % 2
    for _ in range(steps):
        method.set_factor(0.5)
        method.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        method.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def changed(states: list[dict[str, Any]]) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """The states with one option or count replaced, or left out."""

    def places(found: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
        groups = [(group, key) for state in found for group in state.get("param_groups", ()) for key in group]
        kept = [entries for state in found for entries in state.get("state", {}).values()]
        counts = [(e, key) for e in kept for key in ("step", "steps", "since", "wait") if key in e]
        return [*groups, *counts, *([(found[-1], "done")] if "done" in found[-1] else [])]

    for number, (_, key) in enumerate(places(states)):
        for value in (*BAD, "left out"):
            target = places(states)[number][0]
            kept = dict(target)
            target[key] = value
            if value == "left out":
                del target[key]
            yield key, value, states
            target.clear()
            target.update(kept)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_changed_options_and_counts_are_refused_or_change_nothing(form: dict[str, Any]) -> None:
    model, method = make(form)
    advance(model, method, 3)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(method.state_dict())
    expected = advance(model, method, 3)
    tried, fresh = 0, False
    for key, value, damaged in chain([("", "", states)], changed(states)):
        if not fresh:  # one that refused a state is as it was
            model, method = make(form)
            model.load_state_dict(weights)
        fresh = True
        try:
            method.load_state_dict(copy.deepcopy(damaged))
        except InputError as error:
            named = key in str(error) or key in ("params", "layers", "head", "alpha")
            assert named, (key, str(error))  # noqa: PT017
            continue
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            assert key in ("params", "layers", "head", "step", "steps", "since", "wait", "done")
            continue  # the loop names the checkpoint for these (test_a_checkpoint_of_somebody_else_is_refused)
        if key in ("step", "steps", "since", "wait", "done"):  # another count that is possible
            assert value in (0, 3, "left out")
            fresh = False
            continue
        assert torch.equal(advance(model, method, 3), expected), (key, value)
        fresh = False
        tried += 1
    assert tried > 1


def test_the_error_names_option_and_values() -> None:
    _, method = make({"name": "adamw"})
    states = copy.deepcopy(method.state_dict())
    states[0]["param_groups"][0]["betas"] = (-1.0, 0.999)
    with pytest.raises(InputError, match=r"betas = \(-1.0, 0.999\) of the optimizer, but betas = \(0.9, 0.999\) is"):
        method.load_state_dict(states)
