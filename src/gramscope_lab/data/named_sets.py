"""Every data set by name: the catalogue, and ``load``. Listing needs no torch."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gramscope.errors import InputError, no_such
from gramscope_lab.data.downloads import RemoteFile, Source, data_root, ensure

if TYPE_CHECKING:
    from gramscope_lab.data.dataset import DataSet


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue; ``sets.toml`` says what each field means."""

    name: str
    kind: Literal["shipped", "generated", "downloaded"]
    loader: str
    train: int
    test: int
    input_shape: tuple[int, ...]
    description: str
    citation: str
    classes: int | None = None  # of a regression
    source: Source | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain values for JSON."""
        size = sum(file.size for file in self.source.archives) if self.source else 0
        facts = {key: value for key, value in vars(self).items() if key not in ("loader", "source")}
        return {**facts, "download_bytes": size}


@cache
def catalogue() -> tuple[Entry, ...]:
    """Every data set that has a name, from ``sets.toml``."""
    tables = tomllib.loads((resources.files("gramscope_lab.data") / "sets.toml").read_text("utf-8"))
    return tuple(_entry(name, **table) for name, table in tables.items())


def _entry(name: str, input_shape: list[int], source: dict[str, Any] | None = None, **facts: Any) -> Entry:
    if source is not None:
        archives = [RemoteFile(**file) for file in source["archives"]]
        facts["source"] = Source(name, **{**source, "archives": archives})
    return Entry(name, input_shape=tuple(input_shape), **facts)


def find_entry(name: str) -> Entry:
    """The entry of a name."""
    entry = next((entry for entry in catalogue() if entry.name == name), None)
    if entry is None:
        raise InputError(f"{no_such('data set', name, [e.name for e in catalogue()])}, or the path of an .npz file")
    return entry


def load(
    name: str, data_dir: str | Path | None = None, *, seed: int = 0, download: bool = True, **options: Any
) -> DataSet:
    """Load a data set as tensors.

    Args:
        name: a name of :func:`catalogue`, or the path of an ``.npz`` file with x_train, y_train, x_test, y_test.
        data_dir: folder with the official files; ``$GRAMSCOPE_DATA`` or the user's cache when ``None``.
        seed: of everything drawn at random: generated samples, chosen subsets.
        download: fetch the official files when they are not there.
        options: those of the loader, for example ``scale="signed"`` for images or ``d=64, rank=3`` for chain-monomial.

    >>> load("digits")
    DataSet('digits': 1,438 train, 359 test, inputs (1, 8, 8), classification with 10 outputs)
    """
    import torch

    if name.endswith(".npz"):
        from gramscope_lab.data.images import load_npz

        _check_options(name, load_npz, options)
        return load_npz(Path(name).expanduser(), **options)
    entry = find_entry(name)
    module, _, function = entry.loader.partition(":")
    loader = getattr(import_module(f"gramscope_lab.data.{module}"), function)
    _check_options(entry.name, loader, options)
    arguments: list[Any] = [torch.Generator().manual_seed(seed)]
    if entry.kind != "generated":
        files = ensure(entry.source, data_root(data_dir), download=download) if entry.source else {}
        arguments.insert(0, files)
    data: DataSet = loader(*arguments, **options)
    return replace(data, description=entry.description, citation=entry.citation)


def _check_options(name: str, loader: Callable[..., Any], options: dict[str, Any]) -> None:
    known = [p.name for p in inspect.signature(loader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InputError(f"data set {name} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
