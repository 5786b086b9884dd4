"""Capture and measures on Hugging Face's own classes, built from small configurations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import joined

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(30, (6, 7), generator=generator)


def next_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)


def test_gpt2_gradients_equal_autograd_and_the_tied_head_is_told_apart(ids: Tensor) -> None:
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).double()
    labels = ids.clone()
    labels[:, :2] = -100
    batches = [{"input_ids": ids[i : i + 3], "labels": labels[i : i + 3]} for i in (0, 3)]
    stats = gs.collect(model, batches, next_token_losses, autograd=True)
    assert {layer.name.split(".")[-1] for layer in stats} == {"wte", "c_attn", "c_proj", "c_fc", "lm_head"}
    for layer in stats:
        if not layer.tied:
            torch.testing.assert_close(layer.D, layer.autograd, rtol=1e-9, atol=1e-12)
    # the head shares its parameter with the embedding, whose part of the gradient is not the head's
    assert (stats["lm_head"].D - stats["lm_head"].autograd).norm() > 1e-3
    head, embedding = stats["lm_head"], stats["transformer.wte"]
    torch.testing.assert_close(head.D + embedding.D.mT, head.autograd, rtol=1e-9, atol=1e-12)
    assert "serve all 3 samples" in joined(stats.notes["transformer.wpe"]).text
    assert stats["lm_head"].features.n == 6 * 5  # labelled tokens


def test_bert_blocks_by_cls_token_and_by_labelled_tokens(ids: Tensor) -> None:
    sequence = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=2)).double()
    labels = torch.arange(6) % 2
    batch = [{"input_ids": ids, "labels": labels}]
    table = gs.measure(sequence, batch, nn.CrossEntropyLoss(), outputs="bert.encoder.layer.*", tokens=0, ridge=1.0)
    assert [name for name in table if name.startswith("bert.encoder.layer.") and name.count(".") == 3] == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
    ]
    sequence.eval()
    hidden = sequence(input_ids=ids, output_hidden_states=True).hidden_states[2][:, 0].detach()
    expected = float(gs.target_linearity(hidden, labels, ridge=1.0))
    assert table["bert.encoder.layer.1"]["target_linearity"] == pytest.approx(expected, rel=1e-9)

    tagger = transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=3)).double().eval()
    tags = torch.arange(42).reshape(6, 7) % 3
    tags[:, 0] = -100
    first_words = torch.zeros(6, 7, dtype=torch.bool)
    first_words[:, 1::2] = True
    stats = gs.collect(
        tagger,
        [{"input_ids": ids, "labels": tags}],
        outputs="bert.encoder.layer.1",
        tokens=lambda inputs, target: first_words,
    )
    hidden = tagger(input_ids=ids, output_hidden_states=True).hidden_states[2][first_words].detach()
    torch.testing.assert_close(stats.outputs["bert.encoder.layer.1"].features.joint.mean_h, hidden.mean(0))
