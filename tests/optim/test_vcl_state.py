"""gs.VCL: copies and foreign states, diagnostics against dense matrices, layers that have lost rank."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
import reference
from gramscope.errors import InputError


def make(*sizes: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        for into, out in pairwise(sizes):
            layers += [nn.Linear(into, out, bias=False, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batch(d: int, seed: int, dtype: torch.dtype = torch.float64, n: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=dtype), torch.randint(3, (n,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# --- copies and states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"solver": "exact", "anchor": "initial"}])
def test_a_copy_of_model_and_optimizer_goes_on_alike_and_alone(options: dict[str, object]):
    model = make(20, 6, 5, 3, dtype=torch.float32)
    optimizer = gs.VCL(model, gamma=0.05, readout=partial(torch.optim.AdamW, lr=1e-2), **options)
    for seed in range(36):
        step(model, optimizer, *batch(20, seed, torch.float32))
    twin, other = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    for seed in range(36, 40):
        step(twin, other, *batch(20, seed, torch.float32))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for seed in range(36, 40):
        step(model, optimizer, *batch(20, seed, torch.float32))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_pickling_points_to_the_state():
    with pytest.raises(InputError, match="state_dict"):
        pickle.dumps(gs.VCL(make(5, 4, 3)))


def test_states_of_another_form_are_refused():
    def stored(*sizes: int, **options: object) -> dict[str, object]:
        model = make(*sizes)
        optimizer = gs.VCL(model, gamma=0.05, **options)
        step(model, optimizer, *batch(sizes[0], 0))
        return optimizer.state_dict()

    for state, words in (
        (stored(20, 6, 3, solver="exact"), "solver='exact'"),
        (stored(20, 7, 3), "7 × 20"),
        (stored(20, 6, 3, anchor="initial"), "anchor='initial'"),
    ):
        with pytest.raises(InputError, match=words):
            gs.VCL(make(20, 6, 3)).load_state_dict(state)
    with pytest.raises(InputError, match="solver='recursive'"):
        gs.VCL(make(20, 6, 3), solver="exact").load_state_dict(stored(20, 6, 3))


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 3).double(), nn.Linear(20, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_a_state_from_before_the_first_step_does_not_settle_the_readout():
    model = HeadFirst()
    optimizer = gs.VCL(model)
    optimizer.load_state_dict(gs.VCL(HeadFirst()).state_dict())
    step(model, optimizer, *batch(20, 0))
    assert list(optimizer.diagnostics()) == ["body"]


def test_a_gamma_that_went_wrong_is_named():
    model = make(20, 6, 3)
    optimizer = gs.VCL(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(InputError, match="gamma=nan"):
        step(model, optimizer, *batch(20, 0))


# --- precision, diagnostics, rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 9), (2, 300), (12, 12), (20, 8)])
def test_full_steps_err_no_more_than_dense_float32(shape: tuple[int, int]):
    """Every step full and nothing truncated: at most three times the error of Algorithm 1 in float32."""
    k, d = shape
    exact, model, dense = make(d, k, 3), make(d, k, 3).float(), make(d, k, 3).float()
    dense.load_state_dict(model.state_dict())
    exact.load_state_dict(model.state_dict())
    optimizers = gs.VCL(exact, gamma=0.05, solver="exact"), gs.VCL(model, gamma=0.05, rank=d, refresh=1)
    V = torch.zeros(d, d)
    for seed in range(20):
        x, y = batch(d, seed, torch.float32)
        step(exact, optimizers[0], x.double(), y)
        step(model, optimizers[1], x, y)
        each = partial(F.cross_entropy, reduction="none")
        delta = torch.cat([g.flatten(0, 1) for g in reference.preactivation_gradients(dense, dense[0], x, y, each)])
        W, V = reference.vcl_step(dense[0].weight.detach(), V, x, delta, 0.05, 0.1, dtype=np.float32)
        (grad,) = torch.autograd.grad(F.cross_entropy(dense(x), y), dense[2].weight)
        with torch.no_grad():
            dense[2].weight -= 0.1 * grad
            dense[0].weight.copy_(W)
    error, allowed = ((m[0].weight.double() - exact[0].weight).norm() for m in (model, dense))
    assert error <= 3 * allowed


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_kept_rows_are_used_in_any_precision(precision: torch.dtype):
    """Float32 gradients differ from float64 sums of their rows by rounding, which is no reason to fall back on .grad."""
    model = make(60, 10, 3, dtype=torch.float32)
    optimizer = gs.VCL(model, gamma=0.05, precision=precision)
    step(model, optimizer, *batch(60, 0, torch.float32))
    assert optimizer.state[model[0].weight]["basis"].shape[0] == 18  # ten rows of W, eight samples


@pytest.mark.parametrize(
    ("k", "d", "anchor"), [(8, 140, "current"), (8, 140, "initial"), (132, 132, "current"), (140, 132, "current")]
)
def test_diagnostics_are_those_of_the_dense_matrix(k: int, d: int, anchor: str):
    """After full steps and after light ones."""
    model = make(d, k, 3)
    optimizer = gs.VCL(model, gamma=0.02, anchor=anchor)
    weight = model[0].weight
    kinds = set()
    for seed in range(60):
        W, state = weight.detach().clone(), dict(optimizer.state[weight])
        V = W.mT @ W if anchor == "initial" else torch.zeros(d, d).double()
        if state:
            V = state["basis"].mT @ state["shift"] @ state["basis"]
        x, y = batch(d, seed % 7)
        z = (x @ W.mT).requires_grad_()
        (delta,) = torch.autograd.grad(F.cross_entropy(F.gelu(z) @ model[2].weight.detach().mT, y, reduction="sum"), z)
        V = V + reference.virtual_shift(W, x, delta, 0.02)
        eigenvalues = torch.linalg.eigvalsh(V if anchor == "initial" else V + W.mT @ W)
        step(model, optimizer, x, y)
        numbers = optimizer.diagnostics()["0"]
        kinds.add(optimizer.state[weight]["since"] > 0)
        assert numbers["largest"] == pytest.approx(float(eigenvalues[-1]), rel=2e-3)
        assert numbers["most_negative"] == pytest.approx(float(eigenvalues[0]), rel=2e-3, abs=1e-5)
        assert numbers["moved"] == pytest.approx(float((weight.detach() - W).norm()), rel=1e-6)
        if d > k:
            used = eigenvalues[-k:]
            lost = (1 - used.square().sum() / eigenvalues.square().sum()).clamp_min(0).sqrt()
            assert numbers["constraint"] == pytest.approx(float(lost), rel=2e-3)
    assert kinds == {False, True}


@pytest.mark.parametrize("k", [6, 12])
def test_a_floor_gives_back_rank_that_was_lost(k: int):
    """Pruned units: where W has no direction left, the polar factor is completed as in the exact solver."""
    model = make(6, k, 3)
    with torch.no_grad():
        model[0].weight[:, 2] = 0
        model[0].weight[1:4] = 0
    mirror = copy.deepcopy(model)
    options = {"gamma": 0.1, "alpha": 0.3, "floor": 0.05}
    optimizers = gs.VCL(model, refresh=1, **options), gs.VCL(mirror, solver="exact", **options)
    for seed in range(3):
        for m, optimizer in zip((model, mirror), optimizers, strict=True):
            step(m, optimizer, *batch(6, seed))
    torch.testing.assert_close(model[0].weight, mirror[0].weight, atol=1e-9, rtol=0)
    assert torch.linalg.svdvals(model[0].weight.detach())[5] > 0.1


def test_an_empty_batch_moves_as_a_zero_gradient():
    model, mirror = make(40, 6, 3), make(40, 6, 3)
    optimizers = [gs.VCL(m, gamma=0.1, reduction="sum") for m in (model, mirror)]
    x, y = batch(40, 0)
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
    (0 * F.cross_entropy(mirror(x), y)).backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model[0].weight, mirror[0].weight)
