"""The run directory, and the only place that knows its file names.

    config.toml       what to run
    environment.json  versions, machine, device, git state
    records.jsonl     evaluations and measurements, one JSON object a line, append-only
    checkpoints/      step-000000123/{model.safetensors, training.safetensors, state.json, manifest.json}
    artefacts/        matrices kept for the report (diagonals, spectra), safetensors
    figures/          PNG, PDF, HTML
    .files            names of the artefacts and figures that gramscope wrote
    lock              present while a process writes here

A directory whose sub-directories are run directories is a *group*: seeds and learning rates of one configuration, or
all runs of an experiment. Reading a group reads its members.

A run directory may come from somebody else: links in it are not followed, and names in its files lead nowhere outside.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import DamagedCheckpointError, InputError, ResultWarning
from gramscope.runs import files
from gramscope.runs.checkpoints import (
    Checkpoint,
    checkpoint_path,
    checkpoint_steps,
    is_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    read_tensors,
    remove_checkpoints,
    write_checkpoint,
)
from gramscope.runs.files import from_json, from_toml, inside, is_file, is_folder, names_in, to_json, write_file
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
#: first line of a configuration that gramscope stored
MARK = b"# a run of gramscope\n"

#: names that only gramscope gives, in artefacts/ and figures/
_OWN = {
    ARTEFACTS: re.compile(r"(spectra|diagonals)-.*\d\.safetensors"),
    FIGURES: re.compile(r"report\.html|panel-.*\.(png|pdf)"),
}


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
            run.path.mkdir(parents=True, exist_ok=True)
            with run.lock:
                run.check_free(force=force)  # again, now that no other process can start a run here
                if run.exists():
                    run.clear()
                run.remove_litter()
                run.write_config(config)
        except OSError as error:
            raise InputError(f"cannot write a run to {run.path}: {error}; choose another directory") from error
        return run

    def check_free(self, *, force: bool = False, members: Sequence[str] = ()) -> None:
        """Raise an error where :meth:`create` would refuse to start a run, or one of its ``members``; nothing is changed."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; choose another directory for the run")
        if self.exists():
            if not self._is_ours():
                raise InputError(f"{self.path / CONFIG} is not of a run of ours; choose another directory for the run")
            if not force:
                raise InputError(f"{self.path} already holds a run; resume it (--resume) or replace it (--force)")
            self._check_clearable()
        elif self.path.is_dir() and not self._is_litter():
            raise InputError(f"{self.path} is not empty and is no run of ours; choose another directory for the run")
        if len(members) > 1:  # a single member is the run itself
            for name in members:
                self.member(name).check_free(force=force)

    def _check_clearable(self) -> None:
        """Raise an error where :meth:`clear` would fail half-way."""
        if self.lock.held_by_other():
            raise InputError(f"{self.path} is in use by {self.lock.holder()}; wait for it or use another directory")
        for name in (CONFIG, ENVIRONMENT, RECORDS, FILES, CHECKPOINTS, ARTEFACTS, FIGURES):
            self._at(name)
        for member in self.members():
            member._check_clearable()

    def _is_ours(self) -> bool:
        """Whether the configuration here is one that gramscope wrote, and not a ``config.toml`` of another program."""
        if files.read_file(self._at(CONFIG)).startswith(MARK):
            return True
        # runs of earlier versions have no mark
        known = any(files.exists(self.path / name) for name in (ENVIRONMENT, CHECKPOINTS, FILES)) or bool(
            self.members()
        )
        try:
            return known or {"data", "model", "method"} <= self.config.keys()
        except InputError:
            return False

    def _is_litter(self) -> bool:
        """Whether there is nothing but what a killed writer leaves before there is a run."""
        names = [name for name in names_in(self._here()) if not name.startswith(files.TEMPORARY)]
        return not names or (names == [LOCK] and self.lock.is_ours())

    def remove_litter(self) -> None:
        """Remove what killed writers left here and in the members."""
        self._remove_unfinished()
        for run in self._folders():
            half_made = bool(names_in(run.path)) and run._is_litter()
            if run.exists() or half_made:
                with run.lock:
                    run.remove_litter()
            if half_made:
                files.remove_if_empty(run.path)

    def _remove_unfinished(self) -> None:
        for folder in (self._here(), *(self._at(name) for name in (CHECKPOINTS, ARTEFACTS, FIGURES))):
            files.remove_unfinished(folder)

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
        return is_file(self.path / CONFIG)

    def _at(self, name: str) -> Path:
        """The path of a file or folder of this run; a link in its place is an error."""
        return inside(self.path, name)

    def clear(self) -> None:
        """Remove what gramscope wrote here, members included, and nothing else."""
        with self.lock:
            for member in self.members():
                member.clear()
                files.remove_if_empty(member.path)
            prune_checkpoints(self._at(CHECKPOINTS), 0)
            for file in self._own_files():
                files.remove(file)
            self.remove_litter()
            for folder in (CHECKPOINTS, ARTEFACTS, FIGURES):
                files.remove_if_empty(self._at(folder))
            for name in (RECORDS, ENVIRONMENT, FILES, CONFIG):
                files.remove(self._at(name))

    def _own_files(self) -> Iterator[Path]:
        """Artefacts and figures that gramscope wrote, also before it kept a list of them."""
        for name in self._listed_files():
            yield self._at(name)
        for folder, pattern in _OWN.items():
            yield from (path for path in self._files_in(folder) if pattern.fullmatch(path.name))

    def _files_in(self, folder: str, ending: str = "") -> list[Path]:
        """Regular files in one of our folders; none where a link is in its place."""
        place = self.path / folder
        return [place / name for name in names_in(place) if name.endswith(ending) and is_file(place / name)]

    def _listed_files(self) -> list[str]:
        """Names in the list of our files; a name that leads anywhere but to artefacts and figures is passed over."""
        path = self._at(FILES)
        lines = files.read_file(path).decode(errors="replace").splitlines() if files.exists(path) else []
        parts = (line.partition("/") for line in lines)
        return [f"{folder}/{name}" for folder, _, name in parts if folder in _OWN and _can_name(name)]

    def _list_file(self, folder: str, name: str) -> Path:
        """Remember that a file is ours, and make its folder."""
        path = self._at(f"{folder}/{_file_name(name)}")
        with files.explained(str(path)):
            files.make_folder(path.parent)
            listed = self._listed_files()
            if f"{folder}/{name}" not in listed:
                write_file(self._at(FILES), "".join(f"{line}\n" for line in (*listed, f"{folder}/{name}")).encode())
        return path

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> list[RunDirectory]:
        """The runs (or groups) directly inside this directory, by name."""
        found = (run for run in self._folders() if run.exists())
        return sorted(found, key=lambda run: _natural(run.path.name))

    def member(self, name: str) -> RunDirectory:
        """The run ``name`` in this group, which need not exist yet."""
        return RunDirectory(self._at(name))

    def _folders(self) -> list[RunDirectory]:
        return [RunDirectory(self.path / name) for name in names_in(self._here()) if is_folder(self.path / name)]

    def _here(self) -> Path:
        """The directory itself; the user named it, so that it may be a link."""
        return self.path.resolve()

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
        path = self._at(CONFIG)
        return from_toml(path) if files.exists(path) else {}

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the configuration."""
        import tomli_w

        write_file(self._at(CONFIG), MARK + tomli_w.dumps(dict(config)).encode())

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made with; empty if it was not recorded."""
        path = self._at(ENVIRONMENT)
        facts = from_json(path) if files.exists(path) else {}
        if not isinstance(facts, dict):
            raise InputError(f"{path} holds {type(facts).__name__}, not an object; delete it")
        return facts

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Store what the run is made with."""
        write_file(self._at(ENVIRONMENT), (to_json(dict(facts), indent=1) + "\n").encode())

    # -- records --------------------------------------------------------------------------------------------------
    def records(self, kind: str | None = None) -> list[Record]:
        """All records, those of members included, each with ``run``, the member's path; ``kind`` selects."""
        if not self.members():
            records = read_records(self._at(RECORDS))
            return [record for record in records if kind is None or record.get("kind") == kind]
        found: list[Record] = []
        for run in self.runs():
            name = run.path.relative_to(self.path).as_posix()
            found += [{"run": name, **record} for record in run.records(kind)]
        return found

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records; they are on the file when this returns."""
        self._records.extend(records)

    def records_position(self) -> dict[str, int]:
        """The end of the records, flushed to disk: a checkpoint stores it, :meth:`rewind_records` goes back to it."""
        return self._records.position()

    def rewind_records(self, position: Any) -> None:
        """Forget the records written after a checkpoint."""
        self.close()
        truncate_records(self._at(RECORDS), position)

    @property
    def _records(self) -> RecordWriter:
        if self._writer is None:
            self._writer = RecordWriter(self._at(RECORDS))
        return self._writer

    def close(self) -> None:
        """Close the record file; writing opens it again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # -- checkpoints, artefacts, figures --------------------------------------------------------------------------
    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return checkpoint_steps(self._at(CHECKPOINTS))

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint atomically."""
        return write_checkpoint(self._at(CHECKPOINTS), checkpoint)

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` (0 keeps all)."""
        if keep > 0:
            prune_checkpoints(self._at(CHECKPOINTS), keep)

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Go back to a checkpoint, or to the start: forget the records and the checkpoints after it."""
        last = -1 if checkpoint is None else checkpoint.step
        remove_checkpoints(self._at(CHECKPOINTS), [step for step in self.checkpoint_steps() if step > last])
        self.rewind_records(0 if checkpoint is None else checkpoint.state.get("records"))

    def load_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint at ``step``, by default the newest that is intact; damaged ones are announced."""
        steps = self.checkpoint_steps()
        if not steps:
            raise InputError(f"{self.path} has no checkpoint yet")
        if step is None:
            return newest_intact([self], steps)[0]
        if step not in steps:
            raise InputError(f"{self.path} has no checkpoint at step {step}; there are: {', '.join(map(str, steps))}")
        return read_checkpoint(checkpoint_path(self._at(CHECKPOINTS), step))

    def save_artefact(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Store matrices under ``name`` (letters, digits, ``-``, ``_``, ``.``), replacing what was there."""
        from safetensors.torch import save

        path = self._list_file(ARTEFACTS, f"{_file_name(name)}.safetensors")
        write_file(path, save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
        return path

    def artefacts(self) -> list[str]:
        """Names of the stored artefacts."""
        return sorted(path.stem for path in self._files_in(ARTEFACTS, ".safetensors"))

    def load_artefact(self, name: str) -> dict[str, Tensor]:
        """Read stored matrices."""
        path = self._at(f"{ARTEFACTS}/{_file_name(name)}.safetensors")
        if not files.exists(path):
            raise InputError(
                f"{self.path} has no artefact {name!r}; there are: {', '.join(self.artefacts()) or 'none'}"
            )
        return read_tensors(path)

    def figure_path(self, name: str) -> Path:
        """Where to write figure ``name`` (with its ending); the folder is made."""
        return self._list_file(FIGURES, name)

    def figures(self, ending: str = "") -> list[Path]:
        """The figures in this directory, by name."""
        return self._files_in(FIGURES, ending)

    def growing_files(self) -> list[Path]:
        """The files that change while a run goes on: records and artefacts."""
        return [self.path / RECORDS, *self._files_in(ARTEFACTS)]

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


def newest_intact(runs: Sequence[RunDirectory], steps: Iterable[int]) -> list[Checkpoint]:
    """The checkpoints of all ``runs`` at the newest of ``steps`` where none is damaged; damaged ones are announced."""
    damage: DamagedCheckpointError | None = None
    for step in sorted(steps, reverse=True):
        try:
            return [run.load_checkpoint(step) for run in runs]
        except DamagedCheckpointError as error:
            warnings.warn(f"{error}; the checkpoint before it is used", ResultWarning, stacklevel=3)
            damage = error
    raise InputError(f"no checkpoint of {runs[0].path} is intact; restore one, or start again with --force") from damage


def free_path(path: Path | str) -> Path:
    """``path`` itself, or with the first number that makes it new: x, x-2, x-3 …"""
    path = free = Path(path)
    number = 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _file_name(name: str) -> str:
    if not _can_name(name):
        raise InputError(f"{name!r} cannot name a file here; use letters, digits, '-', '_' and '.'")
    return name


def _can_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and all(letter.isalnum() or letter in "-_.," for letter in name)


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Sort key that puts seed-2 before seed-10."""
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in re.split(r"(\d+)", name)]
