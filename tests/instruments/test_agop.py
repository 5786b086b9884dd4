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
from cases import BY_NAME, CASES, Case, normal, pooled
from gramscope.errors import InputError
from gramscope.instruments.agop import dual_tangent_kernel
from reference import output_jacobian

PLAIN = [BY_NAME[name] for name in ("mlp", "tokens", "conv2d", "conv2d-grouped", "residual", "gpt")]


def dense(case: Case, name: str) -> tuple[torch.Tensor, ...]:
    """J of every sample in normal form, [n, c, groups, sites, k], by one backward per output."""
    model, x, _ = case.make()
    with gs.capture(model) as tape:
        model(x)
    layer = tape[name].layer
    rows = []
    for i in range(x.shape[0]):
        native = output_jacobian(model, layer.module, x[i : i + 1])[:, 0]
        rows.append(torch.stack([layer.kind.outputs(layer.module, z) for z in native]))
    J = torch.stack(rows)  # [n, c, (groups), 1, sites, k]
    J = J.squeeze(-3)
    return (J if J.dim() == 5 else J.unsqueeze(2)), layer.weight()


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_kernel_agop_and_dual_equal_dense_autograd(case: Case) -> None:
    model, x, _ = case.make()
    K, G = gs.tangent_kernel(model, x), gs.agop(model, x)
    duals, blocks = dual_tangent_kernel(model, x), dual_tangent_kernel(model, x, blocks=True)
    for name, found in K.items():
        J, W = dense(case, name)
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
    root = gs.agop(model, x, "0", power=0.5)["0"]
    torch.testing.assert_close(root @ root, gs.agop(model, x, "0")["0"])


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_centered_kernel_uses_both_jacobians(case: Case) -> None:
    model, x, _ = case.make()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.7)
    found = gs.tangent_kernel(model, x, reference=reference)
    for name, (K, K_centered) in found.items():
        with gs.capture(model) as tape:
            model(x)
        layer = tape[name].layer
        twin_layer = dict(reference.named_modules())[name]
        total = torch.zeros_like(K_centered)
        for i in range(6):
            ours = output_jacobian(model, layer.module, x[i : i + 1])[:, 0]
            theirs = output_jacobian(reference, twin_layer, x[i : i + 1])[:, 0]
            for a, b in zip(ours, theirs, strict=True):
                d = layer.kind.outputs(layer.module, a - b)
                total += torch.einsum("...bsk,...bsl->...kl", d, d)
        torch.testing.assert_close(K_centered, total / 6, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(K, gs.tangent_kernel(model, x)[name])


def test_sketched_reference_shares_its_signs() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    generator = torch.Generator().manual_seed(0)
    found = gs.tangent_kernel(model, x, reference=copy.deepcopy(model), sketch=4, generator=generator)
    assert found["0"].K_centered.abs().max() == 0
    assert found["0"].K.abs().max() > 0


def test_every_case_runs_and_batches_agree() -> None:
    for case in CASES:
        if case.name == "checkpoint-reentrant":
            continue
        model, x, _ = case.make()
        whole, parts = gs.tangent_kernel(model, x), gs.tangent_kernel(model, list(x.split(1)))
        for name, K in whole.items():
            torch.testing.assert_close(K, parts[name], rtol=1e-9, atol=1e-12)


def test_bad_input() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    with pytest.raises(InputError, match="yielded no batch|is empty"):
        gs.agop(model, x[:0])
    with pytest.raises(InputError, match="loader is a NoneType"):
        gs.agop(model, None)


class SequenceFirst(nn.Module):
    """``[time, batch, 6] → [time, batch, 2]``, or ``[batch, 2]`` if pooled."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head, self.pooled = nn.Linear(6, 2), pooled

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        f = self.head(self.attention(h, h, h)[0])
        return f.mean(0) if self.pooled else f


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("batch", [5, 7])
def test_sequence_first_models_take_batch_dim(pooled: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.instruments.agop.BATCH", 3)
    model, x = SequenceFirst(pooled).double().eval(), normal(7, batch, 6)
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
    centered = gs.tangent_kernel(model, x, reference=SequenceFirst(pooled).double().eval(), batch_dim=1)
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
    class Pointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x * mask.sum())

    K = gs.tangent_kernel(Pointed(), (normal(6, 3), torch.ones(2, 2, dtype=torch.float64)))["a"]
    torch.testing.assert_close(K, torch.eye(2, dtype=torch.float64))
