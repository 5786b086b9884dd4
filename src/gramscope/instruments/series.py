"""``gs.series``: a table of every checkpoint of a training run, in one object that is saved, drawn and read like one table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from gramscope.errors import InputError, ResultWarning, no_such
from gramscope.instruments.checkpoints import CheckpointError, digest_of, find_checkpoints, load_weights, open_model
from gramscope.instruments.measure import measure
from gramscope.layers.losses import Loss
from gramscope.measures.table import Table
from gramscope.measures.table_files import from_plain, read_parquet, to_plain, write_parquet, write_whole
from gramscope.statistics.collect import progress_bar

#: what one checkpoint may be
Source: TypeAlias = nn.Module | Mapping[str, Tensor] | str | Path
#: the name of the file with the settings of a stored series
_SETTINGS = "series.json"


@dataclass(frozen=True)
class Series:
    """Tables over the steps of a training run.

    Args:
        tables: by step, in increasing order.
        skipped: steps whose checkpoint could not be measured, and why.
        equal: steps whose weights are exactly those of an earlier step, and that step.

    >>> series = Series({0: Table({"fc": {"nfa": 0.25}}, {"loss": 2.0}), 8: Table({"fc": {"nfa": 0.5}}, {"loss": 1.0})})
    >>> series["nfa"], series.network("loss")
    ({'fc': {0: 0.25, 8: 0.5}}, {0: 2.0, 8: 1.0})
    """

    tables: Mapping[int, Table] = field(default_factory=dict)
    skipped: Mapping[int, str] = field(default_factory=dict)
    equal: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def steps(self) -> list[int]:
        """The steps that were measured."""
        return list(self.tables)

    @property
    def columns(self) -> list[str]:
        """Names of the measures of layers."""
        return list(dict.fromkeys(name for table in self.tables.values() for name in table.columns))

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(dict.fromkeys(name for table in self.tables.values() for name in table.rows))

    def __getitem__(self, column: str) -> dict[str, dict[int, float | None]]:
        """One measure, ``{layer: {step: value}}``."""
        if column not in self.columns:
            raise InputError(no_such("measure", column, self.columns))
        return {
            layer: {step: table.rows[layer].get(column) for step, table in self.tables.items() if layer in table.rows}
            for layer in self.layers
        }

    def network(self, name: str = "loss") -> dict[int, float | None]:
        """A number of the whole network (loss, accuracy) over the steps."""
        return {step: table.network.get(name) for step, table in self.tables.items()}

    def save(self, path: str | Path) -> None:
        """Write all tables to one file, ``.json`` or ``.parquet`` (one row for each step, layer and measure)."""
        path = Path(path)
        rest = {"skipped": dict(self.skipped), "equal": dict(self.equal)}
        plain = {step: to_plain(table) for step, table in self.tables.items()}
        if path.suffix == ".json":
            write_whole(path, json.dumps({"tables": plain, **rest}).encode())
        elif path.suffix == ".parquet":
            cells = [
                {"step": step, "layer": layer, "column": column, "value": value, "error": errors.get(layer, {}).get(column)}
                for step, table in plain.items()
                for errors in [table["errors"]]
                for layer, row in table["layers"].items()
                for column, value in row.items()
            ]  # fmt: skip
            tables = {step: {"network": table["network"], "notes": table["notes"]} for step, table in plain.items()}
            write_parquet(path, cells, {"tables": tables, **rest})
        else:
            raise InputError(f"{path}: the name of a series' file ends in .json or .parquet")

    @classmethod
    def load(cls, path: str | Path) -> Series:
        """The series of a file that :meth:`save` wrote, or of the folder that ``gs.series(out=…)`` stored."""
        path = Path(path)
        if path.is_dir():
            return _ordered(*_Store(path).read_all())
        if path.suffix == ".parquet":
            cells, found = read_parquet(path)
            for table in found["tables"].values():
                table |= {"layers": {}, "errors": {}}
            for cell in cells:
                table = found["tables"][str(cell["step"])]
                table["layers"].setdefault(cell["layer"], {})[cell["column"]] = cell["value"]
                if cell["error"] is not None:
                    table["errors"].setdefault(cell["layer"], {})[cell["column"]] = cell["error"]
        else:
            try:
                found = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise InputError(f"{path} holds no series: {error}") from error
        tables = {int(step): from_plain(table) for step, table in found["tables"].items()}
        return cls(
            tables, *({int(step): value for step, value in found[name].items()} for name in ("skipped", "equal"))
        )

    def __str__(self) -> str:
        steps = self.steps
        span = f", steps {steps[0]} to {steps[-1]}" if steps else ""
        lines = [f"{len(steps)} tables of {len(self.layers)} layers and {len(self.columns)} measures{span}"]
        lines += [f"skipped step {step}: {reason}" for step, reason in self.skipped.items()]
        lines += [f"step {step} has exactly the weights of step {other}" for step, other in self.equal.items()]
        return "\n".join(lines)

    __repr__ = __str__


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
    store = _Store(Path(out), settings) if out is not None else None
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
    return _ordered(tables, skipped, digests)


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


def _ordered(tables: dict[int, Table], skipped: dict[int, str], digests: dict[int, str]) -> Series:
    """The series in the order of steps, with the steps whose weights came before."""
    first: dict[str, int] = {}
    equal = {}
    for step in sorted(tables):
        if first.setdefault(digests[step], step) != step:
            equal[step] = first[digests[step]]
    for step, other in equal.items():
        warnings.warn(f"step {step} has exactly the weights of step {other}", ResultWarning, stacklevel=3)
    return Series({step: tables[step] for step in sorted(tables)}, dict(sorted(skipped.items())), equal)


class _Store:
    """A folder with one file for each measured step, written as soon as its table is there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        if settings is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        asked = {name: repr(value) for name, value in sorted(settings.items())}
        path = folder / _SETTINGS
        if not path.exists():
            write_whole(path, json.dumps({"measuring": asked}).encode())
        stored = json.loads(path.read_bytes())["measuring"]
        if stored != asked:
            raise InputError(
                f"{folder} holds a series with measuring={stored}, not {asked}; give another folder as out="
            )

    def write(self, step: int, table: Table, digest: str) -> None:
        """Store the table of a step."""
        content = json.dumps({"digest": digest, "table": to_plain(table)}).encode()
        write_whole(self.folder / f"step-{step:09d}.json", content)

    def read_all(self) -> tuple[dict[int, Table], dict[int, str], dict[int, str]]:
        """Tables, nothing skipped (such steps are tried again), and digests."""
        tables, digests = {}, {}
        for path in sorted(self.folder.glob("step-*.json")):
            try:
                found = json.loads(path.read_bytes())
                step = int(path.stem.removeprefix("step-"))
                tables[step], digests[step] = from_plain(found["table"]), str(found["digest"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} is damaged ({error}); delete it to measure the step again") from error
        return tables, {}, digests
