"""Measurements and optimizers on a device other than the CPU, as far as a machine without one can tell.

``test_second_device.py`` runs this file in a process of its own: ``python -m pytest tests/on_second_device.py``. Where there is
a GPU it is that device.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
import test_default_device as calls
from golden import store
from golden.nets import NETS, made
from gramscope.linalg import arrays, moments, psd, stochastic
from gramscope.optim import orthogonalise, procrustes
from second_device import register

DEVICE = "cuda" if torch.cuda.is_available() else "second"
STORED: dict[str, Any] = json.loads(store.STORED.read_text())


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    if DEVICE == "second":
        register()
    torch.backends.cudnn.allow_tf32 = False  # convolutions would round more coarsely than the CPU


def moved(value: Any, device: str = DEVICE) -> Any:
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
                there = nn.Parameter(parameter.data.to(DEVICE), parameter.requires_grad)
                setattr(module, name, new.setdefault(id(parameter), there))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(module, name, buffer.to(DEVICE))
    return model


#: torch fuses an LSTM's cells on other devices; where the device is simulated, also nets that are like others
LEFT_OUT = (
    {"lstm"} if DEVICE == "second" else {"lstm", "bert"}
)  # rounding decides whether two rows have a spectrum to fit
if DEVICE == "second":
    LEFT_OUT |= {"t5", "bert", "llama", "residual net", "gpt2", "lora", "mamba", "mlp float32"}


@pytest.mark.parametrize("name", [name for name in NETS if name not in LEFT_OUT])
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
    limit = 1e-6 if net.dtype == torch.float64 and DEVICE == "second" else 1e-4
    for layer, row in expected.items():
        for column, value in row.items():
            same = found[layer][column]
            assert (same is None) == (value is None), f"{layer}.{column}"
            if value is not None and not math.isnan(value):
                assert same == pytest.approx(value, rel=limit, abs=limit), f"{layer}.{column}"


def test_a_default_device_changes_nothing() -> None:
    net = NETS["mlp estimated"]
    model, _, data, _ = made(net)
    expected = gs.measure(model, data, net.loss, **net.options).to_dict()["layers"]
    torch.set_default_device(DEVICE)
    try:
        found = gs.measure(module_moved(model), data, net.loss, **net.options).to_dict()["layers"]
    finally:
        torch.set_default_device(None)
    for layer, row in expected.items():
        assert_close(found[layer], row)


def test_sums_live_where_their_layer_is() -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    places = {"0": "cpu", "1": "cpu", "2": f"{DEVICE}:0"}
    model = accelerate.dispatch_model(copy.deepcopy(whole), places, main_device="cpu")
    data, loss = (calls.X, calls.Y), nn.CrossEntropyLoss()
    found, expected = (gs.measure(m, data, loss, measures="all") for m in (model, whole))
    for layer in ("0", "2"):
        assert_close(found[layer], expected[layer])
    statistics = gs.collect(model, data, loss)
    assert [statistics[name].D.device.type for name in ("0", "2")] == ["cpu", DEVICE]


def assert_close(found: Any, expected: Any) -> None:
    """Equal up to rounding, in any nesting."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(moved(found, "cpu"), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_close(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (
            pytest.approx(expected, rel=1e-4, abs=1e-4, nan_ok=True) if isinstance(expected, float) else expected
        )


@pytest.mark.filterwarnings("ignore::gramscope.errors.GramscopeWarning")
@pytest.mark.parametrize("name", [name for name in calls.CALLS if "sequences" not in name])
def test_public_functions_and_optimizers(name: str) -> None:
    make, call = calls.CALLS[name]
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model, x = make()
    expected = call(copy.deepcopy(model), x)
    assert_close(call(module_moved(model), moved(x)), expected)


A, B = (torch.randn(n, 7, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (40, 41))
S = A.T @ A
LABELS = torch.arange(40) % 3
LINALG: dict[str, Callable[[Any], Any]] = {
    "psd": lambda on: (psd.psd_power(on(S), 0.5), psd.psd_power(on(S), -0.5), psd.eigvalsh(on(S)), psd.svdvals(on(A))),
    "rows": lambda on: (arrays.row_norm(on(A)), arrays.row_product(on(A), on(S))),
    "target linearity": lambda on: float(gs.target_linearity(on(A), on(LABELS), ridge=0.1)),
    "target linearity, few samples": lambda on: float(gs.target_linearity(on(A.T), on(LABELS[:7]), intercept=True)),
    "fit": lambda on: gs.fit_linear(on(A), on(A[:, :2].sin())).beta,
    "surrogate": lambda on: float(gs.surrogate(on(A), on(A[:, :2].sin()), normalized=True)),
    "virtual shift": lambda on: gs.virtual_covariance_shift(on(A), on(A.cos()), on(A @ A.T), 0.1),
    "spectra": lambda on: (gs.weight_spectrum(on(A)).values, gs.feature_spectrum(on(A)).values),
    "large spectrum": lambda on: float(gs.large_weight_spectrum(on(A), top=3).effective_rank),
    "polar": lambda on: (gs.polar(on(A)), gs.polar(on(A), method="svd")),
    "nearest": lambda on: procrustes.nearest_with_gram(on(A), on(A.sin())),
    "orthogonalised": lambda on: orthogonalise.orthogonalised(on(A.float())),
    "similarity": lambda on: float(gs.linear_cka(on(A), on(A.cos()))),
    "probes": lambda on: stochastic.gram_times(on(A), stochastic.probes(7, 3, on(A))),
    "onto columns": lambda on: stochastic.onto_columns(on(A), on(A.cos())),
    "moments": lambda on: moments.moments(on(A), on(A.sin())).merge(moments.moments(on(A.cos()), on(A))).C_hy,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::gramscope.errors.GramscopeWarning")
@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra(name: str) -> None:
    assert_close(LINALG[name](moved), LINALG[name](lambda value: value))


def mixes_devices() -> None:
    torch.ldexp(torch.ones(2, 2, device=DEVICE), torch.tensor(-3))


def takes_a_generator_of_the_cpu() -> None:
    torch.set_default_device(DEVICE)
    try:
        torch.randn(3, generator=torch.Generator(device="cpu"))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("crash", [mixes_devices, takes_a_generator_of_the_cpu])
def test_the_device_refuses_what_a_gpu_refuses(crash: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        crash()


def test_numbers_of_the_cpu_may_meet_the_device_where_a_gpu_takes_them() -> None:
    x = torch.ones(2, device=DEVICE)
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
