"""One pass over a loader against dense autograd, whatever the batch size, and what it refuses."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, CASES, Around, Case, captured, normal, refused, sample_losses, split, twin_of
from comparing import assert_same
from gramscope.errors import InputError, LayerError, NumericalError, joined
from gramscope.statistics.matrix_sums import CenteredKernel


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_results_do_not_depend_on_the_batch_size(case: Case) -> None:
    model, x, y = case.make()
    options = {"reference": twin_of(model), "residuals": True, "gram": True}
    whole = gs.collect(model, (x, y), sample_losses, **options)
    for size in (1, 4):
        assert_same(whole, gs.collect(model, split(x, y, size), sample_losses, **options))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sums_equal_dense_autograd(case: Case) -> None:
    model, x, y = case.make()
    stats = gs.collect(model, split(x, y, 4), sample_losses, jacobians=True)
    assert stats.n == 6
    assert stats.network.loss == pytest.approx(sample_losses(model(x), y).mean().item())
    for record in captured(model, x, y):
        layer = stats[record.name]
        torch.testing.assert_close(layer.D, torch.einsum("...bsk,...bsd->...kd", record.delta, record.h))
        torch.testing.assert_close(layer.Sigma, torch.einsum("...bsk,...bsl->...kl", record.delta, record.delta))
        torch.testing.assert_close(layer.weight, record.weight)
        if layer.features is None:  # experts see tokens, not samples
            assert "rows for 4 samples" in joined(stats.notes[record.name]).text
            continue
        rows = record.h.mean(-2)
        if len(rows) == 24:  # a router sees the tokens of all samples in one axis
            rows = rows.reshape(6, 4, -1).mean(1)
        if layer.features.of_outputs:  # an embedding
            rows = rows @ record.weight.mT
        rows = rows.movedim(0, 1).flatten(1) if rows.dim() == 3 else rows
        joint = layer.features.joint
        onehot = F.one_hot(y).double()
        torch.testing.assert_close(joint.HtH, rows.T @ rows)
        torch.testing.assert_close(joint.HtY, rows.T @ onehot)
        torch.testing.assert_close(joint.C_hy, rows.T @ (onehot - onehot.mean(0)))


def test_module_outputs_and_named_outputs() -> None:
    inner, x, y = BY_NAME["encoder"].make()
    model = Around(lambda m, pixels: {"scores": m.inner(pixels), "extra": pixels}, inner=inner)
    batches = [{"pixels": x[:3], "labels": y[:3]}, {"pixels": x[3:], "labels": y[3:]}]
    refused(gs.collect, model, batches, sample_losses, match=r"keys \['scores', 'extra'\]; name one with output=")
    stats = gs.collect(model, batches, sample_losses, output="scores", outputs="inner.0", tokens=0)
    assert stats.outputs["inner.0"].features.n == 6
    torch.testing.assert_close(stats.outputs["inner.0"].features.joint.mean_h, inner[0](x)[:, 0].mean(0).detach())
    with pytest.raises(InputError, match="output='logits' is not in what the model returned"):
        gs.collect(model, batches, sample_losses, output="logits")


def test_float32_sums_and_gram_choice() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model.float(), (x.float(), y), F.cross_entropy, dtype=torch.float32, gram=False)
    assert stats["0"].D.dtype == torch.float32
    assert stats["0"].features.classes.C_hh is None
    refused(gs.collect, model, (x, y), dtype=torch.bfloat16, match="dtype=torch.bfloat16")


def test_dropout_is_off_and_everything_is_given_back() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    x, y = normal(6, 5), torch.arange(6) % 3
    model[1].eval()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = gs.collect(model, (x, y), F.cross_entropy)
    assert_same(first, gs.collect(model, split(x, y, 2), F.cross_entropy))
    assert torch.equal(rng, torch.get_rng_state())
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LayerError, match="BatchNorm1d '2' is in train mode"):
        gs.collect(model, (x, y), F.cross_entropy, eval_mode=False)


def test_not_finite_inputs_weights_and_losses() -> None:
    model, x, y = BY_NAME["mlp"].make()
    bad = x.clone()
    bad[2, 1] = float("nan")
    with pytest.raises(NumericalError, match="output is NaN or infinite in batch 1"):
        gs.collect(model, split(bad, y, 2), F.cross_entropy)
    with pytest.raises(NumericalError, match="the loss is -?inf in batch 0"):
        gs.collect(model, (x, y), lambda f, t: f.sum(1) * float("inf"))


def test_reference_of_another_shape() -> None:
    model, x, _ = BY_NAME["mlp"].make()
    other = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)).double()
    found = gs.collect(model, x, reference=other)
    assert "no such layer of the same shape" in str(found.notes["0"])
    assert CenteredKernel not in found["0"].sums
    assert CenteredKernel in found["4"].sums
    found = gs.collect(model, x, reference=copy.deepcopy(model)[:4])
    assert "its output has shape (6, 4) and the model's (6, 3)" in str(found.notes["(output)"])


def test_not_collected_says_what_to_ask_for() -> None:
    model, x, y = BY_NAME["mlp"].make()
    stats = gs.collect(model, (x, y), features=False)
    with pytest.raises(InputError, match="layer '0': this was not collected; collect with jacobians=True"):
        _ = stats["0"].K
    with pytest.raises(LayerError, match="no layer '9'; there are: 0, 2, 4"):
        _ = stats["9"]


def backbone(m: Any, x: Tensor) -> Tensor:
    """Registered in another order than it runs, with a part that has no gradient graph."""
    with torch.no_grad():
        x = m.frozen(x)
    return m.head(torch.tanh(m.body(x)))


def test_execution_order_and_parts_without_a_graph() -> None:
    model = Around(backbone, head=nn.Linear(4, 3), body=nn.Linear(5, 4), frozen=nn.Linear(5, 5))
    x, y = normal(30, 5), torch.arange(30) % 3
    kept = x.clone().requires_grad_()
    stats = gs.collect(model, (kept, y), F.cross_entropy, jacobians=True)
    assert list(stats.layers) == ["frozen", "body", "head"]
    assert kept.grad is None
    assert stats["frozen"].D is None
    assert "no_grad" in joined(stats.notes["frozen"]).text
    table = gs.measure(model, (x, y), F.cross_entropy, measures=["nc3", "nfa", "gradient_norm"])
    assert table["head"]["nc3"] is not None
    assert table["body"]["nc3"] is None
    assert table["frozen"]["gradient_norm"] is None


def test_samples_that_are_not_the_first_axis_of_the_output() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    twin = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False).double()
    twin.load_state_dict(layer.state_dict())
    x = normal(3, 5, 4)
    first = gs.collect(layer, x, jacobians=True)
    second = gs.collect(twin, x.transpose(0, 1), jacobians=True, batch_dim=1)
    for name in first.layers:
        torch.testing.assert_close(first[name].K, second[name].K)
    flat = nn.Sequential(nn.Linear(4, 2), nn.Flatten(0, 1)).double()
    refused(gs.collect, flat, x, jacobians=True, match=r"the output has shape \(15, 2\) for 3 samples; bring it to")


def test_an_unbatched_input_is_one_sample() -> None:
    linear = nn.Linear(3, 2, bias=False).double()
    x = torch.rand(3, dtype=torch.float64)
    W = linear.weight.detach()
    torch.testing.assert_close(gs.agop(linear, x)["(model)"], W.T @ W)
    assert gs.collect(linear, [x]).n == 1


def test_accuracy_needs_to_know_the_class_axis() -> None:
    conv = nn.Conv1d(2, 5, 1).double()
    x, y = normal(4, 2, 7), torch.arange(28).reshape(4, 7) % 5
    stats = gs.collect(conv, (x, y), F.cross_entropy, features=False)
    assert stats.network.accuracy == pytest.approx(float((conv(x).argmax(1) == y).double().mean()))
    assert gs.collect(conv, (x[..., :5], y[:, :5]), F.cross_entropy, features=False).network.accuracy is None


def test_half_precision_weights(generator) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(20, 6, generator=generator), torch.arange(20) % 3
    exact = gs.collect(model, (x, y), nn.CrossEntropyLoss(), jacobians=True)
    half = gs.collect(copy.deepcopy(model).bfloat16(), (x.bfloat16(), y), nn.CrossEntropyLoss(), jacobians=True)
    assert half["0"].D.dtype == torch.float64
    torch.testing.assert_close(half["0"].D, exact["0"].D, rtol=0.1, atol=0.1)
    torch.testing.assert_close(half["0"].K, exact["0"].K, rtol=0.1, atol=0.05)


def test_a_reference_that_shares_weights() -> None:
    model, x, y = BY_NAME["mlp"].make()
    with pytest.raises(
        InputError, match=r"reference shares 5 trainable parameters with the model \(0.weight, 0.bias, 2"
    ):
        gs.tangent_kernel(model, x, reference=model)
    with pytest.raises(InputError, match=r"reference shares 5 trainable"):
        gs.measure(model, (x, y), reference=copy.copy(model), measures="weight_change")
    # A frozen part may be shared: each network's own forward counts.
    model[0].requires_grad_(False)
    reference = nn.Sequential(model[0], *copy.deepcopy(list(model)[1:]))
    with torch.no_grad():
        reference[4].weight.add_(0.5)
    apart = copy.deepcopy(reference)
    chosen = ["0", "2", "4"]
    found, expected = (gs.tangent_kernel(model, x, chosen, reference=other) for other in (reference, apart))
    for name in expected:
        torch.testing.assert_close(found[name].K, expected[name].K)
        torch.testing.assert_close(found[name].K_centered, expected[name].K_centered)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gram": "yes"}, "gram='yes': give True, False or 'auto'"),
        ({"jacobians": "yes"}, "jacobians='yes': give True, False or 'auto'"),
        ({"features": "auto"}, "features='auto': give True or False"),
        ({"covariance": 1}, "covariance=1: give True or False"),
        ({"memory": "1GB"}, "memory='1GB': give a positive whole number of bytes"),
        ({"memory": 0}, "memory=0"),
    ],
)
def test_flags_that_are_none(options: dict[str, Any], message: str) -> None:
    model, x, y = BY_NAME["mlp"].make()
    refused(gs.collect, model, (x, y), **options, match=message)


def test_the_graph_of_a_batch_is_gone_before_the_next_forward() -> None:
    seen: list[Any] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad or torch.is_grad_enabled():
                assert all(node() is None for node in seen)
            hidden = Kept.apply(self.layer(x))
            if hidden.grad_fn is not None:
                seen.append(weakref.ref(hidden.grad_fn))
            return hidden

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    batches = [(torch.randn(1, 3), torch.tensor([0])) for _ in range(3)]
    gs.collect(Watched(), batches, nn.CrossEntropyLoss())
    assert len(seen) == 3
