"""The files of one run directory. Damaged parts and links that lead out of the directory are left out and named."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from gramscope.errors import GramscopeError
from gramscope.names import printable
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import MOST_RECORDS, from_json, inside, read_file
from gramscope_lab.runs.layout import ARTEFACTS, CHECKPOINTS, CONFIG, ENVIRONMENT, RECORDS
from gramscope_lab.runs.records import Record

T = TypeVar("T")

#: larger numbers are left out: their squares would overflow
LARGEST = 1e150
_LAST_STEP = 2**53


@dataclass(frozen=True)
class RunFiles:
    """What a run directory holds; ``problems`` says in sentences what could not be read."""

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: list[Record]
    status: str
    has_artefacts: bool
    problems: list[str] = field(default_factory=list)


def read_run_files(directory: RunDirectory) -> RunFiles:
    """Read a run. Nothing is followed out of its directory, and damage is reported instead of raised."""
    problems: list[str] = []
    no_records: list[Record] = []
    config, environment = read_config(directory, problems), read_environment(directory, problems)
    lines = _read(directory, RECORDS, lambda: _read_lines(directory, problems), no_records, problems)
    left_out: Counter[str] = Counter()
    records = [found for record in lines if (found := _cleaned(record, left_out)) is not None]
    problems += [f"{RECORDS}: {count} {reason}." for reason, count in left_out.items()]
    problems += _edited(directory)
    folder = directory.path / ARTEFACTS
    has_artefacts = all(is_inside(path, directory.path) for path in (folder, *sorted(folder.glob("*"))))
    if not has_artefacts:
        problems.append(f"{ARTEFACTS} holds links out of the directory; no spectra or diagonals were read.")
    return RunFiles(config, environment, records, run_status(directory), has_artefacts, problems)


def read_config(directory: RunDirectory, problems: list[str]) -> Mapping[str, Any]:
    """The configuration; empty, with an entry in ``problems``, if it cannot be read."""
    nothing: dict[str, Any] = {}
    return _read(directory, CONFIG, lambda: _shown(directory.config), nothing, problems)


def read_environment(directory: RunDirectory, problems: list[str]) -> Mapping[str, Any]:
    """The machine and versions; empty, with an entry in ``problems``, if they cannot be read."""
    nothing: dict[str, Any] = {}
    return _read(directory, ENVIRONMENT, lambda: _shown(directory.environment), nothing, problems)


def _read(directory: RunDirectory, name: str, load: Callable[[], T], default: T, problems: list[str]) -> T:
    if not is_inside(directory.path / name, directory.path):
        problems.append(f"{name} is a link out of the directory and was not read.")
        return default
    try:
        return load()
    except (GramscopeError, OSError, TypeError, ValueError, RecursionError) as error:
        problems.append(f"{name}: {error}")
        return default


def run_status(directory: RunDirectory) -> str:
    """The state of a run or group; ``damaged`` where it cannot be read."""
    try:
        return directory.status()
    except (GramscopeError, OSError, ValueError, RecursionError):
        return "damaged"


def is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path`` lies in ``folder`` once all links are followed."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a recorded value is a finite number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _read_lines(directory: RunDirectory, problems: list[str]) -> list[Record]:
    """All records of a run; if a line is damaged, those of the other lines."""
    try:
        return directory.records()
    except GramscopeError as error:
        problems.append(str(error))
    found = []
    for line in read_file(inside(directory.path, RECORDS), MOST_RECORDS).split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _edited(directory: RunDirectory) -> list[str]:
    """A sentence if records were deleted or doubled since the newest checkpoint counted them."""
    try:
        steps = directory.checkpoint_steps()
        state = from_json(directory.at(f"{CHECKPOINTS}/step-{steps[-1]:09d}/state.json")) if steps else {}
        found = directory.edited_records(steps[-1], state.get("records")) if steps else ""
    except (GramscopeError, OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []  # what is damaged is named elsewhere
    return [f"{found}."] if found else []


def _cleaned(record: Record, left_out: Counter[str]) -> Record | None:
    """A record of which every value has the type its readers expect; ``None`` if it is of no use."""
    found = _scalars(record, left_out, inner=("layers", "network"))
    for key in ("layers", "network"):
        if key in record and not isinstance(record[key], Mapping):
            left_out[f"records whose {key!r} is not a table"] += 1
            return None
    if "layers" in record:
        rows = {text(name): row for name, row in record["layers"].items() if isinstance(row, Mapping)}
        found["layers"] = {name: _scalars(row, left_out) for name, row in rows.items()}
    if "network" in record:
        found["network"] = _scalars(record["network"], left_out)
    if found.get("kind") in ("evaluation", "measurement") or "layers" in found or "network" in found:
        step = found.get("step")
        if not is_number(step) or step != int(step) or not 0 <= step <= _LAST_STEP:
            left_out["records without a step, a whole number from 0"] += 1
            return None
        found["step"] = int(step)
        if found.get("kind") == "measurement" and not isinstance(found.get("layer"), str):
            left_out["measurements without the name of a layer"] += 1
            return None
    for key in ("epoch", "seconds"):
        if key in found and not is_number(found[key]):
            del found[key]
    return found


def _scalars(record: Mapping[str, Any], left_out: Counter[str], inner: tuple[str, ...] = ()) -> Record:
    """The numbers, texts and truth values of a record; ``inner`` names keys whose tables are handled elsewhere."""
    found: Record = {}
    for key, value in record.items():
        if value is None or isinstance(value, bool) or is_number(value):
            found[text(key)] = value
        elif isinstance(value, str):
            found[text(key)] = text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            found[text(key)] = None
        elif isinstance(value, int | float):
            found[text(key)] = None
            left_out[f"numbers beyond {LARGEST:g}"] += 1
        elif key not in inner and record.get("kind") in ("evaluation", "measurement"):
            left_out["values that are lists or tables where a number belongs"] += 1
    return found


def text(value: str) -> str:
    """Text that can be shown and written as UTF-8, see :func:`~gramscope.names.printable`."""
    return printable(value)


def _shown(value: Any) -> Any:
    """The values of a file with all texts in them as they can be shown."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(str(key)): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value
