"""Checkpoints on disk: one safetensors file a step, with the model, the training state and a digest of both.

Tensors named ``model/…`` are the model's own ``state_dict``, those named ``state/…`` belong to the training state. The metadata
hold the rest of the state as JSON, the bytes of records that belong to the checkpoint, and the SHA-256 of the file in which
the digest itself is zeros.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import DamagedCheckpointError, InputError
from gramscope_lab.runs import files

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-(\d{9,18})\.safetensors")
_DIGEST, _ZEROS = b'"digest":"', b"0" * 64
_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"


@dataclass(frozen=True)
class Checkpoint:
    """A training state at ``step``: the model's weights, any nested state, and where its records end."""

    step: int
    model: Mapping[str, Tensor] = field(repr=False)
    state: Any = field(repr=False)
    records_end: int = 0


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint."""
    return _NAME.fullmatch(path.name) is not None and path.is_file()


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not a checkpoint; checkpoints are files named step-000000123.safetensors")
    return int(match.group(1))


def checkpoint_path(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:09d}.safetensors"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, ascending."""
    return sorted(step_of(folder / name) for name in files.names_in(folder) if _NAME.fullmatch(name))


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically."""
    from safetensors.torch import save

    tensors = {f"model/{name}": _portable(tensor) for name, tensor in checkpoint.model.items()}
    tree = _pack(checkpoint.state, "state", tensors)
    facts = {"step": checkpoint.step, "records_end": checkpoint.records_end, "state": tree}
    content = bytearray(save(tensors, {"gramscope": json.dumps(facts), "digest": _ZEROS.decode()}))
    at = content.index(_DIGEST + _ZEROS) + len(_DIGEST)
    content[at : at + len(_ZEROS)] = hashlib.sha256(content).hexdigest().encode()
    files.make_folder(folder)
    path = checkpoint_path(folder, checkpoint.step)
    files.write_file(path, bytes(content), files.RESUME)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, on the CPU, after comparing it with its digest."""
    step = step_of(path)
    try:
        content = files.read_file(path)
        tensors = parse_tensors(path, content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        digest = metadata["digest"]
        if hashlib.sha256(content.replace(_DIGEST + digest.encode(), _DIGEST + _ZEROS, 1)).hexdigest() != digest:
            raise ValueError("it is not what was written")
        facts = json.loads(metadata["gramscope"])
        if facts["step"] != step:
            raise ValueError(f"it holds the checkpoint of step {facts['step']!r}")
        model = {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}
        return Checkpoint(step, model, _unpack(facts["state"], tensors), facts["records_end"])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = str(error).removeprefix(f"{path} is damaged: ")
        raise DamagedCheckpointError(f"{path} is damaged: {reason}; restore it or remove it") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, on the CPU, with an error that names it."""
    return parse_tensors(path, files.read_file(path))


def parse_tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}; restore it or remove it") from error


# -- nested states ------------------------------------------------------------------------------------------------
def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A nested state as JSON that refers to ``tensors``; number keys, tuples and infinities, which JSON lacks, are tagged."""
    if hasattr(value, "untyped_storage"):  # a tensor; torch is not imported here
        tensors[path] = _portable(value)
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = [(key, _pack(item, f"{path}/{key}", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        if all(isinstance(key, str | int) for key, _ in items):
            return {_DICT: [list(item) for item in items]}
    elif isinstance(value, list | tuple):
        items = [_pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    elif isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"a checkpoint cannot hold {path} = {value!r} of type {type(value).__name__}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`_pack`."""
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(_unpack(item, tensors) for item in tree[_TUPLE])
    if _DICT in tree:
        return {key: _unpack(item, tensors) for key, item in tree[_DICT]}
    if _FLOAT in tree:
        return float(tree[_FLOAT])
    return {key: _unpack(item, tensors) for key, item in tree.items()}


def _portable(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares memory with nothing (safetensors refuses shared memory)."""
    return tensor.detach().cpu().contiguous().clone()
