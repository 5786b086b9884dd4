"""Two models compared: each column against its formula on dense matrices, and adapters against their base."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import InputError, LayerError
from gramscope.names import match_names

LOSS = nn.CrossEntropyLoss()
DATA = (torch.randn(40, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64), torch.arange(40) % 3)


def pair() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        a = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        b = copy.deepcopy(a)
        for parameter in b.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return a, b


def rho(A: Tensor, B: Tensor) -> float:
    return float((A * B).sum() / (A.norm() * B.norm()))


def test_columns_are_their_formulas() -> None:
    a, b = pair()
    found = gs.compare(a, b, DATA, LOSS, directions=2)
    tables = [gs.measure(model, DATA, LOSS, measures=["target_linearity", "nfa"]) for model in (a, b)]
    for i, name in ((0, "0"), (2, "2")):
        A, B = a[i].weight.detach(), b[i].weight.detach()
        row, s = found[name], torch.linalg.svdvals(B - A)
        p = s / s.sum()
        assert row["change"] == pytest.approx(float((B - A).norm() / A.norm()))
        assert row["change_rank"] == pytest.approx(float((-(p * p.log()).sum()).exp()))
        assert row["change_stable_rank"] == pytest.approx(float(s.square().sum() / s[0] ** 2))
        assert row["rank_90"] == next(r for r in range(1, 9) if s[:r].square().sum() >= 0.9 * s.square().sum())
        r = min(2, min(A.shape) // 2)
        (UA, _, VA), (UB, _, VB) = (torch.linalg.svd(W, full_matrices=False) for W in (A, B))
        assert row["overlap_in"] == pytest.approx(float((VA[:r] @ VB[:r].mT).square().sum()) / r)
        assert row["overlap_out"] == pytest.approx(float((UA[:, :r].mT @ UB[:, :r]).square().sum()) / r)
        K = [gs.tangent_kernel(model, DATA)[name] for model in (a, b)]
        assert row["agop_cosine"] == pytest.approx(rho(A.mT @ K[0] @ A, B.mT @ K[1] @ B))
        assert row["cka"] == pytest.approx(gs.cka(a, DATA, b)[name, name])
        assert row["linearity_change"] == pytest.approx(
            tables[1][name]["target_linearity"] - tables[0][name]["target_linearity"]
        )
        D = torch.autograd.grad(40 * LOSS(a(DATA[0]), DATA[1]), a[i].weight)[0]
        cosine = rho(B.mT @ B - A.mT @ A, -(A.mT @ D + D.mT @ A))
        assert row["virtual_share"] == pytest.approx(max(cosine, 0) ** 2)


def test_equal_models_have_not_changed() -> None:
    a, _ = pair()
    row = gs.compare(a, copy.deepcopy(a), DATA, LOSS)["2"]
    assert (row["change"], row["rank_90"], row["linearity_change"]) == (0, 0, 0)
    assert row["overlap_in"] == pytest.approx(1)
    assert row["agop_cosine"] == pytest.approx(1)


def test_adapters_are_compared_with_their_base() -> None:
    peft = pytest.importorskip("peft")
    a, _ = pair()
    b = peft.get_peft_model(copy.deepcopy(a), peft.LoraConfig(r=2, target_modules=["0"]))
    for name, parameter in b.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    found = gs.compare(a, b)
    assert found["0"]["rank_90"] in (1, 2)
    assert found["2"]["change"] == 0
    assert found.rank_pattern(share=1.0, layers="0") == {"0": 2}


def test_rows_that_both_have_are_compared() -> None:
    a = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    b = copy.deepcopy(a)
    b[0] = nn.Embedding.from_pretrained(torch.cat([a[0].weight.detach(), torch.ones(2, 4)]))
    found = gs.compare(a, b)
    if "0" in found.rows:
        assert found["0"]["change"] == 0
    assert found["1"]["change"] == 0


def test_models_without_a_common_name_are_an_error() -> None:
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))

    with pytest.raises(LayerError, match="0 of 1 names match: one model has first, the other second"):
        gs.compare(Named("first"), Named("second"))
    with pytest.raises(InputError, match="share=2"):
        gs.rank_pattern({"x": torch.ones(2)}, share=2)


def test_prefixes_of_wrappers_are_matched() -> None:
    names = ["h.0.fc.weight", "h.1.fc.weight", "ln.bias"]
    for wrapped in (
        [f"module.{n}" for n in names],
        [f"base_model.model.{n}" for n in names],
        [n.replace("fc.", "fc.base_layer.") for n in names],
    ):
        assert match_names(names, wrapped) == dict(zip(names, wrapped, strict=True))
        assert match_names(wrapped, names) == dict(zip(wrapped, names, strict=True))
    assert match_names(["a.weight"], ["b.weight"]) == {}


class Deep(nn.Module):
    """Residual blocks, of which the second is affine."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), act) for act in (nn.Tanh(), nn.Identity(), nn.ReLU())]
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_affine_blocks_are_replaced_without_a_trace() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, x = Deep().double().requires_grad_(False), torch.randn(60, 4, dtype=torch.float64)
    before, hooks = net(x), [len(m._forward_hooks) for m in net.modules()]
    fits = gs.linear_blocks(net, x)
    assert list(fits) == ["blocks.0", "blocks.1", "blocks.2"]
    assert fits["blocks.1"].r2 == pytest.approx(1, abs=1e-9)
    assert max(fits["blocks.0"].r2, fits["blocks.2"].r2) < 1 - 1e-4
    inputs = x + net.blocks[0](x)
    H = torch.cat([inputs + net.blocks[1](inputs), torch.ones(60, 1, dtype=torch.float64)], 1)
    y = net.blocks[2](H[:, :4])
    residual = y - H @ torch.linalg.lstsq(H, y).solution
    assert fits["blocks.2"].r2 == pytest.approx(float(1 - residual.square().sum() / (y - y.mean(0)).square().sum()))
    with gs.replaced(net, {"blocks.1": fits["blocks.1"]}):
        assert torch.allclose(net(x), before)
    with gs.replaced(net, {"blocks.0": fits["blocks.0"]}):
        assert not torch.allclose(net(x), before)
    assert torch.equal(net(x), before)
    assert [len(m._forward_hooks) for m in net.modules()] == hooks
    with pytest.raises(LayerError, match="did you mean 'blocks.1.1'"):
        gs.linear_blocks(net, x, ["blocks.11"])
