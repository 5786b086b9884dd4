from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import gramscope as gs
from cases import BY_NAME, CASES, Case
from gramscope.errors import InputError, ResultWarning
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
    with pytest.raises(InputError, match="not a tensor; say which part with output="):
        gs.agop(Pair(), x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 2).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), x


def test_symmetric_product_by_blocks(generator: torch.Generator) -> None:
    from gramscope.linalg.psd import symmetric_product

    W = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64)
    K = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    K = K + K.mT
    for block in (1, 4, 11, 50):
        torch.testing.assert_close(symmetric_product(W, K @ W, block), W.mT @ K @ W)


def test_layers_the_output_does_not_depend_on_are_left_out() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    with pytest.warns(ResultWarning, match="left out b: no Jacobians: the output does not depend on it"):
        assert list(gs.agop(TwoHeads(), torch.ones(4, 3), output=0)) == ["a"]
