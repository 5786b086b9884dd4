"""The gradient a step uses: reductions, accumulation, clipping, scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
import reference
from cases import Around
from gramscope.errors import LayerError
from optim.nets import data, mlp, net, same, train


def stepped(model: nn.Module, backward: Callable[[nn.Module], object], lr: float = 0.1, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = gs.VCL(model, gamma=0.1, readout=partial(torch.optim.SGD, lr=lr), **options)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["narrow", "wide", "conv"])
def test_reductions_and_micro_batches_agree(kind: str):
    model, d = net(kind)
    x, y = data(d)

    def loss(m: nn.Module, piece: slice = slice(None), reduction: str = "mean") -> Tensor:
        return F.cross_entropy(m(x[piece]), y[piece], reduction=reduction)

    first = stepped(model, lambda m: loss(m, reduction="sum").backward(), 0.0, reduction="sum")
    halves = (slice(0, 5), slice(5, 10))
    for other in (
        stepped(model, lambda m: loss(m).backward(), 0.0),
        stepped(model, lambda m: (0.25 * loss(m)).backward(), 0.0, reduction=40.0),
        stepped(model, lambda m: (0.5 * loss(m)).backward(), 0.0, reduction=lambda n: 2 * n),
        stepped(model, lambda m: [loss(m, half).backward() for half in halves], 0.0),
    ):
        same(first, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["narrow", "wide", "conv"])
def test_clipping_by_norm_scales_the_loss(kind: str):
    model, d = net(kind)
    x, y = data(d)
    norms = []

    def clipped(m: nn.Module) -> None:
        F.cross_entropy(m(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.05)))

    first = stepped(model, clipped)
    assert min(norms) > 0.05
    scaled = stepped(model, lambda m: (F.cross_entropy(m(x), y) * 0.05 / (norms.pop(0) + 1e-6)).backward())
    same(scaled, first, atol=1e-9, rtol=0)


def test_micro_batches_of_different_sizes_are_an_error():
    model, (x, y) = mlp(7, 5, 3), data()
    optimizer = gs.VCL(model)
    for piece in (slice(0, 3), slice(3, 9)):
        F.cross_entropy(model(x[piece]), y[piece]).backward()
    with pytest.raises(LayerError, match=r"different sizes \(factors \[3.0, 6.0\]\).*reduction='sum'"):
        optimizer.step()


@pytest.mark.parametrize("change", ["clip", "penalty"])
def test_changed_gradients_are_taken_as_they_are(change: str):
    """Element-wise clipping and penalties on the weights: D is .grad, though it has more than the batch's directions."""
    model, d = net("narrow")
    x, y = data(d, 3)  # fewer samples than outputs
    optimizer = gs.VCL(model, reduction="sum", gamma=1e-3)
    W = model[0].weight.detach().clone()
    loss = F.cross_entropy(model(x), y, reduction="sum")
    (loss + 0.5 * model[0].weight.square().sum() if change == "penalty" else loss).backward()
    if change == "clip":
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    D = model[0].weight.grad.clone()
    optimizer.step()
    V, identity = torch.zeros(d, d).double(), torch.eye(d).double()
    expected, _ = reference.vcl_step(W, V, identity, D.mT, 1e-3, 0.1, second_order=False)
    moved = (expected - W).norm()
    assert (model[0].weight - expected).norm() < 2e-2 * moved  # what the second order adds


def test_grad_scaler_unscales_and_skips():
    model = mlp(30, 4, 3, dtype=torch.float32)
    x, y = data(30, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    plain, scaled = copy.deepcopy(model), copy.deepcopy(model)
    train(plain, gs.VCL(plain, gamma=0.1), x, y, 3)
    optimizer = gs.VCL(scaled, gamma=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(scaled(x), y)
        if step == 1:
            loss = loss * float("inf")  # skipped by the scaler; nothing of it may stay behind
        before = copy.deepcopy(scaled.state_dict())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert all(torch.equal(before[k], v) for k, v in scaled.state_dict().items())
    same(scaled, plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_stale_gradients_are_dropped_with_the_model_s_own_zero_grad(set_to_none: bool):
    model = mlp(30, 4, 3)
    x, y = data(30)
    mirror = copy.deepcopy(model)
    optimizer, clean = (gs.VCL(m, gamma=0.1) for m in (model, mirror))
    F.cross_entropy(model(3 * x[:4]), y[:4]).backward()
    model.zero_grad(set_to_none)
    z = model(x)
    torch.autograd.grad(z.sum(), model[0].weight, retain_graph=True)  # not an accumulation either
    F.cross_entropy(z, y).backward()
    optimizer.step()
    train(mirror, clean, x, y)
    same(model, mirror)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_samples_add_few_directions(dtype: torch.dtype):
    model = mlp(400, 10, 3, bias=False, dtype=dtype)
    optimizer = gs.VCL(model, gamma=0.05, rank=200)
    train(model, optimizer, *data(400, 8, seed=0, dtype=dtype))
    assert optimizer.state[model[0].weight]["basis"].shape[0] == 18  # ten rows of W, eight samples


def test_a_weight_that_a_function_uses_is_trained_as_that_of_a_layer():
    def called(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.a(x)))

    class Used(nn.Module):
        def __init__(self, a: nn.Linear, head: nn.Linear) -> None:
            super().__init__()
            self.a, self.head = a, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(F.linear(x, self.a.weight, self.a.bias)))

    twin = Around(called, a=nn.Linear(7, 5), head=nn.Linear(5, 3)).double()
    model = Used(copy.deepcopy(twin.a), copy.deepcopy(twin.head))
    x, y = data()
    for either in (model, twin):
        optimizer = gs.VCL(either, gamma=0.1)
        for _ in range(3):
            train(either, optimizer, x, y)
    same(model, twin)


def test_missing_gradients_and_captures_are_errors():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(torch.einsum("ni,oi->no", x, self.a.weight)))

    x, y = data()
    model = Unused().double()
    with pytest.raises(LayerError, match=r"b\.weight has no gradient"):
        train(model, gs.VCL(model, layers=["b"]), x, y)
    with pytest.raises(LayerError, match=r"a\.weight has a gradient but was not seen"):
        train(model, gs.VCL(model, layers=["a"]), x, y)
    body = mlp(7, 5, 3)
    optimizer = gs.VCL(body)
    loss = F.cross_entropy(body[2](body[1](body[0](x))), y)
    with pytest.raises(LayerError, match="call the model itself"):
        loss.backward()
    optimizer.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_expert_without_tokens_keeps_its_weights_and_state(set_to_none: bool) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        first, second = m.used  # even and odd rows
        z = torch.stack([m.experts[first](x[::2]), m.experts[second](x[1::2])], 1).flatten(0, 1)
        return m.head(torch.tanh(z))

    model = Around(run, experts=nn.ModuleList([nn.Linear(7, 5) for _ in range(3)]), head=nn.Linear(5, 3))
    optimizer, (x, y) = gs.VCL(model, gamma=0.1), data()
    before = model.experts[2].weight.clone()
    for used in ((0, 1), (1, 2), (0, 2)):
        model.used = used
        optimizer.zero_grad(set_to_none)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if used == (0, 1):
            assert torch.equal(model.experts[2].weight, before)
            assert model.experts[2].weight not in optimizer.state
    assert [optimizer.state[expert.weight]["steps"] for expert in model.experts] == [2, 2, 2]
    assert not torch.equal(model.experts[2].weight, before)


def test_a_layer_that_is_unfrozen_later_is_an_error():
    model = mlp(7, 5, 5, 3)
    model[2].requires_grad_(False)
    optimizer = gs.VCL(model)
    x, y = data()
    train(model, optimizer, x, y)
    model[2].requires_grad_(True)
    with pytest.raises(LayerError, match=r"2\.weight has a gradient and was frozen"):
        train(model, optimizer, x, y)
