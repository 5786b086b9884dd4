"""Hugging Face's Trainer with our callback and optimizers: tiny models of every kind, records read back, runs resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from refusals import assert_refused

t = pytest.importorskip("transformers")

from gramscope.integrations.transformers import FILE, GramscopeCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*num_items_in_batch.*:UserWarning"),
]

WORDS = 19
BERT = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6,
    "max_position_embeddings": 12, "num_labels": 3,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Rows = list[dict[str, Tensor]]


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    return peft.get_peft_model(MODELS["bert"](), config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**BERT)),
    "gpt2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=WORDS, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**LLAMA, num_local_experts=3)),
    "t5": lambda: t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=WORDS, d_model=8, d_kv=4, d_ff=6, num_layers=1, num_heads=2, decoder_start_token_id=0, bos_token_id=1
        )
    ),
    "vit": lambda: t.ViTForImageClassification(
        t.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, image_size=4, patch_size=2,
            num_labels=3,
        )
    ),
    "lora": lora,
}  # fmt: skip


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        return MODELS[kind]()


def rows(kind: str, count: int = 24) -> Rows:
    """Samples as a data set holds them: sentences of different lengths, not yet padded, or images."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        words = torch.randint(3, WORDS, (3 + i % 4,), generator=generator)
        label = torch.tensor(i % 3)
        if kind == "vit":
            found.append({"pixel_values": torch.randn(3, 4, 4, generator=generator), "labels": label})
        elif kind in ("bert", "lora"):
            found.append({"input_ids": words, "labels": label})
        else:
            found.append({"input_ids": words, "labels": words.flip(0) if kind == "t5" else words})
    return found


def collate(samples: Rows) -> dict[str, Tensor]:
    """Pads words with 0 and labels with −100, as transformers' collators do."""
    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        if parts[0].dim() == 1:
            fill = -100 if name == "labels" else 0
            batch[name] = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)
            if name == "input_ids":
                ones = [torch.ones_like(part) for part in parts]
                batch["attention_mask"] = nn.utils.rnn.pad_sequence(ones, batch_first=True)
        else:
            batch[name] = torch.stack(parts)
    return batch


def trainer(model: nn.Module, kind: str, folder: Path, callbacks: Any = (), **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("optimizers", "optimizer_cls_and_kwargs") if name in options}
    arguments = t.TrainingArguments(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": 0.01,
            "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "seed": 0,
            "dataloader_pin_memory": False, "logging_strategy": "no", "remove_unused_columns": False, **options,
        }
    )  # fmt: skip
    return t.Trainer(
        model, arguments, train_dataset=rows(kind), data_collator=collate, callbacks=list(callbacks), **given
    )


def numbers(table: Any) -> dict[str, float]:
    return {
        f"gramscope/{name}/{layer}": value
        for layer, row in table.rows.items()
        for name, value in row.items()
        if value is not None
    }


@pytest.mark.parametrize("kind", MODELS)
def test_records_of_a_run_equal_measure(kind: str, tmp_path: Path) -> None:
    model, held = made(kind), rows(kind, 40)[24:]
    measures = ["target_linearity", "gradient_norm", "surrogate"]
    callback = GramscopeCallback(held, measures=measures, every_n_steps=2, ridge=1e-3)
    found = trainer(model, kind, tmp_path, [callback])
    found.train()
    assert [record["step"] for record in callback.records] == [0, 2, 4]
    batch = collate(held)
    expected = numbers(gs.measure(model, batch, measures=measures, ridge=1e-3))
    assert len(expected) >= 8
    last = found.state.log_history[-2]  # the last one is the summary of the training
    logged = {name: value for name, value in last.items() if name.startswith("gramscope") and name.count("/") == 2}
    assert logged == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert last["step"] == 4
    loss = gs.measure(model, batch, measures=["gradient_norm"]).network["loss"]
    assert last["gramscope/loss"] == pytest.approx(loss)
    assert callback.records[0]["network"]["loss"] != pytest.approx(loss, rel=1e-6)
    assert callback.series.network("loss")[4] == pytest.approx(loss)
    pytest.importorskip("plotly")
    callback.report(tmp_path / "page.html")
    assert all(f'"label":"{name}"' in (tmp_path / "page.html").read_text() for name in measures)


class Whitened(gs.GramWhitened):
    def __init__(self, params: Any, network: nn.Module, **options: Any) -> None:
        super().__init__(torch.optim.AdamW(params, **options), network)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "vcl": lambda model: {"optimizers": (gs.VCL(model, gamma=0.05), None)},
    "vcl by class": lambda model: {"optimizer_cls_and_kwargs": (gs.VCL, {"model": model, "gamma": 0.05})},
    "free muon": lambda model: {"optimizers": (gs.FreeMuon(model), None)},
    "whitened": lambda model: {
        "optimizers": (gs.GramWhitened(torch.optim.AdamW(model.parameters(), lr=0.01), model), None)
    },
    "whitened by class": lambda model: {"optimizer_cls_and_kwargs": (Whitened, {"network": model, "lr": 0.01})},
}


@pytest.mark.parametrize("name", ["vcl", "whitened by class"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Weights, the schedule of learning rates, and all records, also those compared with the initial weights."""
    callback = partial(GramscopeCallback, measures=["weight_norm", "weight_change"], every_n_steps=1)
    straight, whole = made("bert"), callback()
    trainer(straight, "bert", tmp_path / "a", [whole], max_steps=6, **OPTIMIZERS[name](straight)).train()
    interrupted, second = made("bert"), callback()
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}

    class Stop(t.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            control.should_training_stop = state.global_step == 3

    trainer(interrupted, "bert", tmp_path / "b", [second, Stop()], **saving, **OPTIMIZERS[name](interrupted)).train()
    saved = tmp_path / "b" / "checkpoint-3"
    assert (saved / FILE).is_file()
    resumed, third = made("bert"), callback()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.add_(1.0)  # the checkpoint's weights must replace these, also as the initial ones
    again = trainer(resumed, "bert", tmp_path / "b", [third], **saving, **OPTIMIZERS[name](resumed))
    again.train(resume_from_checkpoint=str(saved))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert list(third.records) == list(whole.records)
    assert [record["step"] for record in third.records] == list(range(7))
    assert whole.records[-1]["layers"]["classifier"]["weight_change"] > 0


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "vit", "mixtral", "lora"])
def test_other_models_train_with_our_optimizers(kind: str, tmp_path: Path) -> None:
    for name in ("vcl by class", "free muon", "whitened"):
        model = made(kind)
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        options = OPTIMIZERS[name](model)
        if kind == "lora" and name == "vcl by class":  # Algorithm 1 cannot move weights that are zero
            options["optimizer_cls_and_kwargs"][1]["layers"] = "*.lora_A.*"
        callback = GramscopeCallback(every_n_steps=1, measures=["weight_norm"])
        trainer(model, kind, tmp_path, [callback], max_steps=2, gradient_accumulation_steps=2, **options).train()
        assert [record["step"] for record in callback.records] == [0, 1, 2]  # steps of the optimizer, not batches
        moved = [n for n, p in model.named_parameters() if n in before and not torch.equal(before[n], p)]
        assert len(moved) > 0.7 * len(before), set(before) - set(moved)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_numbers_go_through_the_trainer_to_its_reporters(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(t.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
            seen.append(dict(logs))

    found = trainer(made("bert"), "bert", tmp_path, [Reporter()], num_train_epochs=2, max_steps=-1, bf16=True)
    callback = GramscopeCallback(trainer=found, every_n_epochs=1, log=lambda step, record: steps.append(step))
    steps: list[int] = []
    found.add_callback(callback)
    found.train()
    assert steps == [record["step"] for record in callback.records] == [0, 3, 6]
    reported = [entry for entry in seen if "gramscope/accuracy" in entry]
    assert len(reported) == 3
    expected = gs.measure(found.model, collate(rows("bert")), measures=["target_linearity"])
    name = "bert.encoder.layer.0.output.dense"
    assert reported[-1][f"gramscope/target_linearity/{name}"] == pytest.approx(
        expected[name]["target_linearity"], rel=1e-6
    )
    json.dumps(found.state.log_history)


def test_wrong_arguments_are_refused() -> None:
    assert_refused("every_n_steps=2 and every_n_epochs=1", GramscopeCallback, every_n_steps=2, every_n_epochs=1)
    with pytest.raises(TypeError, match="no argument 'every'; there are: every_n_steps, every_n_epochs"):
        GramscopeCallback(every=3)
    with pytest.raises(TypeError, match="no argument 'mesures'; did you mean 'measures'"):
        GramscopeCallback(mesures="nfa")
    assert_refused("positive whole number", GramscopeCallback, every_n_steps=0)
    assert_refused("log=3", GramscopeCallback, log=3)
