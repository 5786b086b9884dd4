"""Saving, loading and copying gs.VCL."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gramscope as gs
import reference
from gramscope.errors import InputError
from optim.nets import AdamW, data, deltas, mlp, net, same, train

pytestmark = pytest.mark.usefixtures("light_steps")

PRESET = {
    "anchor": "initial",
    "second_order": False,
    "momentum": 0.9,
    "orthogonalise": True,
    "aim": 0.5,
    "floor": 0.05,
}


@pytest.mark.parametrize("options", [{}, {"solver": "exact"}, PRESET])
@pytest.mark.parametrize("kind", ["narrow", "tokens"])
def test_continuation_and_copies_are_bit_identical(kind: str, options: dict[str, Any]):
    def make() -> tuple[nn.Module, gs.VCL]:
        model = net(kind)[0].float()
        return model, gs.VCL(model, gamma=0.02, readout=AdamW, **{"solver": "recursive", **options})

    model, optimizer = make()
    batches = [data(net(kind)[1], seed=step, dtype=torch.float32) for step in range(50)]
    for x, y in batches[:44]:
        train(model, optimizer, x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    twin, copied = copy.deepcopy((model, optimizer))
    for x, y in batches[44:]:
        train(twin, copied, x, y)  # leaves the original alone
    for x, y in batches[44:]:
        train(model, optimizer, x, y)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    again, loaded = make()
    loaded.load_state_dict(stored["optimizer"])
    again.load_state_dict(stored["model"])
    for x, y in batches[44:]:
        train(again, loaded, x, y)
    same(model, again, atol=0, rtol=0)
    same(model, twin, atol=0, rtol=0)
    if not options:
        parameter = model[0].weight if kind == "narrow" else model.inner.weight
        assert optimizer.state[parameter]["since"] > 0, "some steps were light"


@pytest.mark.parametrize("solver", ["recursive", "exact"])
def test_the_stored_format_loads(solver: str):
    """A state written key by key; the step after it is Algorithm 1 on the V that it holds."""
    model, (x, y) = mlp(6, 4, 3), data(6)
    W = model[0].weight.detach().clone()
    V = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    V = -0.05 * V @ V.mT
    state: dict[str, Any] = {"matrix": V}
    if solver == "recursive":
        Q = torch.linalg.qr(W.mT, mode="complete")[0].mT.contiguous()
        T = W @ Q[:4].mT
        nothing = torch.zeros(4, dtype=torch.float64)
        state = {"basis": Q, "shift": Q @ V @ Q.mT, "weights": T, "rotation": T, "eigenvalues": nothing}
        state |= {"singular_values": nothing, "response": torch.zeros(4, 4), "steps": 3, "since": 0, "wait": 32}
    group = {"params": [0], "lr": 0.3, "layers": ["0"], "head": "2", "anchor": "current", "alpha": 0.3}
    rest = {**torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict()["param_groups"][0], "params": [1, 2, 3]}
    optimizer = gs.VCL(model, alpha=0.3, solver=solver)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group, rest]})
    train(model, optimizer, x, y)
    mirror = mlp(6, 4, 3)
    expected, _ = reference.vcl_step(W, V, x, deltas(mirror, mirror[0], x, y), 0.3, 0.3)
    torch.testing.assert_close(model[0].weight.detach(), expected, atol=1e-7, rtol=0)
    assert set(optimizer.state[model[0].weight]) == set(state)


def test_half_precision_parameters_keep_a_precise_state():
    model = mlp(30, 4, 3, dtype=torch.bfloat16)
    optimizer = gs.VCL(model, gamma=0.05, solver="recursive")
    train(model, optimizer, *data(30, dtype=torch.bfloat16), 3)
    state = optimizer.state[model[0].weight]
    assert state["basis"].dtype == torch.float32
    kept = state["weights"].float() @ state["basis"][:4]
    torch.testing.assert_close(model[0].weight.float(), kept, atol=0, rtol=1e-2)


def test_pickling_points_to_the_state():
    with pytest.raises(InputError, match="state_dict"):
        pickle.dumps(gs.VCL(mlp(5, 4, 3), solver="recursive"))


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((20, 6, 3), {"solver": "exact"}, "solver='exact'"),
        ((20, 7, 3), {}, "7 × 20"),
        ((20, 6, 3), {"anchor": "initial"}, "anchor='initial'"),
        ((20, 6, 3), {"alpha": 0.5}, r"alpha=0\.5, not 0\.1"),
        ((20, 6, 6, 3), {"layers": ["2"]}, r"trains the layers \['2'\]"),
        (None, {}, "not one of VCL; was the checkpoint saved with another optimizer"),
    ],
)
def test_states_of_another_form_are_refused(sizes: tuple[int, ...] | None, options: dict[str, Any], words: str):
    stored: dict[str, Any] = {}
    if sizes is not None:
        model = mlp(*sizes)
        optimizer = gs.VCL(model, gamma=0.05, **{"solver": "recursive", **options})
        train(model, optimizer, *data(20))
        stored = optimizer.state_dict()
    with pytest.raises(InputError, match=words):
        gs.VCL(mlp(20, 6, 3), solver="recursive").load_state_dict(stored)
