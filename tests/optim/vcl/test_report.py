from __future__ import annotations

import pytest
import torch

import gramscope as gs
import reference
from optim.nets import data, deltas, mlp, train


@pytest.mark.parametrize(
    ("k", "d", "anchor"), [(8, 140, "current"), (8, 140, "initial"), (132, 132, "current"), (140, 132, "current")]
)
def test_diagnostics_are_those_of_the_dense_matrix(k: int, d: int, anchor: str):
    """After full and after light steps."""
    model = mlp(d, k, 3, bias=False)
    optimizer = gs.VCL(model, gamma=0.02, anchor=anchor, solver="recursive")
    weight = model[0].weight
    kinds = set()
    for seed in range(60):
        W, state = weight.detach().clone(), dict(optimizer.state[weight])
        V = W.mT @ W if anchor == "initial" else torch.zeros(d, d).double()
        if state:
            V = state["basis"].mT @ state["shift"] @ state["basis"]
        x, y = data(d, 8, seed=seed % 7)
        V = V + reference.virtual_shift(W, x, deltas(model, model[0], x, y), 0.02)
        eigenvalues = torch.linalg.eigvalsh(V if anchor == "initial" else V + W.mT @ W)
        train(model, optimizer, x, y)
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
