"""Checkpoints on disk: those of a folder in the order of their steps, and their weights, read one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
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
#: entries of a configuration that may differ between checkpoints of one run
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


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


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, which :attr:`read` reads."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def entries(path: Path) -> Iterator[Entry]:
    """The tensors of a checkpoint, one after the other, so that no second copy of a model is in memory.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for file in _files(path):
        try:
            if file.suffix == ".safetensors":
                yield from _safetensors(file)
            else:  # mapped: tensors are read when they are copied; nothing but tensors is ever unpickled
                state = _state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)
                yield from _entries(state)
        except (CheckpointError, MissingExtraError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file} cannot be read ({type(error).__name__}: {error}); is it complete?"
            ) from error


def _entries(state: Mapping[str, Tensor]) -> Iterator[Entry]:
    return (Entry(name, tuple(value.shape), lambda value=value: value) for name, value in state.items())  # type: ignore[misc]


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


def _safetensors(file: Path) -> Iterator[Entry]:
    safetensors: Any = load_extra("safetensors", "lab")
    with safetensors.safe_open(str(file), "pt", device="cpu") as opened:
        for name in opened.keys():  # noqa: SIM118  (no dictionary)
            shape = tuple(opened.get_slice(name).get_shape())
            # checkpoints of ``gramscope train`` have the model's tensors in a folder of this name
            yield Entry(name.removeprefix("model/"), shape, lambda name=name: opened.get_tensor(name))  # type: ignore[misc]


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
        CheckpointError: names, shapes or architectures do not fit. The model has no part of the checkpoint then, unless a
            damaged file showed itself only while it was read.
    """
    own = unwrap(model).state_dict(keep_vars=True)
    place: object = source if isinstance(source, Path) else "the state dict"
    if isinstance(source, Path):
        _check_config(source, model)

    def given() -> Iterator[Entry]:
        return entries(source) if isinstance(source, Path) else _entries(source)

    shapes = {entry.name: entry.shape for entry in given()}
    pairs = match_names(shapes, list(own))
    loaded = {id(own[name]) for name in pairs.values()}
    missing = [name for name, value in own.items() if id(value) not in loaded]
    if missing:
        raise CheckpointError(
            f"{place}: {len(own) - len(missing)} of {len(own)} names match; without weights: {', '.join(missing[:3])}; "
            f"the checkpoint has {', '.join(list(shapes)[:3])}"
        )
    for name, target in pairs.items():
        if own[target].shape != shapes[name]:
            raise CheckpointError(f"{place}: {name} has shape {shapes[name]}, the model's {tuple(own[target].shape)}")
    for entry in given():
        if entry.name in pairs:
            own[pairs[entry.name]].copy_(entry.read())
    return digest_of(model)


def _check_config(folder: Path, model: nn.Module) -> None:
    """Raise if ``config.json`` beside the weights describes another architecture than the model's."""
    file = folder / "config.json"
    config: Any = getattr(unwrap(model), "config", None)
    if not file.is_file() or not hasattr(config, "to_dict"):
        return
    try:
        found = type(config)(**json.loads(file.read_bytes())).to_dict()
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    mine = config.to_dict()
    others = [name for name in mine if name not in _INCIDENTAL and found.get(name) != mine[name]]
    if others:
        values = ", ".join(f"{name} {found.get(name)!r}, not {mine[name]!r}" for name in others[:3])
        raise CheckpointError(f"{file} describes another architecture: {values}")


def digest_of(model: nn.Module) -> str:
    """A digest of all weights and buffers of a model: equal for equal weights alone."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in unwrap(model).state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()


def bytes_of(value: Tensor) -> Any:
    """The bytes of a tensor's numbers, for digests."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def open_model(folder: Path, base: Path | None = None, *, empty: bool = False) -> nn.Module:
    """The model of transformers that a folder holds; nothing is downloaded, and no code of the folder is run.

    Args:
        folder: with ``config.json`` and weights, or a LoRA adapter of peft.
        base: the model under an adapter.
        empty: without weights, which take no memory then: on the device ``meta``.
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
    if empty:
        with torch.device("meta"):
            return kind(config)  # type: ignore[no-any-return]
    try:
        model, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as error:  # of a damaged file transformers raises almost anything
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error}); is it complete?") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of {names[0]}: {', '.join(missing[:3])}")
    opened: nn.Module = model.eval()
    return opened
