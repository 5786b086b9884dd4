"""A small language model trained by Hugging Face's Trainer with whitened AdamW, and measured on held-out sentences."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import gramscope as gs
from gramscope.integrations.transformers import GramscopeCallback

set_seed(0)
words = 40
starts = torch.randint(3, words, (300, 1))
sentences = 3 + (starts - 3 + 5 * torch.arange(12)) % (words - 3)  # each word is five after the one before
rows = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=words, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
)


class Whitened(gs.GramWhitened):
    """Made from parameters, as the trainer makes optimizers."""

    def __init__(self, params, **options):
        super().__init__(torch.optim.AdamW(params, **options), model)


callback = GramscopeCallback(rows[256:], measures=["target_linearity", "effective_rank"], every_n_steps=16, ridge=1e-3)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=64,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows[:256],
        callbacks=[callback],
        optimizer_cls_and_kwargs=(Whitened, {"lr": 3e-3}),
    )
    trainer.train()
for entry in trainer.state.log_history:
    if "gramscope/accuracy" in entry:
        linearity = entry["gramscope/target_linearity/transformer.h.1.mlp.c_proj"]
        print(f"step {entry['step']}: accuracy {entry['gramscope/accuracy']:.3f}, target linearity {linearity:.3f}")
