"""Data for models of transformers: a text cut into sequences by the model's own tokenizer, or token numbers in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramscope.errors import InputError, load_extra

#: files of which a tokenizer consists
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_sequences(
    text: Path | None, data: Path | None, tokenizer: Path, *, samples: int = 64, length: int = 128, batch: int = 4
) -> list[dict[str, torch.Tensor]]:
    """Batches of keyword inputs for a model of transformers, labels among them.

    Args:
        text: a text file; it is cut into sequences of ``length`` tokens, whose next tokens are the labels.
        data: an .npz file with ``input_ids [n, length]`` and other inputs; without ``labels`` the next tokens are.
        tokenizer: the folder of the model, whose tokenizer is used.
        samples: sequences at most.
        length: of a sequence, in tokens.
        batch: sequences in a batch.
    """
    if (text is None) == (data is None):
        raise InputError("give either a text (--text FILE.txt) or token numbers (--data FILE.npz)")
    if data is not None:
        inputs = _arrays(data)
    elif text is not None:
        inputs = _cut(text, _tokenizer(tokenizer)(_read(text), add_special_tokens=False)["input_ids"], samples, length)
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


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError(f"{folder} holds no tokenizer; give token numbers with --data FILE.npz (input_ids)")
    transformers: Any = load_extra("transformers", "transformers")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from error


def _cut(path: Path, tokens: list[int], samples: int, length: int) -> dict[str, torch.Tensor]:
    """Sequences of ``length`` tokens."""
    count = min(samples, len(tokens) // length)
    if not count:
        raise InputError(f"{path} has {len(tokens)} tokens, fewer than one sequence of {length}; lower --length")
    ids = torch.tensor(tokens[: count * length], dtype=torch.long, device="cpu").view(count, length)
    return {"input_ids": ids, "labels": ids}


def check_tokenizers(text: Path | None, folder: Path, others: Iterable[Path]) -> None:
    """Raise if another folder's tokenizer cuts the beginning of the text into other tokens than that of ``folder``."""
    if text is None:
        return
    beginning = _read(text)[:10_000]
    for other in others:
        names = [name for name in _TOKENIZERS if (other / name).is_file()]
        if all((folder / n).is_file() and (folder / n).read_bytes() == (other / n).read_bytes() for n in names):
            continue
        one, two = (_tokenizer(place)(beginning, add_special_tokens=False)["input_ids"] for place in (folder, other))
        if one != two:
            raise InputError(f"the tokenizers of {folder} and {other} cut {text} into different tokens")
