"""Hooks under autocast, torch.compile and activation checkpointing, and their removal."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramscope as gs
from gramscope.errors import LayerError
from optim.nets import data, mlp, same, train


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


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
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
        results = [Checkpointed(reentrant) for reentrant in (None, False)]
        for model in results:
            train(model, gs.VCL(model, gamma=0.05, layers=layers), x, y, 2)
        same(*results, atol=1e-9, rtol=0)


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
    with pytest.raises(LayerError, match="no gradient"):
        optimizer.step()
    del optimizer
    gc.collect()
    assert hooks() == 0


def test_a_model_can_be_saved_while_it_is_trained() -> None:
    model, x, y = mlp(7, 6, 3), *data()
    optimizer = gs.VCL(model, gamma=0.1)
    train(model, optimizer, x, y)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same(loaded, model, atol=0, rtol=0)
    steps = optimizer.state[model[0].weight]["steps"]
    F.cross_entropy(loaded(x), y).backward()  # the hooks of the copy do nothing
    train(model, optimizer, x, y)
    assert optimizer.state[model[0].weight]["steps"] == steps + 1


class WithTrainingStep(nn.Module):
    """A module that holds its optimizer and calls its parts in ``training_step``, as LightningModules do."""

    def __init__(self, parts: str = "") -> None:
        super().__init__()
        self.net = mlp(7, 6, 3)
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 3).double()})
        self.parts = parts
        self.optimizer = gs.VCL(self, gamma=0.1)

    def training_step(self, x: Tensor) -> Tensor:
        if self.parts:
            return self.heads["a"](torch.tanh(self.net[2](torch.tanh(self.net[0](x)))))  # type: ignore[no-any-return]
        return self.heads["a"](torch.tanh(self.net(x)))  # type: ignore[no-any-return]


def test_a_module_that_holds_its_optimizer_and_trains_its_parts() -> None:
    x, y = data()
    model = WithTrainingStep()
    plain = nn.Sequential(copy.deepcopy(model.net), nn.Tanh(), copy.deepcopy(model.heads["a"]))
    optimizer = gs.VCL(plain, gamma=0.1)
    for _ in range(3):
        model.optimizer.zero_grad()
        F.cross_entropy(model.training_step(x), y).backward()
        model.optimizer.step()
        train(plain, optimizer, x, y)
    torch.testing.assert_close(model.net[0].weight, plain[0][0].weight, rtol=0, atol=0)
    assert "heads.a.weight" in model.optimizer.summary()


def test_parts_called_outside_any_entrance_are_still_refused() -> None:
    model, (x, y) = WithTrainingStep(parts="deep"), data()
    with pytest.raises(LayerError, match="ran outside a call of the model"):
        F.cross_entropy(model.training_step(x), y).backward()
