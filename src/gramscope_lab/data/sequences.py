"""Data for models of transformers: a text cut into sequences by the model's own tokenizer, or arrays of an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramscope.errors import InputError, load_extra

#: files of which a tokenizer consists
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_sequences(
    text: Path | None, arrays: Path | None, tokenizer: Path, *, samples: int = 64, length: int = 128, batch: int = 4
) -> list[dict[str, torch.Tensor]]:
    """Batches of keyword inputs for a model of transformers, labels among them.

    Args:
        text: a text file; it is cut into sequences of ``length`` tokens, whose next tokens are the labels.
        arrays: an .npz file with ``input_ids [n, length]`` and other inputs; without ``labels`` the next tokens are.
        tokenizer: the folder of the model, whose tokenizer is used.
        samples: sequences at most.
        length: of a sequence, in tokens.
        batch: sequences in a batch.
    """
    if (text is None) == (arrays is None):
        raise InputError("give either a text (--text FILE.txt) or arrays with input_ids (--data FILE.npz)")
    inputs = _arrays(arrays) if arrays is not None else _tokens(text, tokenizer, samples, length)  # type: ignore[arg-type]
    n = min(samples, len(inputs["input_ids"]))
    return [{name: value[i : min(i + batch, n)] for name, value in inputs.items()} for i in range(0, n, batch)]


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    try:
        with np.load(path, allow_pickle=False) as file:
            inputs = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read as .npz: {error}") from error
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.is_floating_point():
        raise InputError(f"{path} needs whole numbers input_ids [sequences, length]; it holds {', '.join(inputs)}")
    lengths = {name: len(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{path}: its arrays have different lengths: {lengths}")
    inputs = {name: value if value.is_floating_point() else value.long() for name, value in inputs.items()}
    if "labels" not in inputs:
        mask = inputs.get("attention_mask")
        inputs["labels"] = inputs["input_ids"] if mask is None else inputs["input_ids"].masked_fill(mask == 0, -100)
    return inputs


def _tokens(path: Path, folder: Path, samples: int, length: int) -> dict[str, torch.Tensor]:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError(f"{folder} holds no tokenizer; give token numbers with --data FILE.npz (input_ids)")
    transformers: Any = load_extra("transformers", "transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        found = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from error
    count = min(samples, len(found) // length)
    if not count:
        raise InputError(f"{path} has {len(found)} tokens, fewer than one sequence of {length}; lower --length")
    ids = torch.tensor(found[: count * length], dtype=torch.long, device="cpu").view(count, length)
    return {"input_ids": ids, "labels": ids}
