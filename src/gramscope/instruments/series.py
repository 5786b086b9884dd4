"""``gs.series``: a table of every checkpoint of a training run, in one object that is saved, drawn and read like one table."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from gramscope.errors import InputError, ResultWarning
from gramscope.instruments.checkpoints import CheckpointError, digest_of, find_checkpoints, load_weights, open_model
from gramscope.instruments.measure import measure
from gramscope.layers.losses import Loss
from gramscope.measures.series import Series, SeriesStore, ordered
from gramscope.measures.table import Table
from gramscope.statistics.collect import progress_bar

#: what one checkpoint may be
Source: TypeAlias = nn.Module | Mapping[str, Tensor] | str | Path


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
        checkpoints: a folder of checkpoints (``step1000/``, ``checkpoint-500/``, ``1000.safetensors``), or pairs of a step and
            a model, a state dict, or the path of a checkpoint. A model may come again with other weights.
        batches: the data, for all steps the same, as for :func:`gramscope.measure`.
        loss: as for :func:`gramscope.measure`.
        model: where state dicts and files are read into; by default the model of transformers that the first folder describes.
        out: a folder where each table is stored as soon as it is there. A series that was interrupted goes on there.
        measuring: further arguments of :func:`gramscope.measure`, such as ``{"measures": "alignment", "layers": "h.*"}``.
        executor: of :mod:`concurrent.futures`, to measure paths in several processes; each then holds one model.
        progress: show a bar with the time left, on terminals.

    A checkpoint that cannot be read is skipped with a warning; the series says which and why.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Linear(4, 2)
    >>> states = [(step, {"weight": torch.randn(2, 4), "bias": torch.zeros(2)}) for step in (0, 10)]
    >>> data = (torch.randn(12, 4), torch.arange(12) % 2)
    >>> gs.series(states, data, torch.nn.CrossEntropyLoss(), model=net).steps
    [0, 10]
    """
    sources = _sources(checkpoints)
    settings = dict(measuring or {})
    store = SeriesStore(Path(out), settings) if out is not None else None
    tables, skipped, digests = store.read_all() if store else ({}, {}, {})
    todo = [(step, source) for step, source in sources if step not in tables] if isinstance(sources, list) else sources
    total = len(todo) if isinstance(todo, list) else None
    with progress_bar("measuring checkpoints", total, progress) as advance:
        for step, found in _measured(todo, tables, model, (batches, loss, settings), executor):
            if isinstance(found, CheckpointError):
                skipped[step] = str(found)
                warnings.warn(f"step {step} is skipped: {found}", ResultWarning, stacklevel=2)
            else:
                tables[step], digests[step] = found
                if store:
                    store.write(step, *found)
            advance()
    if not tables:
        reasons = "; ".join(skipped.values())
        raise InputError(f"no checkpoint could be measured: {reasons or 'there is none'}")
    return ordered(tables, skipped, digests)


def _sources(checkpoints: Any) -> Iterable[tuple[int, Source]]:
    """Pairs of a step and what is measured; a list where all of them are known beforehand."""
    if isinstance(checkpoints, str | Path):
        return [(found.step, found.path) for found in find_checkpoints(checkpoints)]
    return checkpoints  # type: ignore[no-any-return]


def _measured(
    sources: Iterable[tuple[int, Source]],
    known: Mapping[int, Table],
    model: nn.Module | None,
    how: tuple[Any, Loss | None, Mapping[str, Any]],
    executor: Executor | None,
) -> Iterator[tuple[int, tuple[Table, str] | CheckpointError]]:
    """The table of each source and a digest of its weights, or why it has none, as they are ready."""
    if executor is not None:
        futures = []
        for step, source in sources:
            if not isinstance(source, str | Path):
                raise InputError("executor= needs checkpoints in files or folders: processes cannot share a model")
            futures.append((step, executor.submit(_measure_path, Path(source), model, how)))
        for step, future in futures:
            yield step, future.result()
        return
    opened = model
    for step, source in sources:
        if step in known:
            continue
        if isinstance(source, nn.Module):
            yield step, (_table(source, how), digest_of(source))
            continue
        try:
            if opened is None:
                if not isinstance(source, str | Path) or not (Path(source) / "config.json").is_file():
                    raise InputError(f"step {step} has weights alone: give model=, into which they are read")
                opened = open_model(Path(source))
            digest = load_weights(opened, Path(source) if isinstance(source, str | Path) else source)
        except CheckpointError as error:
            yield step, error
            continue
        yield step, (_table(opened, how), digest)


def _measure_path(
    path: Path, model: nn.Module | None, how: tuple[Any, Loss | None, Mapping[str, Any]]
) -> tuple[Table, str] | CheckpointError:
    """The same for one path, in a process of its own."""
    ((_, found),) = _measured([(0, path)], {}, model, how, None)
    return found


def _table(model: nn.Module, how: tuple[Any, Loss | None, Mapping[str, Any]]) -> Table:
    batches, loss, settings = how
    return measure(model, batches, loss, **{"progress": False, **settings})
