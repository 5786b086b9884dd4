"""gs.VCL against Algorithm 1 in NumPy, its options, and training with it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gramscope as gs
import reference
from gramscope.errors import InputError, LayerError, NumericalError, RescueWarning, ResultWarning
from optim.nets import KINDS, AdamW, data, deltas, mlp, net, same, train, train_both


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_twenty_steps_are_algorithm_1_on_per_sample_gradients(reduction: str):
    model = mlp(9, 6, 3)
    optimizer = gs.VCL(model, gamma=0.3, solver="exact", reduction=reduction)
    mirror = copy.deepcopy(model)
    V = torch.zeros(9, 9, dtype=torch.float64)
    for step in range(20):
        x, y = data(9, 8, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        W, V = reference.vcl_step(mirror[0].weight.detach(), V, x, deltas(mirror, mirror[0], x, y), 0.3, 0.1)
        others = [mirror[0].bias, mirror[2].weight, mirror[2].bias]
        grads = torch.autograd.grad(F.cross_entropy(mirror(x), y, reduction=reduction), others)
        with torch.no_grad():
            for p, grad in zip(others, grads, strict=True):
                p -= 0.1 * grad
            mirror[0].weight.copy_(W)
        same(model, mirror, atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_both_solvers_match_the_reference_in_patch_space(kind: str):
    """One step against Algorithm 1 on captured inputs, then the solvers against each other."""
    (model, d), (mirror, _) = net(kind), net(kind)
    x, y = data(d)
    optimizers = gs.VCL(model, 0.05, 0.3, rank=1000), gs.VCL(mirror, 0.05, 0.3, solver="exact")
    observed = net(kind)[0]
    with gs.capture(observed, reduction="mean") as tape:
        F.cross_entropy(observed(x), y).backward()
    before = {matrix.name: matrix.read().clone() for matrix in optimizers[1].matrices}
    train_both((model, mirror), optimizers, [(x, y)])
    for matrix in optimizers[1].matrices:
        W, records = before[matrix.name], [tape[layer.name] for layer in matrix.layers]
        for g in range(W.shape[0]) if W.dim() == 3 else [...]:
            h, delta = (torch.cat([getattr(r, which)[g].flatten(-3, -2) for r in records]) for which in ("h", "delta"))
            V = torch.zeros(h.shape[1], h.shape[1], dtype=torch.float64)
            expected, _ = reference.vcl_step(W[g], V, h, delta, 0.05, 0.3)
            torch.testing.assert_close(matrix.read()[g], expected, atol=1e-8, rtol=0, msg=matrix.name)
    train_both((model, mirror), optimizers, [data(d, seed=step) for step in range(2, 5)])
    same(model, mirror, atol=1e-6, rtol=0)
    moved = [numbers["moved"] for numbers in optimizers[0].diagnostics().values()]
    assert all(torch.tensor(m).min() > 1e-4 for m in moved)


@pytest.mark.parametrize(("d", "k", "gamma", "steps"), [(400, 10, 1e-3, 40), (400, 130, 1e-3, 44)])
def test_truncation_stays_close_to_the_exact_solver(d: int, k: int, gamma: float, steps: int):
    mixing = torch.randn(12, d, generator=torch.Generator().manual_seed(5)) / 20
    models = [mlp(d, k, 3, dtype=torch.float32) for _ in range(2)]
    optimizers = [gs.VCL(models[0], gamma), gs.VCL(models[1], gamma, solver="exact")]
    start = models[0][0].weight.detach().clone()
    for step in range(steps):
        x, y = data(12, 8, seed=step % 9, dtype=torch.float32)
        train_both(models, optimizers, [(x @ mixing, y)])
    state = optimizers[0].state[models[0][0].weight]
    assert state["basis"].shape == (k + 16, d)
    W, expected = (model[0].weight.detach() for model in models)
    assert (W - expected).norm() < 0.01 * (expected - start).norm()


@pytest.mark.parametrize(("d", "rank"), [(60, None), (600, None), (600, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_batch_again_and_again_does_not_spoil_the_basis(d: int, rank: int | None, dtype: torch.dtype) -> None:
    """Its rows lie in the basis already; what is left of them is rounding, which is no direction."""
    x, y = data(d, 12)
    exact, model = mlp(d, 8, 3), mlp(d, 8, 3).to(dtype)
    train(exact, gs.VCL(exact, gamma=0.02, solver="exact"), x, y, 25)
    optimizer = gs.VCL(model, gamma=0.02, rank=rank)
    train(model, optimizer, x.to(dtype), y, 25)
    basis = optimizer.state[model[0].weight]["basis"]
    eps = torch.finfo(dtype).eps
    assert (basis @ basis.mT - torch.eye(len(basis), dtype=dtype)).abs().max() < 200 * eps
    assert (model[0].weight.double() - exact[0].weight).norm() < 200 * eps * exact[0].weight.norm()


@pytest.mark.parametrize(
    ("dtype", "factor", "tolerance"),
    [(torch.float64, 1.5, 1e-6), (torch.float32, 1 - 1e-5, 1e-4), (torch.bfloat16, 0.7, 0.05), (torch.float16, 1.05, 0.05)],
)  # fmt: skip
def test_weights_changed_from_outside_are_noticed(dtype: torch.dtype, factor: float, tolerance: float):
    """As by the exact solver, which keeps no weights of its own; in float64 through ``.data``, which no version counts."""
    models = [mlp(20, 12, 4).to(dtype) for _ in range(2)]
    optimizers = [gs.VCL(m, 1e-3, 0.5, solver=s) for m, s in zip(models, ("recursive", "exact"), strict=True)]
    for seed in range(8):
        if seed >= 3:
            with torch.no_grad():
                for model in models:
                    weight = model[0].weight.data if dtype == torch.float64 else model[0].weight
                    weight[:6].mul_(factor)
        train_both(models, optimizers, [data(20, 16, 4, seed)])
    W, expected = (model[0].weight.detach().double() for model in models)
    assert (W - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_lost_rank_and_weights_that_cannot_leave_zero_are_announced_once(solver: str):
    for zero, kind, words in ((True, ResultWarning, "are zero and stay so"), (False, RescueWarning, "loses rank")):
        model = mlp(6, 6, 3)
        with torch.no_grad():
            model[0].weight.zero_() if zero else model[0].weight[:3].copy_(model[0].weight[3:] * (1 + 1e-14))
        x, y = data(6)
        optimizer = gs.VCL(model, gamma=0.3 if zero else 1e-12, solver=solver)
        with pytest.warns(kind, match=rf"0\.weight.*{words}"):
            train(model, optimizer, x, y, 1 if zero else 4)
        train(model, optimizer, x, y, 2)


class Head(nn.Module):
    """The layer executed last is registered first, and its embedding may be tied to it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.head, self.embedding = nn.Linear(8, 11, bias=False), nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embedding(x)
        return self.head(h + self.down(torch.tanh(self.up(h)))).flatten(0, 1)  # type: ignore[no-any-return]


def test_the_head_is_registered_last_or_tied_else_layers_are_to_be_named() -> None:
    x = torch.arange(24).reshape(4, 6) % 11
    optimizer = gs.VCL(Head(tied=True), reduction=24.0)
    assert [matrix.name for matrix in optimizer.matrices] == ["up.weight", "down.weight"]
    train(optimizer.model, optimizer, x, x.flatten())
    optimizer = gs.VCL(Head(tied=False), reduction=24.0)
    with pytest.raises(LayerError, match=r"'down', registered last.*'head' ran last.*layers="):
        train(optimizer.model, optimizer, x, x.flatten())
    optimizer = gs.VCL(Head(tied=False), reduction=24.0, layers=["up", "down"])
    train(optimizer.model, optimizer, x, x.flatten())


@pytest.mark.parametrize("computed", [False, True])
def test_warm_up_trains_the_last_layer_only(computed: bool):
    model = mlp(7, 5, 5, 3)
    if computed:
        weight_norm(model[4])
    x, y = data()
    before = copy.deepcopy(model.state_dict())
    optimizer = gs.VCL(model, readout=partial(torch.optim.SGD, lr=0.5))
    losses = optimizer.warm_up([(x[:5], y[:5]), {"input": x[5:], "labels": y[5:]}], F.cross_entropy, epochs=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("4.")}
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("basis" in state for state in optimizer.state.values())
    train(model, optimizer, x, y)
    model[4].requires_grad_(False)
    with pytest.raises(InputError, match="the last layer, '4', is frozen"):
        optimizer.warm_up([(x, y)], F.cross_entropy)


def test_a_single_layer_has_nothing_to_warm_up():
    optimizer = gs.VCL(mlp(7, 3, bias=False))
    assert optimizer.readout is None
    with pytest.raises(InputError, match="nothing to warm up"):
        optimizer.warm_up([data()], F.cross_entropy)


def test_closures_hooks_and_schedulers():
    model = mlp(7, 5, 3)
    x, y = data()
    optimizer = gs.VCL(model, gamma=0.4, readout=AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 1e-2]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(2):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    assert calls == ["before", "after"] * 2
    assert losses[1] != losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.5e-2])
    assert optimizer.readout.param_groups[0]["lr"] == pytest.approx(0.5e-2)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1]["lr"] = 0.0
    W = model[2].weight.detach().clone()
    optimizer.step(closure)
    torch.testing.assert_close(model[2].weight.detach(), W, atol=1e-6, rtol=0)


@pytest.mark.parametrize("where", [0, 2])
def test_non_finite_gradients_change_nothing(where: int):
    model = mlp(30, 4, 3)
    x, y = data(30)
    optimizer = gs.VCL(model, gamma=0.1, readout=AdamW)
    train(model, optimizer, x, y, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[where].weight.grad[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=rf"{where}\.weight has NaN"):
        optimizer.step()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    train(model, optimizer, x, y)


def test_an_empty_batch_moves_as_a_zero_gradient():
    model, mirror = mlp(40, 6, 3, bias=False), mlp(40, 6, 3, bias=False)
    optimizers = [gs.VCL(m, gamma=0.1, reduction="sum") for m in (model, mirror)]
    x, y = data(40, 8, seed=0)
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
    (0 * F.cross_entropy(mirror(x), y)).backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model[0].weight, mirror[0].weight)


def test_summary_and_diagnostics():
    model = mlp(300, 4, 3)
    optimizer = gs.VCL(model, gamma=0.1)
    assert optimizer.diagnostics() == {}
    train(model, optimizer, *data(300))
    assert optimizer.diagnostics()["0.weight"]["rank"] == 4
    lines = optimizer.summary().splitlines()
    assert lines[1].split() == ["0.weight", "4", "×", "300", "VCL", "recursive,", "rank", "20"]
    assert lines[2].split() == ["2.weight", "SGD:", "the", "readout"]
    grouped, d = net("conv")
    optimizer = gs.VCL(grouped, gamma=0.1)
    train(grouped, optimizer, *data(d))
    assert len(optimizer.diagnostics()["3.weight"]["moved"]) == 2


BAD = [
    ("gamma", -1.0), ("gamma", float("inf")), ("gamma", 1e300), ("alpha", 0.0), ("alpha", 1.5), ("alpha", "a"),
    ("solver", "fast"), ("solver", "averaged"), ("rank", 9.5), ("rank", 3), ("reduction", None), ("reduction", "none"),
    ("reduction", -2.0), ("readout", "sgd"), ("readout", torch.optim.LBFGS), ("readout", lambda params: params),
    ("readout", lambda params: torch.optim.SGD(params[:1], lr=0.1)), ("layers", "nothing"), ("layers", 3), ("lr", 0.1),
    ("weight_decay", 0.1), ("gama", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_arguments_name_themselves(name: str, value: object):
    with pytest.raises((InputError, LayerError), match=name if value != "nothing" else "nothing"):
        gs.VCL(mlp(7, 5, 3), **{name: value})


def test_groups_and_scheduled_gammas_are_checked():
    optimizer = gs.VCL(mlp(7, 5, 3))
    with pytest.raises(InputError, match="layers="):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(InputError, match="gamma=nan"):
        train(optimizer.model, optimizer, *data())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_cuda_agrees_with_the_cpu(solver: str):
    x, y = data(60, 12)
    results = []
    for device in ("cpu", "cuda"):
        model = mlp(60, 8, 3).to(device)
        optimizer = gs.VCL(model, gamma=0.02, solver=solver)
        train(model, optimizer, x.to(device), y.to(device), 50)
        results.append(model[0].weight.detach().cpu())
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("readout", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW, None])
def test_one_cycle(readout: Any) -> None:
    model, (x, y) = mlp(7, 6, 3), data()
    optimizer = gs.VCL(model, gamma=0.1, readout=readout)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.4, 0.02], total_steps=8)
    rates = []
    for step in range(6):
        train(model, optimizer, x, y)
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gamma, rate = map(list, zip(*rates, strict=True))
    assert max(gamma) > 0.3
    assert max(rate) == pytest.approx(max(gamma) / 20)
    group = optimizer.readout.param_groups[0]
    assert 0.85 <= (group["betas"][0] if "betas" in group else group["momentum"]) < 0.95


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_steps_too_large_for_the_weights_change_nothing(solver: str):
    model = mlp(7, 5, 3, dtype=torch.float16)
    optimizer = gs.VCL(model, gamma=1e30, alpha=0.5, solver=solver)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(data(dtype=torch.float16)[0]), data()[1]).backward()
    with pytest.raises(NumericalError, match=r"0\.weight.*weights and state are as before this step"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not any(optimizer.state.values())
