"""A character model of six blocks, trained here, and its series: interrupted, continued, and drawn.

    python studies/over_training.py train FOLDER     # 24 checkpoints FOLDER/step*/, their tokenizer, and FOLDER/held-out.txt
    python studies/over_training.py series FOLDER    # the series, then once more with a kill in the middle; pictures

The text is the sources of Python's standard library, one token for each character.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import gramscope as gs

LENGTH, BATCH, STEPS, CHECKPOINTS, RATE = 64, 24, 1500, 24, 2e-3
LETTERS = ["\n", *map(chr, range(32, 127))]
SIZES = {"vocab_size": len(LETTERS), "n_positions": LENGTH, "n_embd": 96, "n_layer": 6, "n_head": 4}


def sources() -> str:
    """The modules of Python's standard library in the order of their names; other characters are question marks."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return characters("".join(file.read_text(encoding="utf-8", errors="replace") for file in files))


def characters(text: str) -> str:
    """The text in the model's characters."""
    known = set(LETTERS)
    return "".join(letter if letter in known else "?" for letter in text)


def encode(text: str) -> Tensor:
    """Token numbers of a text."""
    numbers = {letter: i for i, letter in enumerate(LETTERS)}
    return torch.tensor([numbers[letter] for letter in text])


def draw(tokens: Tensor, generator: torch.Generator, batch: int = BATCH) -> dict[str, Tensor]:
    """A batch of random sequences."""
    starts = torch.randint(len(tokens) - LENGTH, (batch,), generator=generator)
    ids = torch.stack([tokens[i : i + LENGTH] for i in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def new_model(seed: int = 0) -> GPT2LMHeadModel:
    """An untrained model without dropout."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )


def fit(
    model: Any,
    tokens: Tensor,
    steps: int,
    rate: float,
    seed: int = 0,
    decay: float = 0.01,
    batch: int = BATCH,
    after: Any = None,
) -> None:
    """Train with AdamW on a falling rate; ``after(step)`` is called before the first step and after each one."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50) * (1 - s / steps) + 1e-3)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps + 1):
        if after is not None:
            after(step)
        if step < steps:
            loss = model(**draw(tokens, generator, batch)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def held_out_loss(model: Any, tokens: Tensor, batches: int = 12) -> float:
    """The mean loss on fixed sequences."""
    generator = torch.Generator().manual_seed(99)
    model.eval()
    return sum(float(model(**draw(tokens, generator, 32)).loss) for _ in range(batches)) / batches


def train(folder: Path) -> None:
    """Train the model and save its checkpoints."""
    text = sources()
    cut = len(text) * 9 // 10
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held-out.txt").write_text(text[cut : cut + 50_000])
    letters = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=letters, merges=[])))
    wanted = {0, *(round(4 * (STEPS / 4) ** (i / (CHECKPOINTS - 2))) for i in range(CHECKPOINTS - 1))}
    model = new_model()

    def save(step: int) -> None:
        if step in wanted:
            model.save_pretrained(folder / f"step{step}")
            tokenizer.save_pretrained(folder / f"step{step}")
            print(f"step {step}: held-out loss {held_out_loss(model, encode(text[cut:])):.3f}", flush=True)
            model.train()

    start = time.monotonic()
    fit(model, encode(text[:cut]), STEPS, RATE, after=save)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {time.monotonic() - start:.0f} s")


def series(folder: Path) -> None:
    """Make the series whole, then with a kill in the middle, and compare; print the memory; draw."""
    whole, cut = folder / "whole", folder / "killed"
    for place in (whole, cut):
        shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-m", "gramscope_lab", "series", str(folder), "--text", str(folder / "held-out.txt"),
               "--length", str(LENGTH), "--samples", "32", "--out"]  # fmt: skip
    start = time.monotonic()
    subprocess.run([*command, str(whole)], check=True)
    print(
        f"{time.monotonic() - start:.0f} s, peak {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB"
    )
    process = subprocess.Popen([*command, str(cut)], stdout=subprocess.DEVNULL)
    while len(list(cut.glob("step-*.json"))) < CHECKPOINTS // 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    print(f"killed after {len(list(cut.glob('step-*.json')))} tables")
    subprocess.run([*command, str(cut)], check=True, stdout=subprocess.DEVNULL)
    one, other = gs.Series.load(whole), gs.Series.load(cut)
    print(f"{len(one)} tables; equal to those of the interrupted series: {one == other}")
    for column in ("nfa_above", "target_linearity", "feature_rank"):
        one.plot(column).savefig(folder / f"{column}.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "series"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    {"train": train, "series": series}[arguments.command](arguments.folder)
