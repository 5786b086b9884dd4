"""What a capture records of a user's own forwards and backwards."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, Around, Checkpointed, captured, close, close_to_autograd, normal, sample_losses
from gramscope.errors import LayerError, ResultWarning
from reference import preactivation_gradients


def test_repeated_layer_has_one_site_per_application() -> None:
    model, x, y = BY_NAME["repeated"].make()
    assert captured(model, x, y)["inner"].h.shape == (6, 3, 5)


def test_sequence_first_models_take_batch_dim() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 3)).double()
    x = normal(4, 3, 8)  # [time, batch, features]
    with gs.capture(model, batch_dim=1) as tape:
        tape.backward(model(x).square().sum())
    assert {tuple(r.h.shape[:2]) for r in tape} == {(3, 4)}


def test_an_overwritten_input_is_reported() -> None:
    def overwrite(m: Any, x: Tensor) -> Tensor:
        x = x + 0
        z = m.layer(x)
        x.zero_()
        return z + x

    x, model = normal(3, 4), Around(overwrite, layer=nn.Linear(4, 4).requires_grad_(False))
    with gs.capture(model) as tape:
        model(x)
    with pytest.raises(LayerError, match=r"'layer' was modified in place.*overwrite a copy of it \(x.clone\(\)\)"):
        _ = tape["layer"].h


@pytest.mark.parametrize("frozen", ["first", "all"])
def test_frozen_layers_still_get_deltas(frozen: str) -> None:
    model, x, y = BY_NAME["mlp"].make()
    expected = captured(copy.deepcopy(model), x, y)
    for p in model.parameters() if frozen == "all" else model[0].parameters():
        p.requires_grad_(False)
    tape = captured(model, x, y)
    for name in ("0", "2", "4"):
        close(tape[name].D, expected[name].D)


@pytest.mark.parametrize("parts", [[6], [2, 4]])
def test_reduction_mean_is_undone_in_every_forward(parts: list[int]) -> None:
    model, x, y = BY_NAME["mlp"].make()
    delta = torch.stack([row[0] for row in preactivation_gradients(model, model[0], x, y, sample_losses)])
    (D,) = torch.autograd.grad(sample_losses(model(x), y).sum(), model[0].weight)
    with gs.capture(model, reduction="mean") as tape:
        for inputs, target in zip(x.split(parts), y.split(parts), strict=True):
            F.cross_entropy(model(inputs), target).backward()
    close(tape["0"].delta, delta)
    close(tape["0"].D, D)


def test_captured_weight_is_the_one_of_the_forward() -> None:
    model, x, y = BY_NAME["mlp"].make()
    before = model[0].weight.detach().clone()
    with gs.capture(model) as tape:
        tape.backward(sample_losses(model(x), y))
        with torch.no_grad():
            model[0].weight.zero_()
    close(tape["0"].weight, before)


def test_module_outputs_and_their_errors() -> None:
    model, x, _ = BY_NAME["encoder"].make()
    with gs.capture(model, outputs="0", gradients=False) as tape:
        model(x)
    close(tape.outputs["0"], model[0](x).detach())
    with pytest.raises(LayerError, match="outputs: no module 'nothing'"), gs.capture(model, outputs="nothing"):
        pass


def test_errors_name_the_layer_and_the_remedy() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    with gs.capture(model) as tape:
        model(x)
    with pytest.raises(LayerError, match="no gradient reached layer '0'"):
        _ = tape["0"].delta
    with pytest.raises(LayerError, match="no captured layer '7'; there are: 0, 2, 4"):
        _ = tape["7"]
    with pytest.warns(ResultWarning, match="nothing was captured"), gs.capture(nn.Linear(2, 2)):
        pass


def test_an_unused_layer_is_named() -> None:
    model, x = Around(lambda m, x: m.used(x), used=nn.Linear(3, 3), unused=nn.Linear(3, 3)), normal(2, 3)
    with gs.capture(model) as tape:
        model(x)
    assert tape.unsupported == {"unused": ("not applied", "the forward did not call it")}
    with pytest.raises(LayerError, match="never applied: unused"), gs.capture(model, ["used", "unused"]):
        model(x)


def gated(m: Any, x: Tensor) -> Tensor:
    """Reads a layer's output, then overwrites it: on sequences that output is a view."""
    z = m.inner(x)
    gate = z.mean(-1, keepdim=True)
    z.mul_(0.5)
    return m.head(z) * gate


@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 3), (5, 2, 2, 3)])
def test_in_place_operations_on_views(shape: tuple[int, ...]) -> None:
    model, x = Around(gated, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), normal(*shape)
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    for net, own in product((model, relu), (True, False)):
        with gs.capture(net, outputs="inner" if net is model else ()) as tape:
            total = net(x).square().sum()
            total.backward() if own else tape.backward(total)
        close_to_autograd(tape, net(x).square().sum())
        if net is model:
            close(tape.outputs["inner"], model.inner(x).detach())


def test_applications_of_different_lengths_add_up() -> None:
    layer, x = nn.Linear(3, 2).double(), normal(4, 3)
    with gs.capture(layer) as tape:
        (layer(x).square().sum() + layer(torch.cat([x, 2 * x])).square().sum()).backward()
    delta = torch.cat([2 * layer(x), 2 * layer(torch.cat([x, 2 * x]))]).detach()
    close(tape["(model)"].Sigma, delta.T @ delta)


def test_sums_are_full_precision_inside_autocast(generator) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(50, 6, generator=generator)
    with torch.autocast("cpu", torch.bfloat16), gs.capture(model) as tape:
        tape.backward(model(x).square().sum())
        delta, Sigma, D = tape["0"].delta.double(), tape["0"].Sigma, tape["0"].D
    assert tape["0"].delta.dtype == torch.bfloat16
    assert Sigma.dtype == torch.float32
    torch.testing.assert_close(Sigma.double(), delta[:, 0].T @ delta[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(D.double(), delta[:, 0].T @ x.double(), rtol=1e-5, atol=1e-6)


def test_only_the_last_output_of_a_module_is_kept() -> None:
    layer = nn.Linear(2, 2)
    with gs.capture(layer, outputs="(model)") as tape:
        layer(torch.zeros(1, 2))
        last = layer(torch.ones(3, 2))
    assert torch.equal(tape.outputs["(model)"], last)
    assert tape.output_counts == {"(model)": 2}


def test_batch_normalisation_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    x = normal(6, 5)
    message = r"BatchNorm1d '1' is in train mode.*\.D is still the weight gradient"
    with pytest.warns(ResultWarning, match=message), gs.capture(model) as tape:
        model(x).square().sum().backward()
    torch.testing.assert_close(tape["0"].D, model[0].weight.grad)
    before = model[1].running_mean.clone()
    with pytest.raises(LayerError, match="BatchNorm1d '1' is in train mode"):
        gs.collect(model, x, eval_mode=False)  # also without a loss
    assert torch.equal(before, model[1].running_mean)
    with gs.capture(model, gradients=False):
        model(x)
    with gs.capture(model.eval()):
        model(x).sum().backward()


def test_reentrant_checkpoints_say_what_to_do() -> None:
    model, x, y = Checkpointed(reentrant=True).double(), normal(6, 4), torch.arange(6) % 3
    for call in (
        lambda: captured(model, x, y),
        lambda: gs.measure(model, (x, y), F.cross_entropy),
        lambda: gs.agop(model, x),
    ):
        with pytest.raises((LayerError, RuntimeError), match="use_reentrant=False"):
            call()
