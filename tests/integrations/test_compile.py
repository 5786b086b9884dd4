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
    "fixed": lambda net: gs.GramFixed(torch.optim.SGD(net.parameters(), lr=0.1), net),
    "free muon": gs.FreeMuon,
    "vcl": lambda net: gs.VCL(net, gamma=0.1),
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
        compiled: ``"model"``, ``"passes"`` (forward and backward), ``"step"`` or None.
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

    @torch.compile(backend="aot_eager")  # type: ignore[untyped-decorator]
    def passes() -> None:
        nn.functional.cross_entropy(model(X), Y).backward()

    def step() -> None:
        optimizer.zero_grad()
        if compiled == "passes":
            passes()
        else:
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


@pytest.mark.parametrize("compiled", ["model", "passes", "step"])
def test_no_break_and_no_graph_that_sgd_has_not(compiled: str) -> None:
    """Neither our optimizers nor a monitor beside the step adds one, and the weights are those of eager training.

    FreeMuon alone compiles the pass once more, as soon as there is an average.
    """
    _, least = train("sgd", compiled)
    graphs = counters["stats"]["unique_graphs"]
    assert least == 0 or compiled != "model"  # backward() and SGD's own step break the graph
    for kind in ("sgd", "whitened", "fixed", "free muon"):
        torch.compiler.reset()
        weights, breaks = train(kind, compiled, monitored=True)
        again = int(kind == "free muon")
        assert breaks <= least + again
        assert 0 < counters["stats"]["unique_graphs"] <= graphs + again
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


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="torch versions break graphs at other places")
@pytest.mark.parametrize(
    ("compiled", "counts"),
    [
        ("model", [(0, 1), (0, 1), (0, 1), (0, 2), (1, 3)]),
        ("passes", [(1, 1), (1, 1), (1, 1), (2, 2), (2, 4)]),
        ("step", [(4, 2), (5, 2), (4, 1), (5, 2), (5, 4)]),
    ],
)
def test_breaks_and_graphs(compiled: str, counts: list[tuple[int, int]]) -> None:
    found = []
    for kind in ("sgd", "monitored", "whitened", "free muon", "vcl"):
        torch.compiler.reset()
        monitored = kind == "monitored"
        _, breaks = train("sgd" if monitored else kind, compiled, monitored, monitored and compiled == "step")
        found.append((breaks, counters["stats"]["unique_graphs"]))
    assert found == counts


def test_a_compiled_forward_is_measured() -> None:
    """Hooks that come after the compilation do not run in the compiled code; measuring runs the code itself."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    expected = gs.measure(net, (X, Y), measures=["target_linearity"])
    net.eval().forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            net(X)
    assert gs.measure(net, (X, Y), measures=["target_linearity"]).rows == expected.rows


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_model_in_training_is_exported_as_without_us(kind: str, steps: int, strict: bool) -> None:
    """``torch.export`` sees no hook of an optimizer or a monitor, before the first step and after."""
    if strict and kind == "vcl":
        pytest.skip("the compiler, which strict=True uses, cannot put its hooks into one graph")
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    alone = torch.export.export(net, (X,), strict=strict)
    optimizer = OPTIMIZERS[kind](net)
    monitor = gs.Monitor(net, (X, Y), every=1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
        monitor.step()
    exported = torch.export.export(net, (X,), strict=strict)
    assert [node.target for node in exported.graph.nodes] == [node.target for node in alone.graph.nodes]
    with torch.no_grad():  # in a pass of training FreeMuon takes other weights
        assert torch.equal(exported.module()(X), net(X))
