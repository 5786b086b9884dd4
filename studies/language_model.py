"""What the default table of a GPT-2 costs, against the model's own forward and backward passes on the same batches.

python studies/language_model.py [91M|124M|small] [--sequences 64] [--length 128] [--batch 4] [--threads 1]

``small`` has two of the twelve blocks and half the sequences, for trying changes. The model is made from its configuration,
with random weights; the tokens are random too. Each of the two runs has a process of its own, so that the peak memory of one
does not count for the other. Times are of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

USUAL = {
    "sequences": 64,
    "length": 128,
    "batch": 4,
    "layers": 12,
    "width": 768,
    "heads": 12,
    "vocabulary": 8192,
    "positions": 128,
    "threads": 1,
}
SIZES: dict[str, dict[str, int]] = {
    "91M": {},
    "124M": {"vocabulary": 50257, "positions": 1024},
    "small": {"layers": 2, "sequences": 32},
}


def model_and_batches(options: argparse.Namespace) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """GPT-2 and its batches, as a loader would give them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=options.positions,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        bos_token_id=1,
        eos_token_id=2,
    )
    ids = torch.randint(3, options.vocabulary, (options.sequences, options.length))
    return GPT2LMHeadModel(config).eval(), [
        {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part}
        for part in ids.split(options.batch)
    ]


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of all batches."""
    model, batches = model_and_batches(options)
    start = time.process_time()
    for batch in batches:
        model(**batch).loss.backward()
    return {"seconds": time.process_time() - start, "bytes": _peak(), "parameters": model.num_parameters()}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The table that ``gs.measure`` gives without further arguments."""
    import gramscope as gs

    model, batches = model_and_batches(options)
    start = time.process_time()
    table = gs.measure(model, batches)
    empty = sum(value is None for row in table.rows.values() for value in row.values())
    cells = sum(len(row) for row in table.rows.values())
    seconds = time.process_time() - start
    return {"seconds": seconds, "bytes": _peak(), "table": str(table), "empty": empty, "cells": cells}


def _peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the table, and time and memory of both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=SIZES, default="91M")
    for name in USUAL:
        parser.add_argument(f"--{name}", type=int, help=f"default {USUAL[name]}, or as the size has it")
    options = parser.parse_args()
    for name, value in (USUAL | SIZES[options.size]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        base, ours = pool.submit(plain, options).result(), pool.submit(measured, options).result()
    print(ours["table"])
    print(
        f"\n{base['parameters']:,} parameters, {options.sequences} × {options.length} tokens in batches of "
        f"{options.batch}, threads: {options.threads}"
    )
    print(f"forward and backward: {base['seconds']:.1f} s, peak {base['bytes'] / 1e9:.2f} GB")
    print(f"gs.measure:           {ours['seconds']:.1f} s, peak {ours['bytes'] / 1e9:.2f} GB")
    more = (ours["bytes"] - base["bytes"]) / 1e9
    print(f"ratio {ours['seconds'] / base['seconds']:.2f} (goal ≤ 4), memory {more:+.2f} GB (goal ≤ +0.6)")
    print(f"{ours['empty']} of {ours['cells']} cells without a value")


if __name__ == "__main__":
    main()
