"""gs.VCL as an optimizer: against the NumPy Algorithm 1, and in every kind of training loop."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramscope as gs
import reference
from gramscope.errors import InputError, LayerError, NumericalError, RescueWarning
from gramscope.optim.vcl import matrix_trainer

AdamW = partial(torch.optim.AdamW, lr=1e-2)


def mlp(*sizes: int, seed: int = 0, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        layers: list[nn.Module] = []
        for into, out in pairwise(sizes):
            layers += [nn.Linear(into, out, bias=bias, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def data(d: int = 7, n: int = 10, classes: int = 3, seed: int = 1, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=dtype), torch.randint(classes, (n,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


@pytest.fixture(autouse=True)
def light_steps_in_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers take full steps only; here they stand for large ones."""
    monkeypatch.setattr(matrix_trainer, "_FULL_ONLY", 0)


# --- what a step computes ---------------------------------------------------------------------------------------------


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
        each = partial(F.cross_entropy, reduction="none")
        delta = torch.cat([g.flatten(0, 1) for g in reference.preactivation_gradients(mirror, mirror[0], x, y, each)])
        W, V = reference.vcl_step(mirror[0].weight.detach(), V, x, delta, 0.3, 0.1)
        others = [mirror[0].bias, mirror[2].weight, mirror[2].bias]
        grads = torch.autograd.grad(F.cross_entropy(mirror(x), y, reduction=reduction), others)
        with torch.no_grad():
            for p, grad in zip(others, grads, strict=True):
                p -= 0.1 * grad
            mirror[0].weight.copy_(W)
        same(model, mirror, atol=1e-8, rtol=0)


class Tokens(nn.Module):
    """A small attention block with token-wise layers."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        sizes = {"kdim": 6, "vdim": 6} if separate else {}
        self.inner = nn.Linear(8, 8)
        self.side = nn.Linear(8, 6) if separate else nn.Identity()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x.reshape(x.shape[0], -1, 8)))
        side = self.side(h)
        return self.head(self.attention(h, side, side)[0].mean(1))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.a(x))))))


def net(kind: str) -> tuple[nn.Module, int]:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model: nn.Module
        if kind == "conv":
            model = nn.Sequential(
                nn.Unflatten(1, (2, 6, 6)),
                nn.Conv2d(2, 4, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(4, 6, 2, groups=2, bias=False),
                nn.Flatten(),
                nn.Linear(24, 3),
            )
            return model.double(), 72
        if kind in ("tokens", "separate"):
            return Tokens(kind == "separate").double(), 24
        if kind == "twice":
            return Twice().double(), 8
        sizes = {"deep": (5, *[9] * 6, 3), "wide": (4, 12, 3), "square": (6, 6, 3), "narrow": (30, 4, 3), "one": (8, 3)}
        return mlp(*sizes[kind]), sizes[kind][0]


KINDS = ["conv", "tokens", "separate", "twice", "deep", "wide", "narrow", "one"]


@pytest.mark.parametrize("kind", KINDS)
def test_untruncated_recursion_is_the_exact_solver(kind: str):
    (model, d), (mirror, _) = net(kind), net(kind)
    common = {"gamma": 0.05, "alpha": 0.3, "floor": 0.01}
    optimizers = (
        gs.VCL(model, solver="recursive", rank=1000, refresh=1, **common),
        gs.VCL(mirror, solver="exact", **common),
    )
    for step in range(4):
        x, y = data(d, seed=step)
        for net_, optimizer in zip((model, mirror), optimizers, strict=True):
            train(net_, optimizer, x, y, 1)
    same(model, mirror, atol=1e-6, rtol=0)
    moved = [n["moved"] for n in optimizers[0].diagnostics().values()]
    assert all(torch.tensor(m).min() > 1e-4 for m in moved)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_step_matches_the_reference_in_patch_space(kind: str):
    model, d = net(kind)
    x, y = data(d)
    optimizer = gs.VCL(model, gamma=0.05, alpha=0.3, floor=0.01, solver="exact")
    with gs.capture(model, reduction="mean") as tape:
        F.cross_entropy(model(x), y).backward()
    before = {unit.weight.name: (unit.weight, unit.weight.read().clone()) for unit in optimizer.units}
    if kind != "one":
        before.pop(tape.order[-1], None)
    optimizer.step()
    for name, (target, W) in before.items():
        records = [tape[layer.name] for layer in target.layers]
        groups = range(W.shape[0]) if W.dim() == 3 else [...]
        for g in groups:
            h, delta = (torch.cat([getattr(r, which)[g].flatten(-3, -2) for r in records]) for which in ("h", "delta"))
            V = torch.zeros(h.shape[1], h.shape[1], dtype=torch.float64)
            expected, _ = reference.vcl_step(W[g], V, h, delta, 0.05, 0.3, floor=0.01)
            torch.testing.assert_close(target.read()[g], expected, atol=1e-8, rtol=0, msg=name)


def test_default_solver_follows_exact_closely():
    """Light steps and float32 together, over 80 steps."""
    model, mirror = (mlp(60, 10, 3, dtype=torch.float32) for _ in range(2))
    optimizers = [gs.VCL(m, gamma=0.02, solver=s) for m, s in ((model, "recursive"), (mirror, "exact"))]
    start = mirror[0].weight.detach().clone()
    kinds = []
    for step in range(80):
        x, y = data(60, 8, seed=step % 9, dtype=torch.float32)
        for m, optimizer in zip((model, mirror), optimizers, strict=True):
            train(m, optimizer, x, y, 1)
        kinds.append(optimizers[0].state[model[0].weight]["since"])
    assert max(kinds) == 31, "light steps were taken up to the refresh"
    assert (model[0].weight - mirror[0].weight).norm() < 2e-3 * (mirror[0].weight - start).norm()


def test_truncation_costs_little_where_inputs_have_few_directions():
    mixing = torch.randn(12, 400, generator=torch.Generator().manual_seed(5))
    model, mirror = (mlp(400, 10, 3, dtype=torch.float32) for _ in range(2))
    optimizers = [gs.VCL(m, gamma=1e-3, solver=s) for m, s in ((model, "recursive"), (mirror, "exact"))]
    assert optimizers[0].units[0].rank == 26
    start = mirror[0].weight.detach().clone()
    for step in range(20):
        x, y = data(12, 8, seed=step, dtype=torch.float32)
        x = x @ mixing
        for m, optimizer in zip((model, mirror), optimizers, strict=True):
            train(m, optimizer, x, y, 1)
    assert (model[0].weight - mirror[0].weight).norm() < 0.01 * (mirror[0].weight - start).norm()


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
                train(model, optimizer, *data(20, seed=step), 1)
            largest = model[0].weight.detach().norm()
        except NumericalError:
            largest = torch.tensor(float("inf"))
        assert (largest < 1e3) == bounded


# --- reductions, accumulation, clipping, scaling ----------------------------------------------------------------------


def stepped(loss: Callable[[nn.Module, gs.VCL], None], model: nn.Module, **options: object) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = gs.VCL(model, gamma=0.1, refresh=1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, optimizer)
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["narrow", "wide", "conv"])
def test_reductions_agree(kind: str):
    model, d = net(kind)
    x, y = data(d)
    readout = partial(torch.optim.SGD, lr=0.0)

    def backward(reduction: str, scale: float = 1.0) -> Callable[[nn.Module, gs.VCL], None]:
        return lambda m, _: (scale * F.cross_entropy(m(x), y, reduction=reduction)).backward()

    results = [
        stepped(backward("sum"), model, reduction="sum", readout=readout),
        stepped(backward("mean"), model, reduction="mean", readout=readout),
        stepped(backward("mean", 0.25), model, reduction=40.0, readout=readout),
        stepped(backward("mean", 0.5), model, reduction=lambda n: 2 * n, readout=readout),
    ]
    for other in results[1:]:
        same(results[0], other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["narrow", "wide", "conv"])
def test_unequal_micro_batches_are_one_batch(kind: str):
    model, d = net(kind)
    x, y = data(d)
    readout = partial(torch.optim.SGD, lr=0.0)

    def parts(m: nn.Module, _: gs.VCL) -> None:
        for piece in (slice(0, 3), slice(3, 9), slice(9, 10)):
            F.cross_entropy(m(x[piece]), y[piece]).backward()

    whole = stepped(lambda m, _: F.cross_entropy(m(x), y).backward(), model, readout=readout)
    same(stepped(parts, model, readout=readout), whole, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["narrow", "wide", "conv"])
def test_clipping_by_norm_scales_the_loss(kind: str):
    model, d = net(kind)
    x, y = data(d)
    norms = []

    def clipped(m: nn.Module, _: gs.VCL) -> None:
        F.cross_entropy(m(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.05)))

    def scaled(m: nn.Module, _: gs.VCL) -> None:
        (F.cross_entropy(m(x), y) * 0.05 / (norms.pop(0) + 1e-6)).backward()

    first = stepped(clipped, model)
    assert min(norms) > 0.05
    same(stepped(scaled, model), first, atol=1e-9, rtol=0)


@pytest.mark.parametrize("change", ["clip", "penalty"])
def test_changed_gradients_are_taken_as_they_are(change: str):
    """Element-wise clipping and penalties on the weights: D is .grad, whatever the inputs say."""
    model, d = net("narrow")
    x, y = data(d)
    options = {"second_order": False, "reduction": "sum", "gamma": 0.1, "refresh": 1}
    optimizer = gs.VCL(model, **options)
    W = model[0].weight.detach().clone()
    loss = F.cross_entropy(model(x), y, reduction="sum")
    (loss + 0.5 * model[0].weight.square().sum() if change == "penalty" else loss).backward()
    if change == "clip":
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    D = model[0].weight.grad.clone()
    optimizer.step()
    expected, _ = reference.vcl_step(
        W, torch.zeros(d, d).double(), torch.eye(d).double(), D.mT, 0.1, 0.1, second_order=False
    )
    torch.testing.assert_close(model[0].weight.detach(), expected, atol=1e-7, rtol=0)


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
    train(mirror, clean, x, y, 1)
    same(model, mirror)


# --- training loops ---------------------------------------------------------------------------------------------------


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


def test_it_learns_features():
    """A product of two of twenty inputs: random features with a trained readout stay near chance."""
    x, _ = data(20, 1200, dtype=torch.float32)
    y = (x[:, 0] * x[:, 1] > 0).long()
    scores = []
    for learning in (True, False):
        model = mlp(20, 32, 2, dtype=torch.float32)
        optimizer = gs.VCL(model, gamma=0.3, alpha=0.3, readout=AdamW) if learning else AdamW(model[2].parameters())
        for start in [*range(0, 1000, 20)] * 2:
            train(model, optimizer, x[start : start + 20], y[start : start + 20], 1)
        scores.append((model(x[1000:]).argmax(1) == y[1000:]).float().mean())
    assert scores[0] > 0.85
    assert scores[1] < 0.7


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_autocast(solver: str):
    x, y = data(30, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        model = mlp(30, 4, 3, dtype=torch.float32)
        optimizer = gs.VCL(model, gamma=0.05, solver=solver)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
        results.append(model[0].weight.detach())
    assert results[1].dtype == torch.float32
    assert 0 < (results[0] - results[1]).norm() < 0.1 * results[0].norm()


def test_half_precision_parameters_keep_a_precise_state():
    model = mlp(30, 4, 3, dtype=torch.bfloat16)
    x, y = data(30, dtype=torch.bfloat16)
    optimizer = gs.VCL(model, gamma=0.05)
    train(model, optimizer, x, y, 3)
    state = optimizer.state[model[0].weight]
    assert state["basis"].dtype == torch.float32
    kept = state["weights"].float() @ state["basis"][:4]
    torch.testing.assert_close(model[0].weight.float(), kept, atol=0, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str):
    x, y = data(30, dtype=torch.float32)
    model = mlp(30, 4, 3, dtype=torch.float32)
    mirror = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    optimizer, eager = gs.VCL(compiled, gamma=0.05), gs.VCL(mirror, gamma=0.05)
    train(compiled, optimizer, x, y, 3)
    train(mirror, eager, x, y, 3)
    same(model, mirror, atol=1e-5, rtol=0)


def test_a_model_that_ran_compiled_before_is_refused():
    torch.compiler.reset()  # what other models left behind can make torch compile anew, with the hooks
    x, y = data(30, dtype=torch.float32)
    model = mlp(30, 4, 3, dtype=torch.float32)
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    optimizer = gs.VCL(compiled, gamma=0.05)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(LayerError, match="torch.compile"):
        train(compiled, optimizer, x, y, 1)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = mlp(30, 4, 5), mlp(5, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


def test_checkpointed_activations():
    x, y = data(30)
    x.requires_grad_()
    for layers in (["body.*"], None):
        results = [Checkpointed(reentrant) for reentrant in (None, False, True)]
        for model in results:
            train(model, gs.VCL(model, gamma=0.05, layers=layers), x, y, 2)
        for other in results[1:]:
            same(results[0], other, atol=1e-9, rtol=0)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "exact"},
        {"anchor": "initial", "second_order": False, "momentum": 0.9, "orthogonalise": True, "aim": 0.5, "floor": 0.05},
    ],
)
@pytest.mark.parametrize("kind", ["narrow", "tokens"])
def test_continuation_is_bit_identical(kind: str, options: dict[str, object]):
    def make() -> tuple[nn.Module, gs.VCL, int]:
        model, d = net(kind)
        model = model.float()
        return model, gs.VCL(model, gamma=0.02, readout=AdamW, **options), d

    model, optimizer, d = make()
    batches = [data(d, seed=step, dtype=torch.float32) for step in range(50)]
    for x, y in batches[:44]:
        train(model, optimizer, x, y, 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for x, y in batches[44:]:
        train(model, optimizer, x, y, 1)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    again, other, _ = make()
    other.load_state_dict(stored["optimizer"])
    again.load_state_dict(stored["model"])
    for x, y in batches[44:]:
        train(again, other, x, y, 1)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    if not options:
        parameter = model[0].weight if kind == "narrow" else model.inner.weight
        assert optimizer.state[parameter]["since"] > 0, "some steps were light"


def test_state_of_other_layers_is_refused():
    model = mlp(5, 6, 6, 3)
    stored = gs.VCL(model, layers=["0"]).state_dict()
    with pytest.raises(InputError, match="'0'"):
        gs.VCL(model).load_state_dict(stored)


def test_weights_changed_from_outside_are_taken_up():
    model, d = net("narrow")
    mirror = copy.deepcopy(model)
    optimizers = [
        gs.VCL(m, gamma=0.1, solver=s, rank=30 if s == "recursive" else None)
        for m, s in ((model, "recursive"), (mirror, "exact"))
    ]
    for step in range(6):
        if step == 3:
            with torch.no_grad():
                change = torch.randn(4, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
                model[0].weight.add_(0.1 * change)
                mirror[0].weight.add_(0.1 * change)
        x, y = data(d, seed=step)
        for m, optimizer in zip((model, mirror), optimizers, strict=True):
            train(m, optimizer, x, y, 1)
    same(model, mirror, atol=1e-6, rtol=0)


def test_non_finite_gradients_change_nothing():
    for where in (0, 2):
        model = mlp(30, 4, 3)
        x, y = data(30)
        optimizer = gs.VCL(model, gamma=0.1, readout=AdamW)
        train(model, optimizer, x, y, 2)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[where].weight.grad[0, 0] = float("nan")
        with pytest.raises(NumericalError, match=r"VCL layer '0'" if where == 0 else r"2\.weight"):
            optimizer.step()
        assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
        now = optimizer.state_dict()["state"]
        for key, values in state["state"].items():
            for name, value in values.items():
                assert torch.equal(value, now[key][name]) if isinstance(value, Tensor) else value == now[key][name]
        train(model, optimizer, x, y, 1)


# --- which layers -----------------------------------------------------------------------------------------------------


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.one(h) + self.two(h).sin()


def test_the_last_layer_executed_is_the_readout():
    model = Reversed().double()
    x, y = data()
    optimizer = gs.VCL(model, readout=AdamW)
    assert "unless the first forward" in optimizer.summary()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, x, y, 2)
    scheduler.step()
    assert [unit.weight.name for unit in optimizer.units] == ["body"]
    assert "exp_avg" in optimizer.state[model.head.weight]
    assert "basis" in optimizer.state[model.body.weight]
    assert "unless" not in optimizer.summary()
    stored = copy.deepcopy(optimizer.state_dict())
    again = Reversed().double()
    again.load_state_dict(model.state_dict())
    other = gs.VCL(again, readout=AdamW)
    other.load_state_dict(stored)
    train(model, optimizer, x, y, 2)
    train(again, other, x, y, 2)
    same(model, again, atol=0, rtol=0)


def test_ambiguous_readouts_ask_for_layers():
    model = Heads().double()
    x, y = data()
    with pytest.raises(LayerError, match="layers="):
        train(model, gs.VCL(model), x, y, 1)
    train(model, gs.VCL(model, layers="body"), x, y, 1)


def test_layers_that_cannot_be_trained():
    model = mlp(7, 5, 5, 3)
    model[2].weight.requires_grad_(False)
    with pytest.raises(LayerError, match="frozen"):
        gs.VCL(model, layers=["2"])
    optimizer = gs.VCL(model)
    assert "nothing (frozen)" in optimizer.summary()
    train(model, optimizer, *data(), 1)
    attention, _ = net("tokens")
    with pytest.raises(LayerError, match="all three"):
        gs.VCL(attention, layers=["attention.q_proj"])
    tied = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 4))
    tied[3].weight = tied[0].weight
    with pytest.raises(LayerError, match="shares its weight"):
        gs.VCL(tied, layers=["3"])
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(LayerError, match="lazy"):
        gs.VCL(lazy, layers=["0"])


def test_missing_gradients_and_captures_are_errors():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(F.linear(x, self.a.weight)))

    x, y = data()
    model = Unused().double()
    with pytest.raises(LayerError, match=r"'b' has no gradient"):
        train(model, gs.VCL(model, layers=["b"]), x, y, 1)
    with pytest.raises(LayerError, match=r"'a' has a gradient but was not seen"):
        train(model, gs.VCL(model, layers=["a"]), x, y, 1)
    body = mlp(7, 5, 3)
    optimizer = gs.VCL(body)
    loss = F.cross_entropy(body[2](body[1](body[0](x))), y)
    with pytest.raises(LayerError, match="call the model itself"):
        loss.backward()
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gamma": -1.0}, "gamma"),
        ({"alpha": 0.0}, "alpha"),
        ({"solver": "fast"}, "solver"),
        ({"anchor": "last"}, "anchor"),
        ({"gamma": float("inf")}, "gamma"),
        ({"alpha": "a"}, "alpha"),
        ({"refresh": 0}, "refresh"),
        ({"refresh": 1.5}, "refresh"),
        ({"rank": 9.5}, "rank"),
        ({"precision": torch.float16}, "precision"),
        ({"aim": float("nan")}, "aim"),
        ({"reduction": None}, "reduction"),
        ({"readout": "sgd"}, "readout"),
        ({"readout": torch.optim.LBFGS}, "LBFGS"),
        ({"rank": 3}, "at least 5"),
        ({"reduction": "none"}, "reduction"),
        ({"reduction": -2.0}, "reduction"),
        ({"momentum": 0.9}, "second_order=False"),
        ({"momentum": 1.0, "second_order": False}, "momentum"),
        ({"readout": lambda params: params}, "readout"),
        ({"readout": lambda params: torch.optim.SGD(params[:1], lr=0.1)}, "readout"),
        ({"layers": "nothing"}, "nothing"),
    ],
)
def test_bad_arguments_name_themselves(options: dict[str, object], words: str):
    with pytest.raises((InputError, LayerError), match=words):
        gs.VCL(mlp(7, 5, 3), **options)


def test_groups_cannot_be_added():
    with pytest.raises(InputError, match="layers="):
        gs.VCL(mlp(7, 5, 3)).add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_cut_off_eigenvalues_are_announced_once():
    model = mlp(6, 6, 3)
    x, y = data(6)
    optimizer = gs.VCL(model, gamma=0.3, cutoff=0.2)
    with pytest.warns(RescueWarning, match=r"'0'.*cutoff"):
        train(model, optimizer, x, y, 1)
    train(model, optimizer, x, y, 3)


def test_summary_and_diagnostics():
    model = mlp(30, 4, 3)
    optimizer = gs.VCL(model, gamma=0.1)
    assert optimizer.diagnostics() == {}
    before = model[0].weight.detach().clone()
    train(model, optimizer, *data(30), 1)
    numbers = optimizer.diagnostics()["0"]
    assert numbers["rank"] == 4
    assert numbers["most_negative"] < 0 < numbers["largest"]
    assert numbers["moved"] == pytest.approx(float((model[0].weight.detach() - before).norm()))
    lines = optimizer.summary().splitlines()
    assert lines[1].split() == ["0.weight", "4", "×", "30", "VCL", "recursive,", "rank", "30"]
    assert lines[3].split()[-2:] == ["SGD", "(readout)"]
    grouped, d = net("conv")
    optimizer = gs.VCL(grouped, gamma=0.1)
    train(grouped, optimizer, *data(d), 1)
    assert len(optimizer.diagnostics()["3"]["moved"]) == 2


def test_logistic_regression_is_one_vcl_layer():
    """With the part of the step that leaves the Gram unchanged (aim); without it the outputs keep their first rotation."""
    model = mlp(6, 3, bias=False)
    optimizer = gs.VCL(model, gamma=0.1, alpha=0.3, aim=1.0)
    assert optimizer.readout is None
    x, _ = data(6, 400)
    y = x[:, :3].argmax(1)
    for start in [*range(0, 400, 10)] * 2:
        train(model, optimizer, x[start : start + 10], y[start : start + 10], 1)
    assert (model(x).argmax(1) == y).double().mean() > 0.93
    with pytest.raises(InputError, match="nothing to warm up"):
        optimizer.warm_up([(x, y)], F.cross_entropy)


def test_warm_up_trains_the_last_layer_only():
    model = mlp(7, 5, 5, 3)
    x, y = data()
    before = copy.deepcopy(model.state_dict())
    optimizer = gs.VCL(model, readout=partial(torch.optim.SGD, lr=0.5))
    losses = optimizer.warm_up([(x[:5], y[:5]), {"input": x[5:], "labels": y[5:]}], F.cross_entropy, epochs=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"4.weight", "4.bias"}
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("basis" in state for state in optimizer.state.values())
    train(model, optimizer, x, y, 1)


def test_hooks_leave_with_the_optimizer():
    model = mlp(7, 5, 3)

    def hooks() -> int:
        own = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return own + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    optimizer = gs.VCL(model)
    assert hooks() > 0
    optimizer.close()
    assert hooks() == 0
    optimizer = gs.VCL(model)
    twin = copy.deepcopy(model)
    x, y = data()
    F.cross_entropy(twin(x), y).backward()
    with pytest.raises(LayerError, match="first"):
        optimizer.step()
    del optimizer
    gc.collect()
    assert hooks() == 0


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


def test_small_layers_take_full_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = mlp(20, 8, 3)
    optimizer = gs.VCL(model, gamma=0.02)
    x, y = data(20, 12)
    train(model, optimizer, x, y, 40)
    assert optimizer.state[model[0].weight]["since"] == 0


@pytest.mark.parametrize(("d", "rank"), [(60, None), (600, None), (600, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_batch_again_and_again_does_not_spoil_the_basis(d: int, rank: int | None, dtype: torch.dtype) -> None:
    """Its rows lie in the basis already: what is left of them is rounding, which is no direction."""
    x, y = data(d, 12)
    exact, model = mlp(d, 8, 3), mlp(d, 8, 3).to(dtype)
    train(exact, gs.VCL(exact, gamma=0.02, solver="exact"), x, y, 25)
    optimizer = gs.VCL(model, gamma=0.02, rank=rank)
    train(model, optimizer, x.to(dtype), y, 25)
    basis = optimizer.state[model[0].weight]["basis"]
    eps = torch.finfo(dtype).eps
    assert (basis @ basis.mT - torch.eye(len(basis), dtype=dtype)).abs().max() < 200 * eps
    assert (model[0].weight.double() - exact[0].weight).norm() < 200 * eps * exact[0].weight.norm()


def test_the_preset_learns_and_its_parts_can_be_overridden() -> None:
    model = mlp(20, 16, 3)
    optimizer = gs.VCL.best(model, 0.05)
    x, y = data(20, 30)
    before = float(F.cross_entropy(model(x), y).detach())
    train(model, optimizer, x, y, 40)
    assert float(F.cross_entropy(model(x), y).detach()) < 0.5 * before
    assert isinstance(optimizer.readout, torch.optim.AdamW)
    assert optimizer.units[0].weight.bias is not None
    assert gs.VCL.best(mlp(20, 16, 3), bias=False, alpha=0.3).units[0].rules.spectrum.alpha == 0.3
