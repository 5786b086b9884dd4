"""The table of options is the only source: optimizers take its names, and ``gs.VCL`` has its defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

import gramscope as gs
from gramscope_lab.training.config_tables import MethodTable
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.options import METHODS, OPTIMIZERS, Option, optimizer_options


def test_vcl_has_the_defaults_of_the_table() -> None:
    signature = inspect.signature(gs.VCL).parameters
    defaults = {key: signature[key].default for key in OPTIMIZERS["vcl"]}
    assert defaults == optimizer_options("vcl", {})


def other(option: Option) -> Any:
    """An allowed value that is not the default."""
    if option.choices:
        return option.choices[1]
    return {bool: not option.default, int: 2, float: 0.5, str: "2"}.get(type(option.default), 8)


def built(method: str, options: dict[str, Any]) -> list[Any]:
    """All that an optimizer shows of its options."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    made = build_method(MethodTable(method, options), model, steps_per_epoch=4)
    facts: list[Any] = [vars(made).get("_warm_up_steps")]
    for optimizer in made.optimizers:
        facts += [getattr(optimizer, "summary", str)(), getattr(optimizer, "method", "")]
        facts += [{key: v for key, v in getattr(optimizer, "_arguments", {}).items() if not callable(v)}]
        facts += [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    return facts


@pytest.mark.parametrize("method", METHODS)
def test_every_option_reaches_an_optimizer(method: str) -> None:
    needed = {"nesterov": {"momentum": 0.9}}
    for key, option in METHODS[method].items():
        base = needed.get(key, {})
        assert built(method, base) != built(method, {**base, key: other(option)}), key
