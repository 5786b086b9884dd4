"""When steps are full, and how changed weights and lost rank are handled."""

from __future__ import annotations

import copy

import pytest
import torch

import gramscope as gs
from gramscope.errors import RescueWarning, ResultWarning
from gramscope.optim.vcl.rules import Solver
from optim.nets import data, mlp, train, train_both


@pytest.mark.parametrize(
    ("dtype", "factor", "times", "tolerance"),
    [
        (torch.float64, 1.5, 1, 1e-6),
        (torch.float32, 1 - 1e-5, 100, 1e-4),
        (torch.bfloat16, 0.7, 1, 0.05),
        (torch.float16, 1.05, 1, 0.05),
    ],
)
def test_weights_changed_from_outside_are_noticed(dtype: torch.dtype, factor: float, times: int, tolerance: float):
    """As by the exact solver, which keeps no weights of its own; in float64 through ``.data``, which no version counts."""
    models = [mlp(20, 12, 4).to(dtype) for _ in range(2)]
    options = {"gamma": 1e-3, "alpha": 0.5, "second_order": False}
    optimizers = [gs.VCL(m, solver=s, **options) for m, s in zip(models, ("recursive", "exact"), strict=True)]
    for seed in range(3 + times):
        if seed >= 3:
            with torch.no_grad():
                for model in models:
                    weight = model[0].weight.data if dtype == torch.float64 else model[0].weight
                    weight[:6].mul_(factor)
        train_both(models, optimizers, [data(20, 16, 4, seed)])
    W, expected = (model[0].weight.detach().double() for model in models)
    assert (W - expected).norm() < tolerance * expected.norm()


def test_asked_for_all_directions_every_step_is_full():
    model = mlp(140, 8, 3)
    optimizer = gs.VCL(model, gamma=0.01, rank=140, solver="recursive")
    for seed in range(40):
        train(model, optimizer, *data(140, 30, seed=seed))
        assert optimizer.state[model[0].weight]["since"] == 0


@pytest.mark.parametrize(("d", "rank"), [(60, None), (600, None), (600, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("light_steps")
def test_the_same_batch_again_and_again_does_not_spoil_the_basis(d: int, rank: int | None, dtype: torch.dtype) -> None:
    """Its rows lie in the basis already; what is left of them is rounding, which is no direction."""
    x, y = data(d, 12)
    exact, model = mlp(d, 8, 3), mlp(d, 8, 3).to(dtype)
    train(exact, gs.VCL(exact, gamma=0.02, solver="exact"), x, y, 25)
    optimizer = gs.VCL(model, gamma=0.02, rank=rank, solver="recursive")
    train(model, optimizer, x.to(dtype), y, 25)
    basis = optimizer.state[model[0].weight]["basis"]
    eps = torch.finfo(dtype).eps
    assert (basis @ basis.mT - torch.eye(len(basis), dtype=dtype)).abs().max() < 200 * eps
    assert (model[0].weight.double() - exact[0].weight).norm() < 200 * eps * exact[0].weight.norm()


def test_cut_off_eigenvalues_are_announced_once():
    model = mlp(6, 6, 3)
    x, y = data(6)
    optimizer = gs.VCL(model, gamma=0.3, cutoff=0.2, solver="recursive")
    with pytest.warns(RescueWarning, match=r"'0'.*cutoff"):
        train(model, optimizer, x, y)
    train(model, optimizer, x, y, 3)


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_weights_that_cannot_leave_zero_are_announced_once(solver: Solver):
    model = mlp(6, 6, 3)
    torch.nn.init.zeros_(model[0].weight)
    x, y = data(6)
    optimizer = gs.VCL(model, gamma=0.3, solver=solver)
    with pytest.warns(ResultWarning, match=r"'0' are zero and stay so"):
        train(model, optimizer, x, y)
    train(model, optimizer, x, y, 3)
    assert not model[0].weight.any()


@pytest.mark.parametrize("k", [6, 12])
def test_a_floor_gives_back_rank_that_was_lost(k: int):
    """Pruned units: where W has no direction left, the polar factor is completed as in the exact solver."""
    model = mlp(6, k, 3)
    with torch.no_grad():
        model[0].weight[:, 2] = 0
        model[0].weight[1:4] = 0
    models = [model, copy.deepcopy(model)]
    options = {"gamma": 0.1, "alpha": 0.3, "floor": 0.05}
    optimizers = (
        gs.VCL(models[0], refresh=1, **options, solver="recursive"),
        gs.VCL(models[1], solver="exact", **options),
    )
    train_both(models, optimizers, [data(6, seed=seed) for seed in range(3)])
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight, atol=1e-9, rtol=0)
    assert torch.linalg.svdvals(model[0].weight.detach())[5] > 0.1
