"""Graph breaks of compiled training steps with our optimizers and a monitor, beside those of plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gramscope as gs

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),  # the compiler's own
]
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "whitened": lambda net: gs.GramWhitened(torch.optim.SGD(net.parameters(), lr=0.1), net),
    "vcl": lambda net: gs.VCL(net, gamma=0.1, solver="recursive"),
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(kind: str, compiled: str | None, monitored: bool = False, inside: bool = False) -> tuple[list[Tensor], int]:
    """The weights after three steps, and the graph breaks.

    Args:
        kind: of optimizer.
        compiled: ``"model"``, ``"step"`` or None.
        monitored: whether there is a monitor.
        inside: whether it is called inside a compiled step.
    """
    counters.clear()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = OPTIMIZERS[kind](net)
    monitor = gs.Monitor(net, (X, Y), every=2) if monitored else None
    model: Any = torch.compile(net, backend="aot_eager") if compiled == "model" else net

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
        if inside and monitor is not None:
            monitor.step()

    run = torch.compile(step, backend="aot_eager") if compiled == "step" else step
    for _ in range(3):
        run()
        if monitor is not None and not inside:
            monitor.step()
    if monitor is not None:
        assert [record["step"] for record in monitor.records] == [0, 2]
    return [parameter.detach() for parameter in net.parameters()], sum(counters["graph_break"].values())


@pytest.mark.parametrize("compiled", ["model", "step"])
def test_no_break_that_sgd_has_not(compiled: str) -> None:
    """Neither a whitened optimizer nor a monitor beside the step adds one, and the weights are those of eager training."""
    _, least = train("sgd", compiled)
    assert least == 0 or compiled == "step"  # backward() and SGD's own step break the graph
    for kind in ("sgd", "whitened"):
        torch.compiler.reset()
        weights, breaks = train(kind, compiled, monitored=True)
        assert breaks <= least
        for a, b in zip(weights, train(kind, None)[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_monitor_inside_a_compiled_step_is_one_break() -> None:
    _, alone = train("sgd", "step")
    torch.compiler.reset()
    assert train("sgd", "step", monitored=True, inside=True)[1] == alone + 1


@pytest.mark.parametrize("compiled", ["model", "step"])
def test_vcl_breaks_at_its_hooks_and_trains_as_it_does_eagerly(compiled: str) -> None:
    weights, breaks = train("vcl", compiled)
    assert 0 < breaks < 8
    for a, b in zip(weights, train("vcl", None)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_compiled_forward_is_measured() -> None:
    """Hooks that come after the compilation do not run in the compiled code; measuring runs the code itself."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    expected = gs.measure(net, (X, Y), measures=["target_linearity"])
    net.eval().forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            net(X)
    assert gs.measure(net, (X, Y), measures=["target_linearity"]).rows == expected.rows
