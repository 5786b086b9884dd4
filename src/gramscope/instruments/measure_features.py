"""``gs.measure_features``: the columns of a table that need no gradients, of features from arrays and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gramscope.errors import InputError, load_extra
from gramscope.instruments.measure import table_of
from gramscope.layers.labels import IGNORED
from gramscope.linalg.budget import MEMORY, Budget
from gramscope.measures.column import Column, Context
from gramscope.measures.columns import COLUMNS, DEFAULT, columns_of
from gramscope.measures.table import Table
from gramscope.statistics.features import Features
from gramscope.statistics.result import LayerStatistics, NetworkStatistics, Statistics
from gramscope.statistics.structure import Tokens, rows_and_targets
from gramscope.statistics.sums import Plan, Seen

#: numbers that are read at once
BLOCK = 2**22


class _Source(NamedTuple):
    """An array that is read in blocks of samples."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


def measure_features(
    features: Mapping[str, Any] | str | Path,
    labels: Any = None,
    *,
    measures: str | Column | Iterable[str | Column] | None = None,
    tokens: Tokens = "auto",
    ignore_index: int = IGNORED,
    ridge: float = 0.0,
    intercept: bool = False,
    memory: int = MEMORY,
    progress: bool = True,
) -> Table:
    """Measure features that are there already: target linearity, ranks, collapse and similarity of each layer.

    The numbers are those that :func:`gramscope.measure` gives of a model whose layers have these inputs. Files are mapped
    and read in blocks, so they may be larger than memory.

    Args:
        features: from layer to an array ``[n, d]`` or ``[n, positions, d]``, or to a file: ``.npy``, or ``.safetensors`` with
            one tensor. Or a folder of such files; a ``.safetensors`` file with several tensors holds several layers there.
        labels: ``[n]`` classes, ``[n, c]`` values, or ``[n, positions]`` classes of positions; an array or a file.
        measures: names or groups of columns; by default the usual ones that need no gradients.
        tokens: how positions become rows, as for :func:`gramscope.measure`.
        ignore_index: the label of rows to leave out.
        ridge, intercept: of the fits of target linearity.
        memory: bytes that decide in which form sums are kept.
        progress: show a bar on terminals.

    >>> import torch, gramscope as gs
    >>> H, y = torch.randn(60, 5), torch.arange(60) % 3
    >>> table = gs.measure_features({"block 1": H, "block 2": H.relu()}, y)
    >>> list(table), "target_linearity" in table.columns
    (['block 1', 'block 2'], True)
    """
    sources = _sources(features)
    target = None if labels is None else _only(_sources({"labels": labels}))
    given = {"features", "gram"} | (set() if target is None else {"targets", "labels"})
    usual = [name for name in DEFAULT if COLUMNS[name].of_features and COLUMNS[name].needs <= given]
    columns = [column for column in columns_of(usual if measures is None else measures, given) if column.of_features]
    if not columns:
        raise InputError(
            f"measures={measures!r}: none of them is of features alone; gs.measures() says what each needs"
        )
    plan = Plan(sums=(Features,), tokens=tokens, ignore_index=ignore_index, budget=Budget(memory))
    layers = {name: _collected(name, source, target, plan) for name, source in sources.items()}
    samples = max(source.shape[0] for source in sources.values())
    statistics = Statistics(layers, network=NetworkStatistics(samples))
    context = Context(statistics, ridge=ridge, intercept=intercept, budget=plan.budget)
    return table_of(statistics, columns, context, progress)


def _collected(name: str, source: _Source, target: _Source | None, plan: Plan) -> LayerStatistics:
    """The sums of one layer, over blocks of samples."""
    n = source.shape[0]
    if len(source.shape) not in (2, 3):
        raise InputError(f"features of {name!r} have shape {source.shape}; give [n, d] or [n, positions, d]")
    if target is not None and target.shape[0] != n:
        raise InputError(f"{name!r} has features of {n} samples, and there are {target.shape[0]} labels")
    empty = torch.empty(0, 0, dtype=torch.float64, device="cpu")
    total = Features(name, empty, plan)
    step = max(1, BLOCK // max(1, int(np.prod(source.shape[1:]))))
    for i in range(0, n, step):
        j = min(i + step, n)
        h = source.read(i, j)
        if not h.is_floating_point():
            raise InputError(f"features of {name!r} are {h.dtype}; give floating-point numbers")
        y = None if target is None else target.read(i, j).to(h.device)
        h = h if h.dim() == 3 else h.unsqueeze(1)
        rows, labels = rows_and_targets(h, y, plan.tokens, None, name, plan.ignore_index)
        total.add(Seen(name, empty, None, rows=rows, target=labels))  # type: ignore[arg-type]
    total.finish()
    return LayerStatistics(name, empty, n, {Features: total})


def _sources(features: Mapping[str, Any] | str | Path) -> dict[str, _Source]:
    """What is read of each layer; a folder's files in natural order."""
    if isinstance(features, Mapping):
        if not features:
            raise InputError("features={}: give at least one layer")
        return {str(name): _source(str(name), value) for name, value in features.items()}
    folder = Path(features)
    if not folder.is_dir():
        raise InputError(
            f"features={str(folder)!r} is no folder; give one of .npy or .safetensors files, or a dictionary"
        )
    found: dict[str, _Source] = {}
    for path in sorted(
        folder.iterdir(), key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", p.name)]
    ):
        if path.suffix == ".npy":
            found[path.stem] = _source(path.stem, path)
        elif path.suffix == ".safetensors":
            tensors = _tensors(path)
            found |= {path.stem: _only(tensors)} if len(tensors) == 1 else tensors
    if not found:
        raise InputError(f"{folder} holds no .npy and no .safetensors file")
    return found


def _source(name: str, value: Any) -> _Source:
    if isinstance(value, str | Path):
        path = Path(value)
        if path.suffix == ".safetensors":
            tensors = _tensors(path)
            if len(tensors) != 1:
                raise InputError(f"{path} of {name!r} holds {len(tensors)} tensors: {', '.join(tensors)}; expected one")
            return _only(tensors)
        try:
            value = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} of {name!r} cannot be read as .npy: {error}") from error
    if isinstance(value, Tensor):
        tensor = value.detach()
        return _Source(tuple(tensor.shape), lambda i, j: tensor[i:j])
    array = np.asarray(value) if not isinstance(value, np.ndarray) else value
    if array.dtype == object:
        raise InputError(f"{name!r} holds no array of numbers")
    return _Source(array.shape, lambda i, j: torch.from_numpy(np.array(array[i:j])))


def _tensors(path: Path) -> dict[str, _Source]:
    """The tensors of a .safetensors file, which is mapped."""
    safetensors: Any = load_extra("safetensors", "lab")
    try:
        opened = safetensors.safe_open(str(path), "pt", device="cpu")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no dictionary)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read as .safetensors: {error}") from error
    return {
        name: _Source(tuple(part.get_shape()), lambda i, j, part=part: part[i:j])  # type: ignore[misc]
        for name, part in slices.items()
    }


def _only(sources: Mapping[str, _Source]) -> _Source:
    return next(iter(sources.values()))
