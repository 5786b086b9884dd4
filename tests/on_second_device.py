"""Measurements and optimizers on a device other than the CPU, as far as a machine without one can tell.

``test_second_device.py`` runs this file in a process of its own: ``python -m pytest tests/on_second_device.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from golden import store
from golden.nets import NETS, made
from second_device import register

STORED: dict[str, Any] = json.loads(store.STORED.read_text())


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    register()


def moved(value: Any, device: str = "second") -> Any:
    """Tensors in any nesting on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def module_moved(model: nn.Module) -> nn.Module:
    """The model on the second device, with parameters that modules share still shared."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                there = nn.Parameter(parameter.data.to("second"), parameter.requires_grad)
                setattr(module, name, new.setdefault(id(parameter), there))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(module, name, buffer.to("second"))
    return model


@pytest.mark.parametrize(
    "name", [name for name in NETS if name != "lstm"]
)  # torch fuses an LSTM's cells on other devices
@pytest.mark.filterwarnings("ignore")
def test_tables_are_those_of_the_cpu(name: str) -> None:
    net = NETS[name]
    model, reference, data, held_out = made(net)
    options = {"measures": "all", "held_out": moved(held_out), "weight_decay": 0.01, "process_group": False}
    here = gs.measure(model, data, net.loss, reference=reference, **{**options, "held_out": held_out}, **net.options)
    there = gs.measure(
        module_moved(model), moved(data), net.loss, reference=module_moved(reference), **options, **net.options
    )
    expected, found = here.to_dict()["layers"], there.to_dict()["layers"]
    assert list(found) == list(expected)
    limit = 1e-6 if net.dtype == torch.float64 else 1e-4
    for layer, row in expected.items():
        for column, value in row.items():
            same = found[layer][column]
            assert (same is None) == (value is None), f"{layer}.{column}"
            if value is not None and not math.isnan(value):
                assert same == pytest.approx(value, rel=limit, abs=limit), f"{layer}.{column}"


def mixes_devices() -> None:
    torch.ldexp(torch.ones(2, 2, device="second"), torch.tensor(-3))


def takes_a_generator_of_the_cpu() -> None:
    torch.set_default_device("second")
    try:
        torch.randn(3, generator=torch.Generator(device="cpu"))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("crash", [mixes_devices, takes_a_generator_of_the_cpu])
def test_the_device_refuses_what_a_gpu_refuses(crash: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        crash()


def test_numbers_of_the_cpu_may_meet_the_device_where_a_gpu_takes_them() -> None:
    x = torch.ones(2, device="second")
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
