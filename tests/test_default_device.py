"""Tensors are made where the data are: neither torch's default device nor its default type changes a result."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs

SOURCE = Path(gs.__file__).parent
#: functions of torch that make a tensor
MAKERS = frozenset({
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
})  # fmt: skip


def careless_calls(path: Path) -> Iterator[str]:
    """Calls that make a tensor without saying on which device and of which type."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        made = node.func if isinstance(node, ast.Call) else None
        if not isinstance(made, ast.Attribute) or not isinstance(made.value, ast.Name) or made.value.id != "torch":
            continue
        assert isinstance(node, ast.Call)
        named = {keyword.arg for keyword in node.keywords}
        needed = {"device"} if made.attr == "Generator" else {"device", "dtype"} if made.attr in MAKERS else set()
        if None not in named and not needed <= named:
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_new_tensor_names_its_device_and_type() -> None:
    assert [call for path in sorted(SOURCE.rglob("*.py")) for call in careless_calls(path)] == []


X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
LOSS = nn.CrossEntropyLoss()
Case = tuple[nn.Module, Tensor]


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(7, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.cell, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.cell(h)[0][:, -1])  # type: ignore[no-any-return]


def perceptron() -> Case:
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)), X


def images() -> Case:
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers), X.reshape(24, 1, 2, 3)


def sequences() -> Case:
    return Sequences(), (3 * X.abs()).long().clamp(max=6)


def everything(model: nn.Module, x: Tensor, **options: Any) -> dict[str, Any]:
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    return gs.measure(model, (x, Y), LOSS, measures="all", reference=reference, **options).to_dict()


def trained(model: nn.Module, x: Tensor, rule: torch.optim.Optimizer) -> list[Tensor]:
    for _ in range(3):
        rule.zero_grad()
        LOSS(model(x), Y.to(x.device)).backward()
        rule.step()
    return [p.detach() for p in model.parameters()]


CALLS: dict[str, tuple[Callable[[], Case], Callable[[nn.Module, Tensor], Any]]] = {
    "measure": (perceptron, everything),
    "measure, estimated": (perceptron, partial(everything, memory=4096)),
    "measure, images": (images, everything),
    "measure, sequences": (sequences, everything),
    "monitor": (perceptron, lambda net, x: list(gs.Monitor(net, (x, Y), LOSS).records)),
    "agop": (perceptron, lambda net, x: gs.agop(net, x)),
    "agop, sketched": (
        images,
        lambda net, x: gs.agop(net, x, sketch=2, generator=torch.Generator(device="cpu").manual_seed(0)),
    ),
    "dual kernel": (perceptron, gs.dual_tangent_kernel),
    "estimate": (perceptron, lambda net, x: str(gs.estimate(net, LOSS))),
    "cka": (perceptron, lambda net, x: gs.cka(net, x).values),
    "neural collapse": (perceptron, lambda net, x: gs.neural_collapse(x, Y.to(x.device)).nc1),
    "regions": (perceptron, lambda net, x: gs.region_crossings(net, x[:4], points=9).per_segment),
    "interpolation": (perceptron, lambda net, x: gs.interpolation_error(net, x, x[:, :3]).error),
    "egop": (perceptron, lambda net, x: gs.egop(lambda rows: rows.square().sum(1), x)),
    "held out": (
        perceptron,
        lambda net, x: float(
            gs.held_out_target_linearity(gs.fit_linear(x[:16], Y[:16].to(x.device)), x[16:], Y[16:].to(x.device))
        ),
    ),
    "vcl": (perceptron, lambda net, x: trained(net, x, gs.VCL(net, gamma=0.1, solver="recursive"))),
    "free muon": (perceptron, lambda net, x: trained(net, x, gs.FreeMuon(net))),
    "whitened": (
        perceptron,
        lambda net, x: trained(net, x, gs.GramWhitened(torch.optim.SGD(net.parameters(), lr=0.1), net)),
    ),
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # with device and dtype
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (found != found and expected != expected)


@pytest.mark.filterwarnings("ignore::gramscope.errors.GramscopeWarning")
@pytest.mark.parametrize("name", CALLS)
def test_torchs_defaults_change_nothing(name: str) -> None:
    make, call = CALLS[name]
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model, x = make()
    twin = copy.deepcopy(model)
    expected = call(model, x)
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        found = call(twin, x)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert_same(found, expected)
