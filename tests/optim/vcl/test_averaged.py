"""The form of VCL without a rate: its steps in float64, what it needs from gradients, its state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.errors import InputError, LayerError
from gramscope.optim.orthogonalise import COEFFICIENTS
from gramscope.optim.vcl.falling_adamw import FallingAdamW
from optim.nets import KINDS, HeadFirst, data, mlp, net, same, train


def orthogonalised(D: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    U, s, Vh = torch.linalg.svd(D, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


@pytest.mark.parametrize("sizes", [(12, 6, 3), (30, 4, 3), (5, 9, 3)])
def test_steps_are_those_of_the_formulas(sizes: tuple[int, ...]):
    model = mlp(*sizes)
    x, y = data(sizes[0])
    optimizer = gs.VCL(model, gamma=0.5, alpha=0.2)
    W, mean = model[0].weight.detach().clone(), torch.zeros(sizes[1], sizes[0], dtype=torch.float64)
    for n in range(1, 20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        D = model[0].weight.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - n / 20)
        beta = n / (n + 20)
        mean = beta * mean + (1 - beta) * D
        share = min(1, 25 / 9 / math.sqrt(n))
        length = 0.5 * (1 - n / 20) * 0.5 ** (2 * 0.2 - 1) * 0.18 * share
        O = orthogonalised(beta * mean + (1 - beta) * D)
        W = (1 - 0.2 * (1 - share) * length) * W - length * math.sqrt(max(1, sizes[1] / sizes[0])) * O
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), W, atol=1e-10, rtol=0)


class Words(nn.Module):
    """Entries of an embedding plus positions, whose embedding is not called, and a head; in float64."""

    def __init__(self, width: int = 4, entries: int = 7, **options: Any) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(entries, width, **options), nn.Embedding(3, width)
        self.body, self.head = nn.Linear(width, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.words(x) + self.positions.weight).mean(1)
        return self.head(F.gelu(self.body(h)))


@pytest.mark.parametrize(("width", "entries"), [(4, 15), (9, 7)])
def test_steps_of_embeddings_are_those_of_the_formulas(width: int, entries: int):
    torch.manual_seed(0)
    model = Words(width, entries, padding_idx=0)
    optimizer = gs.VCL(model)
    W, mean = model.words.weight.detach().clone(), torch.zeros(entries, width, dtype=torch.float64)
    for n in range(1, 12):
        x, y = torch.randint(0, entries - 1, (20, 3)), torch.arange(20) % 2
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        D, beta = model.words.weight.grad.clone(), n / (n + 20)
        mean = beta * mean + (1 - beta) * D
        share = min(1, 25 / 9 / math.sqrt(n))
        O = orthogonalised(beta * mean + (1 - beta) * D)
        W = (1 - 0.2 * (1 - share) * 0.18 * share) * W - 0.18 * share * math.sqrt(width) / 2 * O
        optimizer.step()
        torch.testing.assert_close(model.words.weight.detach(), W, atol=1e-10, rtol=0)
    assert optimizer.param_groups[0]["layers"] == ["words", "positions", "body"]
    assert not model.words.weight[0].any()  # the padding


@pytest.mark.parametrize("case", ["tied", "frozen", "sparse", "named layers", "Algorithm 1"])
def test_embeddings_that_are_not_trained_by_averaged_steps(case: str):
    model = Words(5, sparse=case == "sparse")
    if case == "tied":
        model.head = nn.Linear(5, 7, dtype=torch.float64)
        model.head.weight = model.words.weight
    model.words.weight.requires_grad_(case != "frozen")
    options: dict[str, dict[str, Any]] = {"named layers": {"layers": "body"}, "Algorithm 1": {"solver": "recursive"}}
    optimizer = gs.VCL(model, readout=lambda p: torch.optim.SGD(p, lr=0.1), **options.get(case, {}))
    F.cross_entropy(model(torch.arange(6).view(2, 3)), torch.arange(2)).backward()
    optimizer.step()
    assert "words" not in optimizer.param_groups[0]["layers"]
    assert "body" in optimizer.param_groups[0]["layers"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_learns_and_equal_shapes_step_together_as_alone(kind: str):
    model, d = net(kind)
    optimizer = gs.VCL(model)
    x, y = data(d, 30)
    before = float(F.cross_entropy(model(x), y).detach())
    train(model, optimizer, x, y, 30)
    assert float(F.cross_entropy(model(x), y).detach()) < 0.8 * before
    assert set(optimizer.diagnostics()) == {unit.weight.name for unit in optimizer.units}


def test_the_scale_of_the_loss_does_not_matter():
    models = [mlp(9, 6, 6, 3) for _ in range(2)]
    optimizers = [gs.VCL(m, readout=lambda p: torch.optim.SGD(p, lr=0.0)) for m in models]
    x, y = data(9)
    for _ in range(4):
        for model, optimizer, scale in zip(models, optimizers, (1.0, 1e-6), strict=True):
            optimizer.zero_grad()
            (scale * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    same(*models, atol=1e-9, rtol=0)


def test_the_layer_executed_last_goes_to_the_readout():
    model = HeadFirst().double()
    optimizer = gs.VCL(model)
    train(model, optimizer, *data())
    assert optimizer.param_groups[0]["layers"] == ["body"]
    assert "FallingAdamW (readout)" in optimizer.summary()


def test_continuation_and_copies_are_bit_identical():
    model = mlp(9, 6, 6, 3)
    optimizer = gs.VCL(model)
    x, y = data(9)
    train(model, optimizer, x, y, 5)
    again, copied = copy.deepcopy((model, optimizer))
    other = mlp(9, 6, 6, 3)
    other.load_state_dict(model.state_dict())
    resumed = gs.VCL(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (again, copied), (other, resumed)):
        train(m, o, x, y, 12)
    same(model, again, atol=0, rtol=0)
    same(model, other, atol=0, rtol=0)


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_states_of_algorithm_1_are_refused_with_the_solver_that_takes_them(solver: str):
    model = mlp(9, 6, 3)
    old = gs.VCL(model, gamma=0.1, solver=solver)
    train(model, old, *data(9))
    stored = old.state_dict()
    with pytest.raises(InputError, match=f"solver='{solver}'"):
        gs.VCL(mlp(9, 6, 3), readout=lambda p: torch.optim.SGD(p, lr=0.1)).load_state_dict(stored)
    gs.VCL(mlp(9, 6, 3), solver=solver).load_state_dict(stored)


def test_states_of_averaged_steps_are_refused_by_algorithm_1_and_by_other_shapes():
    model = mlp(9, 6, 3)
    optimizer = gs.VCL(model)
    train(model, optimizer, *data(9))
    with pytest.raises(InputError, match="solver='averaged'"):
        gs.VCL(mlp(9, 6, 3), solver="recursive").load_state_dict(optimizer.state_dict())
    with pytest.raises(InputError, match="shape"):
        gs.VCL(mlp(9, 5, 3)).load_state_dict(optimizer.state_dict())


def test_layers_without_a_gradient_keep_their_weights_and_no_gradient_at_all_is_an_error():
    model = mlp(9, 6, 6, 3)
    optimizer = gs.VCL(model)
    x, y = data(9)
    train(model, optimizer, x, y, 2)
    kept = model[2].weight.detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad = None
    optimizer.step()
    torch.testing.assert_close(model[2].weight.detach(), kept, rtol=0, atol=0)
    optimizer.zero_grad()
    with pytest.raises(LayerError, match="no gradient"):
        optimizer.step()


def test_a_rate_of_zero_moves_nothing():
    model = mlp(9, 6, 3)
    optimizer = gs.VCL(model, gamma=0.0, readout=lambda p: torch.optim.SGD(p, lr=0.0))
    before = copy.deepcopy(model)
    train(model, optimizer, *data(9), 2)
    same(model, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "given", [{"rank": 8}, {"anchor": "initial"}, {"aim": 1.0}, {"bias": True}, {"momentum": 0.9}, {"refresh": 1}]
)
def test_arguments_of_algorithm_1_ask_for_its_solver(given: dict[str, object]):
    with pytest.raises(InputError, match=f"{next(iter(given))}=.*solver='recursive'"):
        gs.VCL(mlp(9, 6, 3), **given)


def test_the_old_preset_names_its_replacement():
    with pytest.raises(InputError, match=r"gs\.VCL\(model\)"):
        gs.VCL.best(mlp(9, 6, 3))


def test_bfloat16_weights_keep_a_float32_mean():
    model = mlp(9, 6, 3, dtype=torch.bfloat16)
    optimizer = gs.VCL(model)
    x, y = data(9, dtype=torch.bfloat16)
    train(model, optimizer, x, y, 3)
    assert optimizer.state[model[0].weight]["mean"].dtype == torch.float32
    assert bool(model[0].weight.isfinite().all())


def test_the_readout_rate_falls_by_itself_and_with_schedulers():
    models = [mlp(5, 4, 3) for _ in range(2)]
    falling = FallingAdamW(models[0].parameters(), lr=0.1)
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    x, y = data(5)
    for n in range(1, 30):
        plain.param_groups[0]["lr"] = 0.1 * min(1, 25 / 9 / math.sqrt(n))
        train(models[0], falling, x, y)
        train(models[1], plain, x, y)
        assert falling.param_groups[0]["lr"] == 0.1
    same(*models, rtol=0, atol=1e-12)
