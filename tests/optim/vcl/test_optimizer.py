"""gs.VCL against Algorithm 1 in NumPy, its options, and training with it."""

from __future__ import annotations

import copy
from functools import partial
from operator import eq
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gramscope as gs
import reference
from gramscope.errors import InputError, LayerError, NumericalError
from optim.nets import KINDS, AdamW, data, deltas, mlp, net, same, train, train_both

pytestmark = pytest.mark.usefixtures("light_steps")


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
    common = {"gamma": 0.05, "alpha": 0.3, "floor": 0.01}
    optimizers = (
        gs.VCL(model, rank=1000, refresh=1, **common, solver="recursive"),
        gs.VCL(mirror, solver="exact", **common),
    )
    observed = net(kind)[0]
    with gs.capture(observed, reduction="mean") as tape:
        F.cross_entropy(observed(x), y).backward()
    before = {unit.weight.name: unit.weight.read().clone() for unit in optimizers[1].units}
    train_both((model, mirror), optimizers, [(x, y)])
    for unit in optimizers[1].units:
        W, matrix = before.get(unit.weight.name), unit.weight
        if W is None:  # taken for the last layer until the first step
            continue
        records = [tape[layer.name] for layer in matrix.layers]
        for g in range(W.shape[0]) if W.dim() == 3 else [...]:
            h, delta = (torch.cat([getattr(r, which)[g].flatten(-3, -2) for r in records]) for which in ("h", "delta"))
            V = torch.zeros(h.shape[1], h.shape[1], dtype=torch.float64)
            expected, _ = reference.vcl_step(W[g], V, h, delta, 0.05, 0.3, floor=0.01)
            torch.testing.assert_close(matrix.read()[g], expected, atol=1e-8, rtol=0, msg=matrix.name)
    train_both((model, mirror), optimizers, [data(d, seed=step) for step in range(2, 5)])
    same(model, mirror, atol=1e-6, rtol=0)
    moved = [numbers["moved"] for numbers in optimizers[0].diagnostics().values()]
    assert all(torch.tensor(m).min() > 1e-4 for m in moved)


def test_light_steps_and_truncation_stay_close_to_the_exact_solver():
    """Float32 and light steps over 80 steps, with inputs of 12 directions among 60 (nothing truncated) or 400."""
    for d, gamma, steps, tolerance in ((60, 0.02, 80, 2e-3), (400, 1e-3, 40, 0.01)):
        mixing = torch.randn(12 if d == 400 else d, d, generator=torch.Generator().manual_seed(5)) / d**0.5
        models = [mlp(d, 10, 3, dtype=torch.float32) for _ in range(2)]
        optimizers = [gs.VCL(m, gamma=gamma, solver=s) for m, s in zip(models, ("recursive", "exact"), strict=True)]
        start = models[0][0].weight.detach().clone()
        light = 0
        for step in range(steps):
            x, y = data(len(mixing), 8, seed=step % 9, dtype=torch.float32)
            train_both(models, optimizers, [(x @ mixing, y)])
            light = max(light, optimizers[0].state[models[0][0].weight]["since"])
        assert light >= 7
        W, expected = (model[0].weight.detach() for model in models)
        assert (W - expected).norm() < tolerance * (expected - start).norm()


def test_bias_inside_the_gram_is_a_constant_input():
    model, mirror = mlp(7, 5, 3), mlp(8, 5, 3)
    with torch.no_grad():
        mirror[0].weight.copy_(torch.cat([model[0].weight, model[0].bias[:, None]], 1))
        mirror[0].bias.zero_()
        mirror[2].load_state_dict(model[2].state_dict())
    mirror[0].bias.requires_grad_(False)
    x, y = data()
    for solver in ("exact", "recursive"):
        a, b = copy.deepcopy(model), copy.deepcopy(mirror)
        train(a, gs.VCL(a, gamma=0.1, bias=True, solver=solver), x, y, 4)
        train(b, gs.VCL(b, gamma=0.1, solver=solver), torch.cat([x, torch.ones(10, 1).double()], 1), y, 4)
        torch.testing.assert_close(a[0].weight, b[0].weight[:, :7], atol=1e-6, rtol=0)
        torch.testing.assert_close(a[0].bias, b[0].weight[:, 7], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"orthogonalise": True}, {"momentum": 0.9, "orthogonalise": True}]
)
def test_averaged_and_orthogonalised_shifts(options: dict[str, object]):
    model = mlp(12, 6, 3)
    x, y = data(12)
    optimizer = gs.VCL(model, gamma=0.05, second_order=False, solver="exact", **options)
    W, mean = model[0].weight.detach().clone(), torch.zeros(6, 12, dtype=torch.float64)
    V = torch.zeros(12, 12, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        D = 10 * model[0].weight.grad
        if "momentum" in options:
            mean = 0.9 * mean + 0.1 * D
            D = 0.9 * mean + 0.1 * D
        if "orthogonalise" in options:
            U, s, Vh = torch.linalg.svd(D, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            D = U @ torch.diag(s) @ Vh
        W, V = reference.vcl_step(W, V, torch.eye(12).double(), D.mT, 0.05, 0.1, second_order=False)
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), W, atol=1e-8, rtol=0)


@pytest.mark.filterwarnings("ignore::gramscope.errors.RescueWarning")
def test_half_power_is_bounded_in_its_stable_form():
    for options, bounded in (({"anchor": "initial", "second_order": False}, True), ({}, False)):
        model = mlp(20, 8, 3)
        optimizer = gs.VCL(model, gamma=1.0, alpha=0.5, solver="exact", **options)
        try:
            for step in range(60):
                train(model, optimizer, *data(20, seed=step))
            largest = model[0].weight.detach().norm()
        except NumericalError:
            largest = torch.tensor(float("inf"))
        assert (largest < 1e3) == bounded


def test_closures_hooks_and_schedulers():
    model = mlp(7, 5, 3)
    x, y = data()
    optimizer = gs.VCL(model, gamma=0.4, readout=AdamW, solver="recursive")
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


@pytest.mark.parametrize(
    "options", [{}, {"gamma": 0.1, "readout": AdamW, "solver": "recursive"}], ids=["averaged", "recursive"]
)
@pytest.mark.parametrize("where", [0, 2])
def test_non_finite_gradients_change_nothing(where: int, options: dict[str, Any]):
    model = mlp(30, 4, 3)
    x, y = data(30)
    optimizer = gs.VCL(model, **options)
    train(model, optimizer, x, y, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[where].weight.grad[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"VCL layer '0'" if where == 0 else r"2\.weight"):
        optimizer.step()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            same_value = torch.equal if isinstance(value, Tensor) else eq
            assert same_value(value, now["state"][key][name]), name
    train(model, optimizer, x, y)


def test_an_empty_batch_moves_as_a_zero_gradient():
    model, mirror = mlp(40, 6, 3, bias=False), mlp(40, 6, 3, bias=False)
    optimizers = [gs.VCL(m, gamma=0.1, reduction="sum", solver="recursive") for m in (model, mirror)]
    x, y = data(40, 8, seed=0)
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
    (0 * F.cross_entropy(mirror(x), y)).backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model[0].weight, mirror[0].weight)


def test_summary_and_diagnostics():
    model = mlp(30, 4, 3)
    optimizer = gs.VCL(model, gamma=0.1, solver="recursive")
    assert optimizer.diagnostics() == {}
    train(model, optimizer, *data(30))
    numbers = optimizer.diagnostics()["0"]
    assert numbers["rank"] == 4
    lines = optimizer.summary().splitlines()
    assert lines[1].split() == ["0.weight", "4", "×", "30", "VCL", "recursive,", "rank", "30"]
    assert lines[3].split()[-2:] == ["SGD", "(readout)"]
    grouped, d = net("conv")
    optimizer = gs.VCL(grouped, gamma=0.1, solver="recursive")
    train(grouped, optimizer, *data(d))
    assert len(optimizer.diagnostics()["3"]["moved"]) == 2


BAD = [
    ("gamma", -1.0), ("gamma", float("inf")), ("alpha", 0.0), ("alpha", 1.5), ("alpha", "a"), ("solver", "fast"),
    ("anchor", "last"), ("refresh", 0), ("refresh", 1.5), ("rank", 9.5), ("rank", 3), ("precision", torch.float16),
    ("aim", float("nan")), ("floor", -1.0), ("floor", "a"), ("cutoff", 1.0), ("cutoff", "a"), ("momentum", 1.0),
    ("momentum", "a"), ("reduction", None), ("reduction", "none"), ("reduction", -2.0), ("readout", "sgd"),
    ("readout", torch.optim.LBFGS), ("readout", lambda params: params), ("layers", "nothing"), ("layers", 3),
    ("readout", lambda params: torch.optim.SGD(params[:1], lr=0.1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_arguments_name_themselves(name: str, value: object):
    options = {"second_order": False} if name == "momentum" else {}
    with pytest.raises((InputError, LayerError), match=name if value != "nothing" else "nothing"):
        gs.VCL(mlp(7, 5, 3), **{"solver": "recursive", name: value}, **options)


def test_arguments_that_do_not_go_together():
    with pytest.raises(InputError, match="second_order=False"):
        gs.VCL(mlp(7, 5, 3), momentum=0.9, solver="recursive")
    optimizer = gs.VCL(mlp(7, 5, 3), solver="recursive")
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
    optimizer = gs.VCL(model, gamma=0.1, readout=readout, solver="recursive")
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


@pytest.mark.parametrize("solver", ["averaged", "recursive", "exact"])
def test_steps_too_large_for_the_weights_change_nothing(solver: str):
    dtype = torch.float32 if solver == "averaged" else torch.float16
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = mlp(7, 5, 3, dtype=dtype)
    optimizer = gs.VCL(model, gamma=1e150 if solver == "averaged" else 1e30, alpha=0.5, solver=solver, readout=sgd)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(data(dtype=dtype)[0]), data()[1]).backward()
    with pytest.raises(NumericalError, match="'0'.*weights and state are as before this step"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not any(optimizer.state.values())


def test_a_gamma_without_a_square_and_float16_under_adamw_are_refused():
    for solver in ("averaged", "recursive"):
        with pytest.raises(InputError, match="gamma=1e[+]300"):
            gs.VCL(mlp(7, 5, 3), gamma=1e300, solver=solver)
    with pytest.raises(InputError, match="AdamW gives NaN with float16 weights"):
        gs.VCL(mlp(7, 5, 3, dtype=torch.float16))
