"""``gs.series``: a table of every checkpoint of a training run, in one object that is saved, drawn and read like one table."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from gramscope.errors import InputError, NumericalError, ResultWarning
from gramscope.instruments.checkpoints import (
    CheckpointError,
    bytes_of,
    digest_of,
    find_checkpoints,
    load_weights,
    open_model,
)
from gramscope.instruments.estimate import estimate
from gramscope.instruments.measure import measure
from gramscope.layers.batches import tensors_in
from gramscope.layers.losses import Loss
from gramscope.measures.series import Series, SeriesStore, ordered
from gramscope.measures.table import Table
from gramscope.statistics.collect import progress_bar

#: what one checkpoint may be
Source: TypeAlias = nn.Module | Mapping[str, Tensor] | str | Path


class _How(NamedTuple):
    """What every checkpoint is measured with."""

    batches: Any
    loss: Loss | None
    settings: Mapping[str, Any]

    def table(self, model: nn.Module) -> Table:
        try:
            return measure(model, self.batches, self.loss, **{"progress": False, **self.settings})
        except NumericalError as error:
            raise CheckpointError(f"its weights cannot be measured: {error}") from error


def series(
    checkpoints: str | Path | Iterable[tuple[int, Source]],
    batches: Any,
    loss: Loss | None = None,
    *,
    model: nn.Module | None = None,
    out: str | Path | None = None,
    measuring: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> Series:
    """Measure every checkpoint of a training run. One model at a time is in memory, and weights are read into it in place.

    Args:
        checkpoints: a folder of checkpoints (``step1000/``, ``checkpoint-500/``, ``1000.safetensors``, or the folder
            ``checkpoints`` of a run of ``gramscope train``), or pairs of a step and a model, a state dict, or the path of a
            checkpoint. A model may come again with other weights.
        batches: the data, for all steps the same, as for :func:`gramscope.measure`.
        loss: as for :func:`gramscope.measure`.
        model: where state dicts and files are read into; by default the model of transformers that the first folder describes.
        out: a folder where each table is stored as soon as it is there. A series that was interrupted goes on there.
        measuring: further arguments of :func:`gramscope.measure`, such as ``{"measures": "alignment", "layers": "h.*"}``.
        executor: of :mod:`concurrent.futures`, to measure paths in several processes; each then holds one model.
        progress: show a bar with the memory and the time left, on terminals.

    A checkpoint that cannot be read or measured is skipped with a warning; the series says which and why.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Linear(4, 2)
    >>> states = [(step, {"weight": torch.randn(2, 4), "bias": torch.zeros(2)}) for step in (0, 10)]
    >>> data = (torch.randn(12, 4), torch.arange(12) % 2)
    >>> gs.series(states, data, torch.nn.CrossEntropyLoss(), model=net).steps
    [0, 10]
    """
    if isinstance(checkpoints, str | Path):
        checkpoints = [(found.step, found.path) for found in find_checkpoints(checkpoints)]
    how = _How(batches, loss, dict(measuring or {}))
    store = None
    if out is not None:
        store = SeriesStore(Path(out), {**how.settings, "loss": loss, "data": _digest_of_data(batches)})
    tables, skipped, digests = store.read_all() if store else ({}, {}, {})
    if isinstance(checkpoints, list):
        checkpoints = [(step, source) for step, source in checkpoints if step not in tables]
    total = len(checkpoints) if isinstance(checkpoints, list) else None
    text = "measuring checkpoints" if model is None else f"measuring checkpoints ({memory_of(model, loss, measuring)})"
    with progress_bar(text, total, progress) as advance:
        given = checkpoints, tables, model, how
        for step, result in _in_processes(*given, executor) if executor else _one_after_the_other(*given):
            if isinstance(result, CheckpointError):
                skipped[step] = str(result)
                warnings.warn(f"step {step} is skipped: {result}", ResultWarning, stacklevel=2)
            else:
                tables[step], digests[step] = result
                if store:
                    store.write(step, *result)
            advance()
    if not tables:
        reasons = "; ".join(skipped.values())
        raise InputError(f"no checkpoint could be measured: {reasons or 'there is none'}")
    return ordered(tables, skipped, digests)


def memory_of(model: nn.Module, loss: Loss | None = None, measuring: Mapping[str, Any] | None = None) -> str:
    """The size of a model, and what measuring it takes at most beside it, in words."""
    chosen = {name: value for name, value in (measuring or {}).items() if name in ("measures", "layers", "memory")}
    weights = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    sums = estimate(model, loss, **chosen).total
    return f"one model of {weights / 2**20:,.0f} MiB and at most {sums / 2**20:,.0f} MiB of sums at a time"


def _digest_of_data(batches: Any) -> str:
    """A digest of tensors that are given as they are; nothing of a loader, which may shuffle."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(batches, Tensor | list | tuple | Mapping):
        for value in tensors_in(batches):
            digest.update(bytes_of(value))
    return digest.hexdigest()


def _one_after_the_other(
    sources: Iterable[tuple[int, Source]], known: Mapping[int, Table], model: nn.Module | None, how: _How
) -> Iterator[tuple[int, tuple[Table, str] | CheckpointError]]:
    """The table of each source and a digest of its weights, or why it has none."""
    for step, source in sources:
        if step in known:
            continue
        try:
            if isinstance(source, nn.Module):
                yield step, (how.table(source), digest_of(source))
                continue
            source = Path(source) if isinstance(source, str | Path) else source
            if model is None:
                if not isinstance(source, Path) or not (source / "config.json").is_file():
                    raise InputError(f"step {step} has weights alone: give model=, into which they are read")
                model = open_model(source)
            digest = load_weights(model, source)
            yield step, (how.table(model), digest)
        except CheckpointError as error:
            yield step, error


def _in_processes(
    sources: Iterable[tuple[int, Source]],
    known: Mapping[int, Table],
    model: nn.Module | None,
    how: _How,
    executor: Executor,
) -> Iterator[tuple[int, tuple[Table, str] | CheckpointError]]:
    """The same, in the order in which they are ready."""
    steps = {}
    for step, source in sources:
        if not isinstance(source, str | Path):
            raise InputError("executor= needs checkpoints in files or folders: processes cannot share a model")
        if step not in known:
            steps[executor.submit(_measure_path, source, model, how)] = step
    for future in as_completed(steps):
        yield steps[future], future.result()


def _measure_path(path: str | Path, model: nn.Module | None, how: _How) -> tuple[Table, str] | CheckpointError:
    ((_, found),) = _one_after_the_other([(0, path)], {}, model, how)
    return found
