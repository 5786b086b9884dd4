"""AGOP, tangent kernel and dual against dense Jacobians; which axis holds the samples; several batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import gramscope as gs
from cases import BY_NAME, CASES, Around, Case, normal, pooled, refused, twin_of
from gramscope.instruments.agop import dual_tangent_kernel
from gramscope.layers.select import select_layers
from reference import output_jacobian

PLAIN = [BY_NAME[name] for name in ("mlp", "tokens", "conv2d", "conv2d-grouped", "residual", "gpt")]


def dense(model: nn.Module, x: Tensor, name: str) -> Tensor:
    """J of every sample in normal form, [n, c, groups, sites, k], by one backward per output."""
    layer = select_layers(model, name).layers[0]
    rows = []
    for i in range(x.shape[0]):
        native = output_jacobian(model, layer.module, x[i : i + 1])[:, 0]
        rows.append(torch.stack([layer.outputs(z) for z in native]))
    J = torch.stack(rows).squeeze(-3)  # [n, c, (groups), sites, k]
    return J if J.dim() == 5 else J.unsqueeze(2)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_kernel_agop_and_dual_equal_dense_autograd(case: Case) -> None:
    model, x, _ = case.make()
    K, G = gs.tangent_kernel(model, x), gs.agop(model, x)
    duals, blocks = dual_tangent_kernel(model, x), dual_tangent_kernel(model, x, blocks=True)
    for name, found in K.items():
        J, W = dense(model, x, name), select_layers(model, name).layers[0].weight()
        n, c = J.shape[:2]
        expected = torch.einsum("ncgsk,ncgsl->gkl", J, J) / n
        stacked = W if W.dim() == 3 else W.unsqueeze(0)
        torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-8, atol=1e-10)
        agop = stacked.mT @ expected @ stacked
        torch.testing.assert_close(G[name].reshape(agop.shape), agop, rtol=1e-8, atol=1e-10)
        flat = J.reshape(n, -1)
        torch.testing.assert_close(duals[name], flat @ flat.T, rtol=1e-8, atol=1e-10)
        per_output = J.reshape(n * c, -1)
        torch.testing.assert_close(blocks[name], per_output @ per_output.T, rtol=1e-8, atol=1e-10)


def test_input_agop_is_the_mean_of_input_jacobians() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    J = vmap(jacrev(model))(x)
    torch.testing.assert_close(gs.agop(model, x, "0")["0"], torch.einsum("ncd,nce->de", J, J) / 6)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_centered_kernel_uses_both_jacobians(case: Case) -> None:
    model, x, _ = case.make()
    reference = twin_of(model)
    alone = gs.tangent_kernel(model, x)
    for name, (K, K_centered) in gs.tangent_kernel(model, x, reference=reference).items():
        difference = dense(model, x, name) - dense(reference, x, name)
        expected = torch.einsum("ncgsk,ncgsl->gkl", difference, difference) / 6
        torch.testing.assert_close(K_centered.reshape(expected.shape), expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(K, alone[name])


def test_sketched_reference_shares_its_signs() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    generator = torch.Generator().manual_seed(0)
    found = gs.tangent_kernel(model, x, reference=copy.deepcopy(model), sketch=4, generator=generator)
    assert found["0"].K_centered.abs().max() == 0
    assert found["0"].K.abs().max() > 0


def test_every_case_runs_and_batches_agree() -> None:
    for case in CASES:
        model, x, _ = case.make()
        whole, parts = gs.tangent_kernel(model, x), gs.tangent_kernel(model, list(x.split(1)))
        for name, K in whole.items():
            torch.testing.assert_close(K, parts[name], rtol=1e-9, atol=1e-12)


def test_bad_input() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    refused(gs.agop, model, x[:0], match="yielded no batch|is empty")
    refused(gs.agop, model, None, match="loader is a NoneType")


def sequence_first(pooled: bool) -> nn.Module:
    """``[time, batch, 6] → [time, batch, 2]``, or ``[batch, 2]`` if pooled."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.inner(x))
        f = m.head(m.attention(h, h, h)[0])
        return f.mean(0) if pooled else f

    return Around(forward, inner=nn.Linear(6, 6), attention=nn.MultiheadAttention(6, 2), head=nn.Linear(6, 2)).eval()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("batch", [5, 7])
def test_sequence_first_models_take_batch_dim(pooled: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.instruments.agop.CPU_BATCH", 3)
    model, x = sequence_first(pooled), normal(7, batch, 6)
    G, K = gs.agop(model, x, batch_dim=1), gs.tangent_kernel(model, {"x": x.numpy()}, batch_dim=1)
    dual = dual_tangent_kernel(model, x, batch_dim=1)
    for name in ("inner", "head"):
        layer = model.get_submodule(name)
        J = torch.stack([output_jacobian(model, layer, x[:, i : i + 1]).squeeze(1) for i in range(batch)])
        rows = J.flatten(2, -2)  # [n, c, time, k]
        expected = torch.einsum("nctk,nctl->kl", rows, rows) / batch
        torch.testing.assert_close(K[name], expected)
        torch.testing.assert_close(G[name], layer.weight.T @ expected @ layer.weight)
        torch.testing.assert_close(dual[name], J.flatten(1) @ J.flatten(1).T)
    # The attention's value projection, through an independent route: one sample at a time.
    single = [gs.tangent_kernel(model, x[:, i : i + 1], batch_dim=1)["attention.v_proj"] for i in range(batch)]
    torch.testing.assert_close(K["attention.v_proj"], torch.stack(single).mean(0))
    centered = gs.tangent_kernel(model, x, reference=sequence_first(pooled), batch_dim=1)
    torch.testing.assert_close(centered["inner"].K, K["inner"])


@pytest.mark.parametrize("rows", [5, 4])
@pytest.mark.parametrize("convert", [lambda x: x, Tensor.numpy], ids=["tensor", "array"])
def test_two_batches_of_different_lengths(rows: int, convert: Callable[[Tensor], Any]) -> None:
    model, a, b = pooled(5, 6, 3), normal(5, 4, 5), normal(rows, 7, 5)
    K = gs.tangent_kernel(model, [convert(a), convert(b)])
    total = torch.zeros(6, 6, dtype=torch.float64)
    for x in (*a, *b):
        J = output_jacobian(model, model.e, x.unsqueeze(0)).flatten(1, -2)  # [c, tokens, k]
        total += torch.einsum("ctk,ctl->kl", J, J)
    torch.testing.assert_close(K["e"], total / (5 + rows))
    found = gs.agop(model, [a, b])["e"]
    torch.testing.assert_close(found, gs.agop(model, [(a, None), (b, None)])["e"])
    assert dual_tangent_kernel(model, [a, b], "r")["r"].shape == (5 + rows, 5 + rows)


def test_several_inputs_without_a_common_length_are_one_batch() -> None:
    class Pointed(nn.Module):  # its signature says that it takes two inputs
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x * mask.sum())

    inputs = {"x": normal(6, 3), "mask": torch.ones(2, 2, dtype=torch.float64)}
    K = gs.tangent_kernel(Pointed(), inputs)["a"]
    torch.testing.assert_close(K, torch.eye(2, dtype=torch.float64))
