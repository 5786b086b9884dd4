"""Models of transformers: their own losses and labels, padding, and functions beside ``gs.measure``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.statistics.run import OWN_LOSS
from single_samples import RIDGE
from small_models import CAUSAL, SAMPLES, Batch, batches, subject

MEASURES = ["gradient_norm", "nfa", "target_linearity", "nc1"]


def measured(name: str, data: Any, loss: Any = None, **options: Any) -> Any:
    return gs.measure(subject(name).model, data, loss, measures=MEASURES, ridge=RIDGE, **options)


def assert_equal(found: Any, expected: Any, rel: float = 1e-9) -> None:
    assert found.network["loss"] == pytest.approx(expected.network["loss"], rel=rel)
    assert list(found) == list(expected)
    for name in expected:
        for measure, value in expected[name].items():
            other = found[name][measure]
            assert other is value is None or other == pytest.approx(value, rel=rel, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("name", [*CAUSAL[:3], "BERT, sequences", "BERT, tokens", "BERT, masked", "T5", "ViT"])
def test_a_models_own_loss_is_that_of_its_labels(name: str) -> None:
    data = batches(name, "none" if name == "ViT" else "right")
    table = measured(name, data)
    assert_equal(table, measured(name, data, nn.CrossEntropyLoss()), rel=1e-4)  # models compute their loss in float32
    assert table.notes["(loss)"].text == OWN_LOSS  # a mean, which couples no samples
    shifted = "next-token labels: the output at position t is compared with the label at t + 1"
    assert (shifted in " ".join(str(table).split())) == (name in CAUSAL) == ("(targets)" in table.notes)
    if name in CAUSAL:
        assert "means over all positions (tokens, pixels) that count" in table.notes["(positions)"].text
        assert table.network["positions"] == subject(name).oracle.terms
        unmasked = [batch | {"labels": batch["input_ids"]} for batch in data]  # labels at padding
        assert_equal(measured(name, unmasked), table)


def test_other_terms_of_a_models_own_loss() -> None:
    """A router's balance is a part of the model's loss and of its gradient; the labels are shifted all the same."""
    model, batch = subject("Mixtral").model, batches("Mixtral", "right")[0]
    with mock.patch.object(model.config, "output_router_logits", True), gs.capture(model, gradients=False):
        table = measured("Mixtral", batch)
        loss = model(**batch, output_router_logits=True).loss  # with experts in float64, as a capture computes them
    (gradient,) = torch.autograd.grad(loss, model.model.layers[0].self_attn.o_proj.weight)
    assert table.network["loss"] == pytest.approx(float(loss.detach()))
    assert table["model.layers.0.self_attn.o_proj"]["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert "(targets)" in table.notes


def test_sequences_of_one_length_in_encoder_and_decoder() -> None:
    """The decoder's get one ignored position more, as if its labels had been padded further."""
    data = []
    for batch in batches("T5", "right"):
        more = batch["input_ids"].shape[1] - batch["labels"].shape[1]
        data.append(batch | {"labels": F.pad(batch["labels"], (0, more), value=-100)})
    longer = [batch | {"labels": F.pad(batch["labels"], (0, 1), value=-100)} for batch in data]
    table = measured("T5", data)
    assert_equal(table, measured("T5", longer))
    assert table["encoder.block.0.layer.0.SelfAttention.q"]["nfa"] is not None
    assert table["encoder.block.0.layer.0.SelfAttention.q"]["target_linearity"] is None


def test_kernels_take_what_measure_takes_and_do_not_see_padding() -> None:
    own, name = subject("Llama"), "model.layers.0.mlp.up_proj"
    W, JtJ = own.oracle.weights[name][0], own.oracle.JtJ[name][0]
    close: Any = {"rtol": 1e-3, "atol": 1e-5}  # pads on the left move angles, which are in float32
    duals = []
    for side in ("right", "left"):
        whole = batches("Llama", side)
        bare = [{key: value for key, value in batch.items() if key != "labels"} for batch in whole]
        K = gs.tangent_kernel(own.model, bare)[name]
        torch.testing.assert_close(K, JtJ / SAMPLES, **close)
        for data in (whole, [(batch,) for batch in bare]):
            unpack = None if data is whole else lambda batch: (batch[0], None)
            torch.testing.assert_close(gs.agop(own.model, data, unpack=unpack)[name], W.T @ K @ W)
        sketched = gs.agop(own.model, bare, sketch=4, generator=torch.Generator().manual_seed(0))[name]
        duals.append((gs.dual_tangent_kernel(own.model, bare)[name], sketched))
    assert torch.trace(duals[0][0]) == pytest.approx(float(torch.trace(JtJ)))
    for one, other in zip(*duals, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_tokens_of_padded_sequences() -> None:
    """A position counts tokens, not pads; the mean is over tokens."""
    own, layer = subject("BERT, sequences"), "bert.encoder.layer.0.attention.self.query"
    found = []
    for side in ("right", "left"):
        data = batches("BERT, sequences", side)
        found.append([gs.collect(own.model, data, tokens=t)[layer].features.joint for t in ("mean", 0, -1, "each")])
    for right, left in zip(*found, strict=True):
        assert right.n == left.n
        torch.testing.assert_close(right.C_hh, left.C_hh)
    rows = [sample["input_ids"] for sample in own.samples]
    assert [moments.n for moments in found[0]] == [SAMPLES] * 3 + [sum(row.shape[1] for row in rows)]
    with gs.capture(own.model, layer, gradients=False) as tape:
        last = []
        for row in rows:
            own.model(row)
            last.append(tape[layer].h[0, -1])
            tape.clear()
    torch.testing.assert_close(found[0][2].mean_h, torch.stack(last).mean(0))
    (padded, *_) = batches("BERT, sequences", "left")
    del padded["position_ids"]
    assert "position_ids" in str(gs.measure(own.model, padded, measures="weight_norm"))


def test_labels_that_are_stated_are_taken_as_they_are() -> None:
    """A pair (x, y), unpack= and a function of one's own state their labels; only those of a mapping are the model's."""
    data = batches("GPT-2", "right")
    expected = measured("GPT-2", data, nn.CrossEntropyLoss())

    def shifted(batch: Batch) -> tuple[Batch, Tensor]:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return inputs, F.pad(batch["labels"][:, 1:], (0, 1), value=-100)

    def next_token(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].mT, labels[:, 1:], reduction="sum")

    def of_batch(returned: Any, batch: Batch) -> Tensor:
        return next_token(returned.logits, batch["labels"])

    own = measured("GPT-2", data, nn.CrossEntropyLoss(), unpack=shifted)
    assert "(targets)" not in own.notes
    assert_equal(own, expected)
    for loss in (next_token, of_batch):  # summed by themselves: the mean is over the sequences
        table = measured("GPT-2", data, loss, reduction="sum")
        ratio = expected.network["positions"] / SAMPLES
        assert table.network["loss"] == pytest.approx(expected.network["loss"] * ratio)
        assert table["lm_head"]["gradient_norm"] == pytest.approx(expected["lm_head"]["gradient_norm"] * ratio)
        assert table["lm_head"]["target_linearity"] == pytest.approx(expected["lm_head"]["target_linearity"])


def test_a_monitor_and_the_second_pass() -> None:
    own, data, names = subject("GPT-2"), batches("GPT-2", "right"), [*MEASURES, "nc4"]
    monitor = gs.Monitor(own.model, data, measures=names, ridge=RIDGE, samples=SAMPLES)
    expected = gs.measure(own.model, data, measures=names, ridge=RIDGE)
    for name, row in monitor.records[0]["layers"].items():
        assert row == pytest.approx(expected[name], nan_ok=True), name
    H = torch.stack(own.oracle.rows["lm_head"])
    collapse = gs.neural_collapse(H, own.oracle.labels, own.model.lm_head)
    assert expected["lm_head"]["nc4"] == pytest.approx(collapse.nc4)


def test_labels_that_the_model_cannot_use() -> None:
    """A target under the name of the model's own labels, of another task: the model is called without it."""
    y = torch.randn(SAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = batches("GPT-2", "right")
    for batch, labels in zip(data, (y[:7], y[7:]), strict=True):
        batch["labels"] = labels

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0, :2] - target).square().sum(1)

    stated = [({key: b[key] for key in ("input_ids", "attention_mask")}, b["labels"]) for b in data]
    assert_equal(measured("GPT-2", data, loss), measured("GPT-2", stated, loss))
