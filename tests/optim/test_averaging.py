"""Between steps a model has the averaged weights x, and gradients are taken at the trained ones z."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramscope as gs
from gramscope.errors import InputError, ResultWarning
from optim.nets import data, mlp, same, train

X, Y = data(9)


def trained(steps: int = 12, sizes: tuple[int, ...] = (9, 6, 3), **options: Any) -> tuple[nn.Sequential, gs.FreeMuon]:
    model = mlp(*sizes, **options)
    optimizer = gs.FreeMuon(model)
    train(model, optimizer, X.to(next(model.parameters()).dtype), Y, steps)
    return model, optimizer


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(p, q, atol=1e-14, rtol=0) for p, q in zip(a, b, strict=True))


def newest(model: nn.Module, optimizer: gs.FreeMuon) -> list[Tensor]:
    """z of a model at rest."""
    return [p.detach() + optimizer.state[p]["lead"] for p in model.parameters()]


def test_only_a_forward_pass_in_training_mode_with_gradients_leaves_the_average():
    model, optimizer = trained()
    x, z = weights(model), newest(model, optimizer)
    assert not close(x, z)
    optimizer.zero_grad()
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    model.eval()
    model(X).sum().backward()
    assert close(weights(model), x)
    model.train()
    model(X)
    assert close(weights(model), z)
    model.eval()  # evaluation before the step, as in the middle of an accumulation, sees z
    model(X)
    assert close(weights(model), z)


def test_hooks_that_were_there_before_see_the_weights_of_the_pass():
    model, seen = mlp(9, 6, 3), []
    model.register_forward_pre_hook(lambda model, _: seen.append(weights(model)))
    optimizer = gs.FreeMuon(model)
    train(model, optimizer, X, Y, 12)
    z = newest(model, optimizer)
    model(X)
    assert close(seen[-1], z)


def test_several_passes_before_a_step_share_one_point():
    whole, parts = mlp(9, 6, 3), mlp(9, 6, 3)
    optimizers = [gs.FreeMuon(model) for model in (whole, parts)]
    for _ in range(5):
        for rows, model, optimizer in (
            ([slice(None)], whole, optimizers[0]),
            ([slice(0, 5), slice(5, 10)], parts, optimizers[1]),
        ):
            optimizer.zero_grad()
            for own in rows:
                (F.cross_entropy(model(X[own]), Y[own]) / len(rows)).backward()
            optimizer.step()
    same(whole, parts, atol=1e-12, rtol=0)


def test_parts_of_a_model_that_are_called_themselves():
    """A LightningModule calls ``self.net``."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(9, 6, 3)

    outer, alone = Module(), mlp(9, 6, 3)
    optimizers = gs.FreeMuon(outer), gs.FreeMuon(alone)
    for _ in range(4):
        for net, optimizer in ((outer.net, optimizers[0]), (alone, optimizers[1])):
            train(net, optimizer, X, Y)
    same(outer, alone, atol=0, rtol=0)


@pytest.mark.parametrize("part", [None, 0])
def test_state_dicts_have_the_average_at_any_time(part: int | None):
    model, optimizer = trained()
    before = [t.clone() for t in model.state_dict().values()]
    state = copy.deepcopy(optimizer.state_dict())
    model(X)
    assert close(list(model.state_dict().values()), before)
    assert close(list(model[0].state_dict().values()), before[:2])
    again = mlp(9, 6, 3)
    again.load_state_dict(model.state_dict())
    resumed = gs.FreeMuon(again)
    resumed.load_state_dict(optimizer.state_dict())
    assert str(optimizer.state_dict()) == str(state)
    train(model, optimizer, X, Y, 3)
    train(again, resumed, X, Y, 3)
    same(model, again, atol=1e-12, rtol=0)


def test_changes_between_steps_change_both():
    model, optimizer = trained()
    other = mlp(9, 6, 3)
    leads = [optimizer.state[p]["lead"].clone() for p in model.parameters()]
    model.load_state_dict(other.state_dict())
    assert close(weights(model), weights(other))
    model(X)
    assert close(weights(model), [p + lead for p, lead in zip(weights(other), leads, strict=True)])
    model.load_state_dict(other.state_dict())  # also where the model was at z
    assert close(weights(model), weights(other))
    with torch.no_grad():
        model[0].weight.zero_()
    train(model, optimizer, X, Y)


def test_weights_loaded_before_the_first_step_start_anew():
    start = mlp(9, 6, 3)
    with torch.no_grad():
        for p in start.parameters():
            p.mul_(2)
    model = mlp(9, 6, 3)
    optimizer = gs.FreeMuon(model)
    model(X)
    model.load_state_dict(start.state_dict())
    other = gs.FreeMuon(start)
    train(model, optimizer, X, Y, 3)
    train(start, other, X, Y, 3)
    same(model, start, atol=0, rtol=0)


def test_copies_have_no_hooks_and_pairs_are_independent():
    model, optimizer = trained()
    model(X)
    z = weights(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        copied.load_state_dict(copied.state_dict())
        copied(X).sum().backward()
        assert close(weights(copied), z)
    pair, second = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (pair, second)):
        o.zero_grad()
        F.cross_entropy(m(X), Y).backward()
        o.step()
        train(m, o, X, Y, 2)
    same(model, pair, atol=0, rtol=0)
    with pytest.raises(InputError, match="cannot be pickled"):
        torch.save(optimizer, file)


def test_an_optimizer_that_is_gone_leaves_the_average_and_no_hook():
    model, optimizer = trained()
    x = weights(model)
    model(X)
    del optimizer
    gc.collect()
    assert close(weights(model), x)
    assert not any(m._forward_pre_hooks or m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())


def test_moves_are_seen_by_autograd():
    """A pending graph of the weights x cannot go on with those of z unnoticed."""
    model, _ = trained(sizes=(9, 6, 6, 3))
    model.eval()
    loss = model(X).sum()
    model.train()
    model(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant: bool):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(9, 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=reentrant)

    model, plain = Checkpointed(), mlp(9, 6, 3)
    train(model, gs.FreeMuon(model), X, Y, 4)
    train(plain, gs.FreeMuon(plain), X, Y, 4)
    same(model, plain, atol=1e-14, rtol=0)


def test_two_networks_that_train_against_each_other():
    """The discriminator of a GAN has several passes, and one for the generator, before its next step."""
    one, two = mlp(4, 5, 9), mlp(9, 6, 1)
    optimizers = gs.FreeMuon(one), gs.FreeMuon(two)
    noise, true = (
        torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.ones(10, 1).double(),
    )
    for _ in range(4):
        optimizers[1].zero_grad()
        fake = one(noise)
        (F.softplus(two(fake.detach())) + F.softplus(-two(X))).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.binary_cross_entropy_with_logits(two(fake), true).backward()
        optimizers[0].step()
    assert all(p.isfinite().all() for net in (one, two) for p in net.parameters())


@pytest.mark.parametrize("target_first", [False, True])
def test_a_target_network_that_follows_the_average(target_first: bool):
    """As in BYOL: the target's passes, and the model's own in eval mode, are between the pass of training and its backward."""
    views = X, X.roll(1, 0)
    model, plain = mlp(9, 6, 6, 3), mlp(9, 6, 6, 3)
    target = copy.deepcopy(model)
    optimizers = gs.FreeMuon(model), gs.FreeMuon(plain)
    followed = copy.deepcopy(target)
    for _ in range(5):
        optimizers[0].zero_grad()
        aims, outputs = [], []
        for step in ("target", "online") if target_first else ("online", "target"):
            if step == "online":
                outputs = [model(view) for view in views]
            else:
                here = weights(model)
                target.eval()
                model.eval()
                with torch.no_grad():
                    aims = [target(view) for view in reversed(views)]
                    model(X)
                model.train()
                assert close(weights(model), here)
        sum(F.mse_loss(output, aim) for output, aim in zip(outputs, aims, strict=True)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        sum(
            F.mse_loss(plain(view), followed(other).detach()) for view, other in zip(views, views[::-1], strict=True)
        ).backward()
        optimizers[1].step()
        with torch.no_grad():
            for slow, online in ((target, model), (followed, plain)):
                for p, q in zip(slow.parameters(), online.parameters(), strict=True):
                    p.lerp_(q, 0.1)
    same(model, plain, atol=1e-14, rtol=0)
    same(target, followed, atol=1e-14, rtol=0)
    assert not close(weights(target), weights(mlp(9, 6, 6, 3)))


def test_a_step_skipped_by_a_scaler_comes_back_to_the_average():
    model, optimizer = trained(dtype=torch.float32)
    plain, other = trained(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for bad in (False, True, False):
        for unscale in (False, True):
            optimizer.zero_grad()
            x = weights(model)
            scaler.scale((1e38 if bad else 1.0) * F.cross_entropy(model(X.float()), Y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if bad:
                for p, q in zip(model.parameters(), x, strict=True):
                    torch.testing.assert_close(p.detach(), q, atol=1e-6, rtol=0)
            else:
                train(plain, other, X.float(), Y)
    same(model, plain, atol=1e-5, rtol=0)


def test_gradients_without_the_models_forward_are_taken_at_the_average():
    model, optimizer = trained()
    x = weights(model)
    F.cross_entropy(model[2](F.gelu(F.linear(X, model[0].weight))), Y)  # a part that is called moves all
    assert not close(weights(model), x)
    optimizer._averaging.rest()
    optimizer.zero_grad()
    F.linear(X, model[0].weight).square().sum().backward()
    with pytest.warns(ResultWarning, match="gradients were taken at the averaged weights"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_digits_of_float32(dtype: torch.dtype):
    """The same 300 gradients give the same weights, whose rounding alone differs."""
    half = mlp(9, 6, 3, dtype=dtype)
    exact = copy.deepcopy(half).float()
    optimizers = gs.FreeMuon(half), gs.FreeMuon(exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        half(X.to(dtype)), exact(X.float())
        for p, q in zip(half.parameters(), exact.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(half.parameters(), exact.parameters(), strict=True):
        assert torch.equal(p, q.to(dtype)) or float((p.float() - q).detach().abs().max()) < 1e-2
        torch.testing.assert_close(p.detach() + optimizers[0].state[p]["remainder"], q.detach(), atol=2e-3, rtol=0)


class Own(nn.Module):
    """A model whose class is not one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(9, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_an_exported_program_holds_the_average() -> None:
    model = mlp(9, 6, 3)
    optimizer = gs.FreeMuon(model)
    for _ in range(3):
        train(model, optimizer, X, Y)
    before = copy.deepcopy(model.state_dict())
    found = torch.export.export(model.train(), (X,)).module()(X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(found, model.eval()(X))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("make", [lambda: mlp(9, 6, 3), Own])
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_compiled_models_have_one_graph_and_no_recompilation_after_the_second_step(
    make: Callable[[], nn.Module], way: str
):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    plain, model = make(), make()
    counter = CompileCounterWithBackend("aot_eager")
    optimizers = gs.FreeMuon(plain), gs.FreeMuon(model)
    called = model
    if way == "wrapped":
        called = torch.compile(model, backend=counter, fullgraph=True)
    else:
        model.compile(backend=counter, fullgraph=True)
    counts = []
    for _ in range(6):
        train(plain, optimizers[0], X, Y)
        train(called, optimizers[1], X, Y)
        called.eval()
        with torch.no_grad():
            torch.testing.assert_close(called(X), plain.eval()(X), atol=1e-10, rtol=0)
        called.train()
        plain.train()
        counts.append(counter.frame_count)
    torch.compiler.reset()
    same(plain, model, atol=1e-10, rtol=0)
    assert counts[1] == counts[-1]
