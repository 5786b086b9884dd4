"""One line after a Trainer run and after a Lightning run: ``callback.report("page.html")``.

    python studies/over_training.py train FOLDER
    python studies/callbacks.py FOLDER/step1500 OUT

The character model of ``over_training.py`` is fine-tuned to English prose by both, sixty steps each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fine_tuning_alarm import texts
from over_training import draw, encode
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from gramscope.integrations.lightning import GramscopeCallback as LightningCallback
from gramscope.integrations.transformers import GramscopeCallback as TrainerCallback

STEPS, EVERY, BATCH = 60, 10, 8
MEASURES = ["nfa_above", "target_linearity", "effective_rank", "gradient_norm"]


class Tuned(pl.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.net: nn.Module = GPT2LMHeadModel.from_pretrained(base)

    def forward(self, **batch: Tensor) -> Any:
        """The model's output."""
        return self.net(**batch)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """The model's own loss."""
        return self(**batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(base: Path, out: Path) -> None:
    """Train twice and write two pages."""
    tokens = encode(texts()["prose"])
    batch = draw(tokens, torch.Generator().manual_seed(0), STEPS * BATCH + 16)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(len(batch["input_ids"]))]
    held_out = {name: value[-16:] for name, value in batch.items()}
    out.mkdir(parents=True, exist_ok=True)

    callback = TrainerCallback(rows[-16:], measures=MEASURES, every_n_steps=EVERY)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, report_to=[], disable_tqdm=True,
            use_cpu=True, dataloader_pin_memory=False, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        Trainer(
            GPT2LMHeadModel.from_pretrained(base), arguments, train_dataset=rows[:-16], callbacks=[callback]
        ).train()
    callback.report(out / "trainer.html")
    print(callback.series)

    other = LightningCallback(held_out, measures=MEASURES, every_n_steps=EVERY, module="net")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[other],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Tuned(base), torch.utils.data.DataLoader(rows[:-16], batch_size=BATCH))
    other.report(out / "lightning.html")
    print(other.series)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    main(arguments.base, arguments.out)
