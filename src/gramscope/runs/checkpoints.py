"""Checkpoints on disk: one folder a step, ``model.safetensors``, ``training.safetensors`` and ``state.json``.

A folder appears under its name only when it is complete. ``model.safetensors`` is the model's own ``state_dict``, so
that anybody can load it; the rest is what training needs to go on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import InputError
from gramscope.runs.files import from_json, remove_unfinished, to_json, write_folder

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.safetensors"
TRAINING = "training.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A training state at ``step``: the model's weights, other tensors by name, and plain values."""

    step: int
    model: Mapping[str, Tensor] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    state: Mapping[str, Any]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint."""
    return _NAME.fullmatch(folder.name) is not None and (folder / MODEL).is_file()


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match.group(1)) for match in found if match)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically; one that is there already stays."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    path = folder / f"step-{checkpoint.step:09d}"

    def fill(target: Path) -> None:
        save_file(dict(checkpoint.model), target / MODEL)
        save_file(dict(checkpoint.tensors), target / TRAINING)
        (target / STATE).write_text(to_json(dict(checkpoint.state), indent=1) + "\n", encoding="utf-8")

    if not path.exists():
        write_folder(path, fill)
    return path


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ``keep``; nothing else in the folder is touched."""
    steps = checkpoint_steps(folder)
    for step in steps[: len(steps) - keep]:
        shutil.rmtree(folder / f"step-{step:09d}")


def read_checkpoint(path: Path, device: str = "cpu") -> Checkpoint:
    """Read the checkpoint in folder ``path`` (named ``step-…``)."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not a checkpoint; checkpoints are folders named step-000000123")
    tensors = read_tensors(path / TRAINING, device)
    return Checkpoint(int(match.group(1)), read_tensors(path / MODEL, device), tensors, from_json(path / STATE))


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file, with an error that names it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}; restore the file, or remove its folder") from error
