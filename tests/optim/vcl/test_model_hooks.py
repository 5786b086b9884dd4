"""Hooks under autocast, torch.compile and activation checkpointing, and their removal."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramscope as gs
from gramscope.errors import LayerError
from optim.vcl.nets import data, mlp, same, train

pytestmark = pytest.mark.usefixtures("light_steps")


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
        train(compiled, optimizer, x, y)
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
