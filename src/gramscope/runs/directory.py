"""The run directory, and the only place that knows its file names.

    config.toml       what to run
    environment.json  versions, machine, device, git state
    records.jsonl     evaluations and measurements, one JSON object a line, append-only
    checkpoints/      step-000000123/{model.safetensors, training.safetensors, state.json}
    artefacts/        matrices kept for the report (diagonals, spectra), safetensors
    figures/          PNG, PDF, HTML
    .files            names of the artefacts and figures that gramscope wrote
    lock              present while a process writes here

A directory whose sub-directories are run directories is a *group*: seeds and learning rates of one configuration, or
all runs of an experiment. Reading a group reads its members.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import InputError
from gramscope.runs.checkpoints import (
    Checkpoint,
    checkpoint_steps,
    is_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    read_tensors,
    write_checkpoint,
)
from gramscope.runs.files import from_json, remove_if_empty, remove_unfinished, to_json, write_file
from gramscope.runs.lock import Lock
from gramscope.runs.records import Record, RecordWriter, read_records, truncate_records

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
RECORDS = "records.jsonl"
CHECKPOINTS = "checkpoints"
ARTEFACTS = "artefacts"
FIGURES = "figures"
FILES = ".files"
LOCK = "lock"

#: names that only gramscope gives
_OWN = (
    f"{ARTEFACTS}/spectra-*[0-9].safetensors",
    f"{ARTEFACTS}/diagonals-*[0-9].safetensors",
    f"{FIGURES}/report.html",
    f"{FIGURES}/panel-*.p[nd][gf]",
)


class RunDirectory:
    """A run (or group of runs) on disk.

    Make one with :meth:`create` or :meth:`open`. Writing methods are meant for the process that holds :meth:`lock`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lock = Lock(self.path / LOCK)
        self._writer: RecordWriter | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    # -- making and opening ---------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], *, force: bool = False) -> RunDirectory:
        """Start a run directory. An existing run is replaced only with ``force``; other files are never touched."""
        run = cls(path)
        run.check_free(force=force)
        try:
            if run.exists():
                run.clear()
            run.path.mkdir(parents=True, exist_ok=True)
            run.write_config(config)
        except OSError as error:
            raise InputError(f"cannot write a run to {run.path}: {error}; choose another directory") from error
        return run

    def check_free(self, *, force: bool = False) -> None:
        """Raise an error where :meth:`create` would refuse to start a run; nothing is changed."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; choose another directory for the run")
        if self.exists():
            if not force:
                raise InputError(f"{self.path} already holds a run; resume it (--resume) or replace it (--force)")
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"{self.path} is not empty and is no run of ours; choose another directory for the run")

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open an existing run or group."""
        run = cls(path)
        if not run.exists() and not run.members():
            raise InputError(
                f"{run.path} holds no run ({CONFIG} is missing); `gramscope runs list` shows what is there"
            )
        return run

    @classmethod
    def locate(cls, path: Path | str) -> tuple[RunDirectory, int | None]:
        """The run or group at ``path``, or the run a checkpoint folder belongs to, with the checkpoint's step."""
        path = Path(path)
        if is_checkpoint(path):
            return cls.open(path.parent.parent), int(path.name.removeprefix("step-"))
        return cls.open(path), None

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).is_file()

    def clear(self) -> None:
        """Remove what gramscope wrote here, members included, and nothing else."""
        with self.lock:
            for member in self.members():
                member.clear()
                remove_if_empty(member.path)
            prune_checkpoints(self.path / CHECKPOINTS, 0)
            for file in self._own_files():
                file.unlink(missing_ok=True)
            for folder in (CHECKPOINTS, ARTEFACTS, FIGURES):
                remove_unfinished(self.path / folder)
                remove_if_empty(self.path / folder)
            for name in (RECORDS, ENVIRONMENT, FILES, CONFIG):
                (self.path / name).unlink(missing_ok=True)
            remove_unfinished(self.path)

    def _own_files(self) -> Iterator[Path]:
        """Artefacts and figures that gramscope wrote, also before it kept a list of them."""
        for name in self._listed_files():
            yield self.path / name
        for pattern in _OWN:
            yield from self.path.glob(pattern)

    def _listed_files(self) -> list[str]:
        path = self.path / FILES
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def _list_file(self, path: Path) -> Path:
        """Remember that a file is ours."""
        name = path.relative_to(self.path).as_posix()
        if name not in self._listed_files():
            with (self.path / FILES).open("a", encoding="utf-8") as file:
                file.write(name + "\n")
        return path

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> list[RunDirectory]:
        """The runs (or groups) directly inside this directory, by name."""
        if not self.path.is_dir():
            return []
        found = (RunDirectory(path) for path in self.path.iterdir() if path.is_dir())
        return sorted((run for run in found if run.exists()), key=lambda run: _natural(run.path.name))

    def runs(self) -> Iterator[RunDirectory]:
        """All single runs in here: this one if it has no members, else those of its members."""
        members = self.members()
        if not members:
            yield self
        for member in members:
            yield from member.runs()

    @property
    def name(self) -> str:
        """The directory's last name."""
        return self.path.resolve().name

    # -- configuration and environment ----------------------------------------------------------------------------
    @property
    def config(self) -> dict[str, Any]:
        """The configuration as plain nested values; empty for a group without one of its own."""
        path = self.path / CONFIG
        if not path.exists():
            return {}
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the configuration."""
        import tomli_w

        write_file(self.path / CONFIG, tomli_w.dumps(dict(config)).encode())

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made with; empty if it was not recorded."""
        path = self.path / ENVIRONMENT
        return dict(from_json(path)) if path.exists() else {}

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Store what the run is made with."""
        write_file(self.path / ENVIRONMENT, (to_json(dict(facts), indent=1) + "\n").encode())

    # -- records --------------------------------------------------------------------------------------------------
    def records(self, kind: str | None = None) -> list[Record]:
        """All records, those of members included, each with ``run``, the member's path; ``kind`` selects."""
        if not self.members():
            records = read_records(self.path / RECORDS)
            return [record for record in records if kind is None or record.get("kind") == kind]
        found: list[Record] = []
        for run in self.runs():
            name = run.path.relative_to(self.path).as_posix()
            found += [{"run": name, **record} for record in run.records(kind)]
        return found

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records; they are on the file when this returns."""
        self._records.extend(records)

    def records_position(self) -> int:
        """Size of the record file, flushed to disk: a checkpoint stores it, :meth:`rewind_records` goes back to it."""
        return self._records.position()

    def rewind_records(self, position: int) -> None:
        """Forget the records written after a checkpoint."""
        self.close()
        truncate_records(self.path / RECORDS, position)

    @property
    def _records(self) -> RecordWriter:
        if self._writer is None:
            self._writer = RecordWriter(self.path / RECORDS)
        return self._writer

    def close(self) -> None:
        """Close the record file; writing opens it again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # -- checkpoints, artefacts, figures --------------------------------------------------------------------------
    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return checkpoint_steps(self.path / CHECKPOINTS)

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint atomically."""
        return write_checkpoint(self.path / CHECKPOINTS, checkpoint)

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` (0 keeps all)."""
        if keep > 0:
            prune_checkpoints(self.path / CHECKPOINTS, keep)

    def load_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint at ``step``, the newest by default."""
        steps = self.checkpoint_steps()
        if not steps:
            raise InputError(f"{self.path} has no checkpoint yet")
        if step is not None and step not in steps:
            raise InputError(f"{self.path} has no checkpoint at step {step}; there are: {', '.join(map(str, steps))}")
        return read_checkpoint(self.path / CHECKPOINTS / f"step-{steps[-1] if step is None else step:09d}")

    def save_artefact(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Store matrices under ``name`` (letters, digits, ``-``, ``_``, ``.``), replacing what was there."""
        from safetensors.torch import save

        folder = self.path / ARTEFACTS
        folder.mkdir(exist_ok=True)
        path = self._list_file(folder / f"{_file_name(name)}.safetensors")
        write_file(path, save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
        return path

    def artefacts(self) -> list[str]:
        """Names of the stored artefacts."""
        return sorted(path.stem for path in (self.path / ARTEFACTS).glob("*.safetensors"))

    def load_artefact(self, name: str) -> dict[str, Tensor]:
        """Read stored matrices."""
        path = self.path / ARTEFACTS / f"{_file_name(name)}.safetensors"
        if not path.exists():
            raise InputError(
                f"{self.path} has no artefact {name!r}; there are: {', '.join(self.artefacts()) or 'none'}"
            )
        return read_tensors(path)

    def figure_path(self, name: str) -> Path:
        """Where to write figure ``name`` (with its ending); the folder is made."""
        folder = self.path / FIGURES
        folder.mkdir(exist_ok=True)
        return self._list_file(folder / _file_name(name))

    # -- status ---------------------------------------------------------------------------------------------------
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` (it can be resumed) or ``new``; a group's is its members' worst."""
        if self.lock.held_by_other():
            return "running"
        members = self.members()
        if members:
            found = {member.status() for member in members}
            return next(name for name in ("running", "stopped", "new", "finished") if name in found)
        ends = self.records("end")
        if ends:
            return "finished" if ends[-1].get("finished") else "stopped"
        return "stopped" if self.checkpoint_steps() else "new"


def free_path(path: Path | str) -> Path:
    """``path`` itself, or with the first number that makes it new: x, x-2, x-3 …"""
    path = free = Path(path)
    number = 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _file_name(name: str) -> str:
    if not name or name.startswith(".") or not all(letter.isalnum() or letter in "-_.," for letter in name):
        raise InputError(f"{name!r} cannot name a file here; use letters, digits, '-', '_' and '.'")
    return name


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Sort key that puts seed-2 before seed-10."""
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in re.split(r"(\d+)", name)]
