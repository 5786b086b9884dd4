"""Checkpoints on disk: one folder a step, ``model.safetensors``, ``training.safetensors``, ``state.json``, ``manifest.json``.

A folder appears under its name only when it is complete. ``model.safetensors`` is the model's own ``state_dict``, so
that anybody can load it; the rest is what training needs to go on. Checkpoints of earlier versions have no manifest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import DamagedCheckpointError, InputError
from gramscope_lab.runs import files
from gramscope_lab.runs.manifest import MANIFEST, check_manifest, with_manifest

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.safetensors"
TRAINING = "training.safetensors"
STATE = "state.json"
#: most bytes of the list of tensors at the start of a file: about 100,000 tensors, which take seconds to read
MOST_NAMES = 1 << 23
_NAME = re.compile(r"step-(\d{9,18})")


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


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of a step."""
    return files.inside(folder, f"step-{step:09d}")


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    found = ((name, _NAME.fullmatch(name)) for name in files.names_in(folder))
    return sorted(int(match.group(1)) for name, match in found if match and files.is_folder(folder / name))


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically. One that is there already stays, unless it is damaged."""
    from safetensors.torch import save

    with files.explained(str(folder)):
        files.make_folder(folder)
        files.remove_unfinished(folder)
        path = checkpoint_path(folder, checkpoint.step)
        if files.exists(path):
            if is_intact(path):
                return path
            files.remove(path)
    contents = {
        MODEL: save(dict(checkpoint.model)),
        TRAINING: save(dict(checkpoint.tensors)),
        STATE: (files.to_json(dict(checkpoint.state), indent=1) + "\n").encode(),
    }
    files.write_folder(path, with_manifest(checkpoint.step, contents))
    return path


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ``keep``; nothing else in the folder is touched."""
    steps = checkpoint_steps(folder)
    remove_checkpoints(folder, steps[: max(0, len(steps) - keep)])


def remove_checkpoints(folder: Path, steps: Iterable[int]) -> None:
    """Remove checkpoints. Each is renamed first, so that a crash never leaves a part of one under its name."""
    with files.explained(str(folder)):
        for step in steps:
            path = checkpoint_path(folder, step)
            doomed = path.with_name(f"{files.TEMPORARY}{path.name}")
            files.remove(doomed)
            files.system.rename(path, doomed)
            files.remove(doomed)


def is_intact(path: Path) -> bool:
    """Whether a checkpoint can be read and is what was written."""
    try:
        read_checkpoint(path)
    except InputError:
        return False
    return True


def read_checkpoint(path: Path, device: str = "cpu") -> Checkpoint:
    """Read the checkpoint in folder ``path`` (named ``step-…``), and compare it with its manifest, if it has one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not a checkpoint; checkpoints are folders named step-000000123")
    step = int(match.group(1))
    missing = [name for name in (MODEL, TRAINING, STATE) if not files.exists(path / name)]
    if missing:
        raise DamagedCheckpointError(f"{path} has no {', '.join(missing)}; restore it or remove its folder")
    contents = {name: _content(path, name) for name in (MODEL, TRAINING, STATE)}
    if files.exists(path / MANIFEST):
        check_manifest(path, step, contents, _content(path, MANIFEST))
    try:
        state = json.loads(contents[STATE])
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"cannot read {path / STATE}: {error}; restore it or remove {path}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{path / STATE} holds {type(state).__name__}, not an object; remove {path}")
    model, tensors = (_tensors(path / name, contents[name], device) for name in (MODEL, TRAINING))
    return Checkpoint(step, model, tensors, state)


def _content(path: Path, name: str) -> bytes:
    """A file of a checkpoint. A link, a folder or a bad sector in its place damages this checkpoint, not those before."""
    try:
        return files.read_file(files.inside(path, name), memory())
    except InputError as error:
        raise DamagedCheckpointError(str(error)) from error


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file that the user named (it may be a link), with an error that names it."""
    return _tensors(path, files.read_file(path.resolve(), memory()), device)


def memory() -> int:
    """Bytes of this machine's memory: a file with holes can claim any size, and a larger one cannot be read at once."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not known here
        return 1 << 40


def _tensors(path: Path, content: bytes, device: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    names = int.from_bytes(content[:8], "little")
    if names > MOST_NAMES:
        raise DamagedCheckpointError(f"{path} lists its tensors in {names} bytes; at most {MOST_NAMES} are read")
    try:
        return {name: tensor.to(device) for name, tensor in load(content).items()}
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"cannot read {path}: {error}; restore the file, or remove its folder") from error
