"""Checkpoints on disk: those of a folder in the order of their steps, and their weights, read one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError, MissingExtraError, load_extra
from gramscope.layers.modules import unwrap
from gramscope.names import match_names

#: what a folder with a checkpoint holds, in the order in which it is looked for
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
#: entries of a file that hold a state dict beside other things
_NESTED = ("state_dict", "model_state_dict", "model")


class CheckpointError(GramscopeError, ValueError):
    """A checkpoint cannot be read: a file is missing, damaged or of another model."""


@dataclass(frozen=True)
class Checkpoint:
    """The weights after ``step`` steps, in a file or a folder of transformers."""

    step: int
    path: Path


def find_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints in a folder, in the order of their steps: the last number in each name.

    Folders (``step1000``, ``checkpoint-500``) need a ``config.json`` or a file of weights; files end in ``.safetensors``,
    ``.pt``, ``.pth`` or ``.bin``.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root} is no folder; give one that holds checkpoints such as step1000/ or checkpoint-500/")
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):
        numbers = re.findall(r"\d+", path.stem if path.is_file() else path.name)
        holds = path.suffix in _SUFFIXES if path.is_file() else path.is_dir() and _holds_weights(path)
        if not numbers or not holds:
            continue
        step = int(numbers[-1])
        if step in found:
            raise InputError(
                f"{found[step]} and {path} are both of step {step}; keep one of them, or give (step, path) pairs"
            )
        found[step] = path
    if not found:
        raise InputError(
            f"{root} holds no checkpoint: folders such as step1000/ with a config.json, or files such as 1000.safetensors"
        )
    return [Checkpoint(step, found[step]) for step in sorted(found)]


def _holds_weights(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return "config.json" in names or any(name.endswith(_SUFFIXES) for name in names)


def weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint, one after the other, so that no second copy of a model is in memory.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for file in _files(path):
        try:
            if file.suffix == ".safetensors":
                yield from _safetensors(file)
            else:
                # mapped: tensors are read when they are copied; nothing but tensors is ever unpickled
                yield from _state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file).items()
        except (CheckpointError, MissingExtraError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error}); is it complete?"
            ) from error


def _files(path: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint."""
    if path.is_file():
        return [path]
    for name in _INDICES:
        if (path / name).is_file():
            names = sorted(set(json.loads((path / name).read_text())["weight_map"].values()))
            missing = [shard for shard in names if Path(shard).name != shard or not (path / shard).is_file()]
            if missing:
                raise CheckpointError(
                    f"{path}: {len(missing)} of {len(names)} files are missing: {', '.join(missing[:3])}"
                )
            return [path / shard for shard in names]
    for name in _FILES:
        if (path / name).is_file():
            return [path / name]
    found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if len(found) != 1:
        raise CheckpointError(f"{path} holds {len(found)} files of weights; expected one, or model.safetensors")
    return found


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    safetensors: Any = load_extra("safetensors", "lab")
    with safetensors.safe_open(str(file), "pt", device="cpu") as opened:
        for name in opened.keys():  # noqa: SIM118  (no dictionary)
            yield name, opened.get_tensor(name)


def _state_dict(loaded: Any, file: Path) -> Mapping[str, Tensor]:
    for name in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
    tensors = (
        {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
        if isinstance(loaded, Mapping)
        else {}
    )
    if not tensors:
        raise CheckpointError(f"{file} holds no state dict: save model.state_dict()")
    return tensors


@torch.no_grad()
def load_weights(model: nn.Module, source: Path | Mapping[str, Tensor]) -> str:
    """Copy the weights of a checkpoint or state dict into a model, in place, and return a digest of them.

    Prefixes such as ``module.`` or ``_orig_mod.`` may differ. Weights that modules share need one of their names.

    Raises:
        CheckpointError: names or shapes do not fit. The model has no part of the checkpoint then, unless a damaged file showed
            itself only while it was read.
    """
    own = unwrap(model).state_dict(keep_vars=True)
    given = source.items() if isinstance(source, Mapping) else weights(source)
    place = source if isinstance(source, Path) else "the state dict"
    shapes = {name: tuple(t.shape) for name, t in source.items()} if isinstance(source, Mapping) else _shapes(source)
    names = list(shapes)
    pairs = match_names(names, list(own))
    loaded = {id(own[name]) for name in pairs.values()}
    missing = [name for name, value in own.items() if id(value) not in loaded]
    if missing:
        raise CheckpointError(
            f"{place}: {len(own) - len(missing)} of {len(own)} names match; without weights: {', '.join(missing[:3])}; "
            f"the checkpoint has {', '.join(names[:3])}"
        )
    for name, target in pairs.items():
        if own[target].shape != shapes[name]:
            raise CheckpointError(f"{place}: {name} has shape {shapes[name]}, the model's {tuple(own[target].shape)}")
    for name, value in given:
        if name not in pairs:
            continue
        own[pairs[name]].copy_(value)
    return digest_of(model)


def digest_of(model: nn.Module) -> str:
    """A digest of all weights and buffers of a model: equal for equal weights alone."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in unwrap(model).state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint by name; reads no tensor of a .safetensors file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(path):
        if file.suffix == ".safetensors":
            try:
                header = json.loads(_header(file))
                shapes |= {name: tuple(value["shape"]) for name, value in header.items() if name != "__metadata__"}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{file} is damaged ({error}); is it complete?") from error
        else:
            shapes |= {name: tuple(value.shape) for name, value in weights(file)}
    return shapes


def _header(file: Path) -> bytes:
    """The list of tensors at the start of a .safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= file.stat().st_size:
            raise ValueError("its header is longer than the file")
        return opened.read(size)


def open_model(folder: Path, base: Path | None = None) -> nn.Module:
    """The model of transformers that a folder holds; nothing is downloaded, and no code of the folder is run.

    Args:
        folder: with ``config.json`` and weights, or a LoRA adapter of peft.
        base: the model under an adapter.
    """
    transformers: Any = load_extra("transformers", "transformers")
    if (folder / "adapter_config.json").is_file() and base is not None:
        peft: Any = load_extra("peft", "transformers")
        adapted: nn.Module = peft.PeftModel.from_pretrained(open_model(base), folder)
        return adapted.eval()
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model of transformers: config.json is missing")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise CheckpointError(
            f"{folder}: config.json names {names or 'no architecture'}, which transformers does not have"
        )
    model: nn.Module = kind.from_pretrained(folder, local_files_only=True)
    return model.eval()
