"""A user's model after an exception at any point of a measurement, a capture, a monitor's or an optimizer's step."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs

#: exceptions for each kind of call; in a capture at each of its lines
TIMES, ALL = 30, 1000
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


class Interrupted(BaseException):
    """As a signal that comes at any line."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def condition(model: nn.Module) -> dict[str, Any]:
    """Everything that a measurement must not change."""
    parts = dict(model.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return {
        "hooks": {(n, h): len(getattr(m, h)) for n, m in parts.items() for h in hooks},
        "methods": {n: sorted(k for k in vars(m) if not k.startswith("_")) for n, m in parts.items()},
        "modes": {n: m.training for n, m in parts.items()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "identity": {n: (id(p), p.device, p.dtype, len(p._backward_hooks or {})) for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()},
        "values": {n: t.tolist() for n, t in model.state_dict().items()},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "settings": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


def lines_of(call: Callable[[], object], stop: int | None = None) -> list[int]:
    """Run ``call`` and raise when the ``stop``-th line of gramscope's own code runs; at which counts each line ran first."""
    count, first = 0, dict[tuple[str, int], int]()

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if "gramscope" not in name or "tests" in name:
            return None
        leaving = linecache.getline(name, frame.f_lineno).lstrip().startswith(LEAVING)
        if event == "line" and frame.f_code.co_name not in CLEANING and not leaving:
            count += 1
            first.setdefault((name, frame.f_lineno), count)
            if count == stop:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return list(first.values())


def some(lines: list[int], seed: int, times: int = TIMES) -> list[int]:
    return random.Random(seed).sample(lines, min(times, len(lines)))


#: functions and lines that run while a block is left: an exception in the middle of cleaning up is not made good. Python also
#: comes back to the line of a ``with`` before it leaves the block; an exception there would come before any cleaning.
LEAVING = ("with ", "self.detach()")
CLEANING = ("__exit__", "detach", "remove", "close", "restore", "_restore", "in_eval_mode", "evaluating", "__del__")


def measure(model: nn.Module) -> None:
    gs.measure(model, (X, Y), F.cross_entropy, measures=["target_linearity", "nfa", "gradient_norm"])


def capture(model: nn.Module) -> None:
    with gs.capture(model) as tape:
        loss = F.cross_entropy(model(X), Y)
        tape.backward(loss)


def agop(model: nn.Module) -> None:
    gs.agop(model, X)


CALLS = {"measure": measure, "capture": capture, "agop": agop}


def broken_forward(model: nn.Module, after: int) -> None:
    """Let the ``after``-th application of a layer fail."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    count = 0

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if count > after:
                raise Interrupted
            return super().forward(x)

    for layer in layers:
        layer.__class__ = Broken


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::gramscope.errors.ResultWarning")
def test_lines_that_raise(name: str, record_property: Any) -> None:
    model = network()
    if name == "capture":  # batch normalisation would update its statistics, as the user's own forward does
        model.eval()
    call = CALLS[name]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    call(model)
    lines = lines_of(lambda: call(model))
    before = condition(model)
    chosen = some(lines, 0, ALL if name == "capture" else TIMES)
    for stop in chosen:
        with pytest.raises(Interrupted):
            lines_of(lambda: call(model), stop)
        after = condition(model)
        for what, value in before.items():
            assert after[what] == value, f"{what} after an exception at line {stop}"
    record_property(
        "side effect", f"exceptions in {name}|{len(chosen)}|at random of its {len(lines)} lines, all as before"
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_forward_passes_that_raise(name: str, after: int, record_property: Any) -> None:
    model = network().eval()
    broken_forward(model, after)
    before = condition(model)
    with pytest.raises(Interrupted):
        CALLS[name](model)
    record_property(
        "side effect", f"exceptions in a layer of {name}|1|in one of its first three applications, all as before"
    )
    assert condition(model) == before


@pytest.mark.filterwarnings("ignore::gramscope.errors.ResultWarning")
def test_steps_of_a_monitor_that_raise(record_property: Any) -> None:
    model = network()
    monitor = gs.Monitor(model, (X, Y), F.cross_entropy, measures=["target_linearity"], every=1)
    lines = lines_of(monitor.step)
    before = condition(model)
    for stop in some(lines, 1):
        with pytest.raises(Interrupted):
            lines_of(monitor.step, stop)
        assert condition(model) == before, f"after an exception when line {stop} ran"
    record_property(
        "side effect", f"exceptions in a monitor|{TIMES}|at random of its {len(lines)} lines, all as before"
    )


@pytest.mark.parametrize("solver", ["exact", "recursive"])
def test_steps_of_virtual_covariance_learning_that_raise(solver: str, record_property: Any) -> None:
    model = network().eval()
    optimizer = gs.VCL(model, 0.01, solver=solver)  # type: ignore[arg-type]

    def gradients() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()

    for _ in range(2):
        gradients()
        optimizer.step()
    gradients()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    lines = lines_of(optimizer.step)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(weights[n])
    kept = 0
    for stop in some(lines, 2):
        gradients()
        before = condition(model)
        with pytest.raises(Interrupted):
            lines_of(optimizer.step, stop)
        after = condition(model)
        assert {k: v for k, v in after.items() if k != "values"} == {k: v for k, v in before.items() if k != "values"}
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        kept += after["values"] == before["values"]
        gradients()
        optimizer.step()  # goes on
    assert kept > 0
    what = f"at random of its {len(lines)} lines, weights as before in {kept}, finite in all"
    record_property("side effect", f"exceptions in a step of VCL, {solver}|{TIMES}|{what}")
