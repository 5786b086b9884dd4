"""The wrapper as an optimizer: schedulers, hooks, groups, checkpoints, closures, scalers and every wrapped optimizer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gramscope as gs


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(64, 12), nn.GELU(), nn.Linear(12, 3)
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 1, 4, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, nesterov=True, momentum=0.9, weight_decay=1e-2),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, fused=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3), amsgrad=True),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Muon([m[3].weight, m[5].weight], lr=0.01),
    ],
)
def test_wraps_every_optimizer_and_learns(make) -> None:
    model = net()
    inner = make(model)
    proposals: list[Tensor] = []
    inner.register_step_post_hook(lambda *_: proposals.append(model[3].weight.detach().double()))
    optimizer = gs.GramWhitened(inner, model)
    x, y = batch(0)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        W, proposal = model[3].weight.detach().double(), proposals[-1]
        assert (W.mT @ W - proposal.mT @ proposal).norm() < 2e-6 * (proposal.mT @ proposal).norm()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_is_an_optimizer_with_shared_groups_and_state() -> None:
    model = net()
    inner = sgd(model)
    optimizer = gs.GramWhitened(inner, model)
    assert isinstance(optimizer, torch.optim.Optimizer)

    def shared() -> bool:
        return all(getattr(optimizer, name) is getattr(inner, name) for name in ("param_groups", "state", "defaults"))

    assert shared()
    train(model, optimizer, range(2))
    assert len(inner.state) == 6
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert shared()
    inner.load_state_dict(saved)
    assert shared()
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert "SGD" in repr(optimizer)


def test_checkpoints_continue_bit_for_bit_and_are_the_wrapped_optimizers() -> None:
    model = net()
    optimizer = gs.GramWhitened(sgd(model), model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, range(5))
    scheduler.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(model, optimizer, range(5, 10))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net(1)
    resumed = gs.GramWhitened(sgd(again), again)
    later = lr_scheduler.CosineAnnealingLR(resumed, 10)
    for part, state in zip((again, resumed, later), saved, strict=True):
        part.load_state_dict(state)
    train(again, resumed, range(5, 10))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    sgd(again).load_state_dict(resumed.state_dict())
    assert resumed.state_dict().keys() == {"state", "param_groups"}


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 2),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
        ),
    ],
)
def test_schedulers_set_the_wrapped_optimizers_rate(schedule) -> None:
    model, plain = net(), net()
    optimizer, inner = gs.GramWhitened(sgd(model), model), sgd(plain)
    schedules = schedule(optimizer), schedule(inner)
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        train(plain, inner, range(step, step + 1))
        for scheduler in schedules:
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        for key in ("lr", "momentum"):
            assert optimizer.optimizer.param_groups[0][key] == inner.param_groups[0][key]


def test_step_hooks_of_both() -> None:
    model = net()
    inner = sgd(model)
    optimizer = gs.GramWhitened(inner, model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    inner.register_step_pre_hook(lambda *_: seen.append("inner before"))
    inner.register_step_post_hook(lambda *_: seen.append("inner after"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, range(1))
    assert seen == ["before", "inner before", "inner after", "after"]
    seen.clear()
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["saving", "loaded"]


@pytest.mark.parametrize("through", ["optimizer", "inner"])
def test_added_groups_are_whitened_too(through: str) -> None:
    model = net()
    inner = torch.optim.SGD(model[5].parameters(), lr=0.05)
    optimizer = gs.GramWhitened(inner, model)
    assert "3.weight  12 × 64  whitened" not in optimizer.summary()
    (optimizer if through == "optimizer" else inner).add_param_group({"params": model[3].parameters(), "lr": 0.2})
    assert len(inner.param_groups) == len(optimizer.param_groups) == 2
    train(model, optimizer, range(1))
    assert "3.weight" in optimizer.summary()
    assert [m.name for m in optimizer._choice.matrices] == ["3.weight", "5.weight"]


@pytest.mark.parametrize("kind", [gs.GramWhitened, gs.GramFixed])
def test_closures(kind: type) -> None:
    first, second = net(), net()
    a, b = kind(sgd(first), first), kind(sgd(second), second)
    for step in range(3):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            b.zero_grad()
            loss = F.cross_entropy(second(x), y)
            loss.backward()
            return loss

        loss = b.step(closure)
        assert isinstance(loss, Tensor)
        assert train(first, a, range(step, step + 1)) == [loss.item()]
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_lbfgs_with_many_evaluations_a_step() -> None:
    model = net()
    optimizer = gs.GramWhitened(torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5), model)
    x, y = batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_and_unscales(fused: bool) -> None:
    model, plain = net(), net()
    optimizer = gs.GramWhitened(sgd(model, fused=fused), model)
    other = gs.GramWhitened(sgd(plain), plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batch(0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    F.cross_entropy(plain(x), y).backward()
    other.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    before = [p.detach().clone() for p in model.parameters()]
    model[3].weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_deep_copies_are_independent_and_whole() -> None:
    model = net()
    optimizer = gs.GramWhitened(sgd(model), model)
    lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(2))
    other_model, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 4))
    train(other_model, other, range(2, 4))
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)
    assert other.param_groups is other.optimizer.param_groups is not optimizer.param_groups


def test_a_parallel_model_is_looked_through() -> None:
    model = net()
    optimizer = gs.GramWhitened(sgd(model), nn.DataParallel(model))
    assert "3.weight" in optimizer.summary()
