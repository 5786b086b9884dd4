"""The normal form of every layer: inputs, gradients and weights, against autograd on whole networks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gramscope as gs
from cases import (
    BY_NAME,
    CASES,
    SEEN,
    Around,
    Case,
    captured,
    close,
    close_to_autograd,
    close_to_twin,
    normal,
    refused,
    sample_losses,
)
from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjection
from gramscope.layers.select import select_layers
from reference import preactivation_gradients

ids = [case.name for case in CASES]


@pytest.mark.parametrize(
    "case", [c for c in SEEN if not c.name.startswith("conv-transpose")], ids=lambda case: case.name
)
def test_inputs_times_weight_is_the_output(case: Case) -> None:
    model, x, y = case.make()
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        layer.module.register_forward_hook(
            lambda _m, _a, z, name=layer.name: outputs.setdefault(name, []).append(z.detach().clone())
        )
        for layer in select_layers(model)
        if not isinstance(layer, AttentionProjection)
    ]
    with gs.capture(model) as tape:
        model(x)
    for handle in handles:
        handle.remove()
    assert outputs or case.name == "single"
    for name, zs in outputs.items():
        layer = tape[name].layer
        bias = getattr(layer.module, "bias", None)
        z = torch.cat([layer.outputs(z) for z in zs], dim=-2)
        b = 0 if bias is None else bias.detach().reshape(layer.groups, 1, 1, -1) if layer.groups > 1 else bias.detach()
        h = tape[name].h
        close((h.flatten(-3, -2) @ tape[name].weight.mT).reshape(z.shape) + b, z)


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.name)
def test_deltas_equal_the_gradient_of_an_added_zero(case: Case) -> None:
    model, x, y = case.make()
    tape = captured(model, x, y)
    for record in tape:
        layer = record.layer
        if isinstance(layer, AttentionProjection):
            continue
        native = preactivation_gradients(model, layer.module, x, y, sample_losses)
        expected = torch.cat([torch.cat([layer.outputs(z) for z in sample], dim=-2) for sample in native], dim=-3)
        close(record.delta, expected)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_weight_gradient_and_feature_learning_equation(case: Case) -> None:
    model, x, y = case.make()
    tape = captured(model, x, y)
    total = sample_losses(model(x), y).sum()
    for record in tape:
        D = torch.einsum("...bsk,...bsd->...kd", record.delta, record.h)
        close(record.D, D)
        close(record.Sigma, torch.einsum("...bsk,...bsl->...kl", record.delta, record.delta))
        close(record.weight.mT @ record.D, torch.einsum("...bsd,...bse->...de", record.g, record.h))
        parameter = record.layer.parameter
        if parameter is not None and case.name != "tied":
            autograd = torch.autograd.grad(total, parameter, retain_graph=True)[0]
            close(record.layer.to_matrix(autograd), D)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 4}, {"bias": False}, {"add_bias_kv": True}])
@pytest.mark.parametrize("training", [True, False])
def test_attention_projections(batch_first: bool, sizes: dict[str, object], training: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes).double().train(training)

    q, k, v = normal(3, 4, 8), normal(3, 5, sizes.get("kdim", 8), seed=1), normal(3, 5, sizes.get("vdim", 8), seed=2)
    q, k, v = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
    plain = attention(q, k, v)[0]
    with gs.capture(attention) as tape:
        seen = attention(q, k, v)[0]
        tape.backward(seen.square().sum())
    close(plain, seen)
    assert tape.order == ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert {record.h.shape[0] for record in tape} == {3}
    close_to_autograd(tape, plain.square().sum())


def test_attention_sites_hold_the_bias_gradient_of_each_sample() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = normal(3, 4, 8)
    with gs.capture(attention) as tape:
        tape.backward(attention(x, x, x)[0].square().sum())
    for i in range(3):
        xi = x[i : i + 1]
        (gradient,) = torch.autograd.grad(attention(xi, xi, xi)[0].square().sum(), attention.in_proj_bias)
        for part, block in zip(("q_proj", "k_proj", "v_proj"), gradient.chunk(3), strict=True):
            close(tape[part].delta[i].sum(0), block)


def test_encoder_decoder_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).double()
    source, target = normal(3, 5, 8), normal(3, 4, 8, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    with gs.capture(model) as tape:
        tape.backward(model(source, target, tgt_mask=mask).square().sum())
    plain = model(source, target, tgt_mask=mask).square().sum()
    assert len(tape) == 4 * 3 + 4
    close_to_autograd(tape, plain)


class SameConv(nn.Conv2d):
    """Pads by itself, as some image libraries do: the patches are those of the padded input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class LoggedLinear(nn.Linear):
    """Overrides forward without changing the map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_overridden_forwards_are_checked() -> None:
    model = nn.Sequential(
        SameConv(2, 3, 3), nn.Tanh(), nn.Flatten(), LoggedLinear(48, 5), nn.Tanh(), ScaledLinear(5, 3)
    ).double()
    x, y = normal(4, 2, 4, 4), torch.arange(4) % 3
    tape = captured(model, x, y)
    assert tape.order == ["0", "3"]
    assert set(tape.unsupported) == {"5"}
    close_to_autograd(tape, sample_losses(model(x), y).sum())
    with pytest.raises(LayerError, match="layer '5' cannot be captured: ScaledLinear overrides"):
        captured(model, x, y, ["5", "3"])
    assert "ScaledLinear" in gs.measure(model, (x, y)).notes["5"].text
    with pytest.raises(LayerError, match="layer: 0: ScaledLinear overrides its forward"):
        captured(nn.Sequential(ScaledLinear(5, 3)).double(), normal(4, 5), y)


def test_layer_assign_writes_normal_form_back() -> None:
    for case in CASES:
        model, _, _ = case.make()
        for layer in select_layers(model):
            if layer.parameter is None:
                refused(layer.assign, layer.weight(), match="computed weight", error=LayerError)
                continue
            new = torch.randn_like(layer.weight())
            layer.assign(new)
            close(layer.weight(), new)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Conv1d(2, 3, 2, stride=2, dilation=2)], ids=["2d", "1d"]
)
def test_reading_a_gradient_does_not_change_the_model(layer: nn.Module) -> None:
    conv = parametrizations.spectral_norm(layer).double().train()
    x = normal(3, 2, *[7] * (layer.weight.dim() - 2))
    with gs.capture(conv) as tape:
        tape.backward(conv(x).square().sum())
    before = copy.deepcopy(conv.state_dict())
    record = tape["(model)"]
    D = torch.einsum("...bsk,...bsd->...kd", record.delta, record.h)
    torch.testing.assert_close(record.D, D)
    for name, value in conv.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_embedding_is_a_linear_layer_on_one_hot_vectors(dtype: torch.dtype) -> None:
    model, x, y = BY_NAME["embedding"].make()

    def run(m: nn.Module, x: Tensor) -> Tensor:
        index = ((x > 0) * torch.tensor([1, 2, 4])).sum(-1)
        return m.head(torch.tanh(m.up(m.embed(F.one_hot(index, 8).double()))).mean(1))

    twin = Around(run, embed=nn.Linear(8, 5, bias=False), up=model.up, head=model.head)
    twin.embed.weight.data = model.embed.weight.data.mT
    close_to_twin(model, twin, {"embed": "embed", "up": "up"}, x, y)
    # its features are its outputs, whose target linearity the table gives
    table = gs.measure(model.to(dtype), (x, y), sample_losses, ridge=0.5, measures="all")
    z = model.embed(((x > 0) * torch.tensor([1, 2, 4])).sum(-1)).mean(1).detach()
    expected = float(gs.target_linearity(z, y, ridge=0.5))
    assert table["embed"]["target_linearity"] == pytest.approx(expected, rel=1e-4)


def test_embeddings_of_large_vocabularies_form_no_one_hot_vectors() -> None:
    model = Around(
        lambda m, i: m.head(m.embed(i).mean(1)), embed=nn.Embedding(200_000, 2, padding_idx=7), head=nn.Linear(2, 3)
    )
    index, y = torch.tensor([[0, 7, 199_999], [5, 5, 7]]).repeat(50, 30), torch.arange(100) % 3
    tape = captured(model, index, y)
    close_to_autograd(tape, sample_losses(model(index), y).sum())
    assert not tape["embed"].D[:, 7].any()  # torch gives padding_idx no gradient
    with pytest.raises(LayerError, match="one-hot inputs of an embedding of 200000 rows are too large"):
        _ = tape["embed"].h
    table = gs.measure(model, (index, y), nn.CrossEntropyLoss())
    assert {"nfa", "gradient_norm", "target_linearity"} <= {
        name for name, value in table["embed"].items() if value == value
    }


def test_positions_that_serve_all_samples_are_left_out_with_the_reason() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(torch.tanh(x + m.position(torch.arange(4)[None])).mean(1))

    model = Around(run, position=nn.Embedding(4, 5), head=nn.Linear(5, 3))
    tape = captured(model, normal(6, 4, 5), torch.arange(6) % 3)
    assert tape.order == ["head"]
    assert "serve all 6 samples" in tape.unsupported["position"].text
