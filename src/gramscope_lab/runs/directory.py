"""The run directory: everything that is read from it and written to it.

A run directory may come from somebody else: links in it are not followed, and names in its files lead nowhere outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope.errors import DamagedCheckpointError, InputError, ResultWarning
from gramscope_lab.runs import files
from gramscope_lab.runs.checkpoints import (
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
from gramscope_lab.runs.files import from_json, from_toml, inside, is_file, is_folder, names_in, to_json, write_file
from gramscope_lab.runs.layout import (
    ARTEFACTS,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    FIGURES,
    LOCK,
    MARK,
    MOST_DEPTH,
    RECORDS,
    file_name,
    natural,
)
from gramscope_lab.runs.lock import Lock
from gramscope_lab.runs.own_files import OwnFiles
from gramscope_lab.runs.records import Record, RecordWriter, edited, read_records, truncate_records
from gramscope_lab.runs.starting import check_free, clear, remove_litter

if TYPE_CHECKING:
    from torch import Tensor


class RunDirectory:
    """A run (or group of runs) on disk.

    Make one with :meth:`create` or :meth:`open`. Writing methods are meant for the process that holds :meth:`lock`.
    ``depth`` counts the groups above it that are being read.
    """

    def __init__(self, path: Path | str, depth: int = 0) -> None:
        self.path = Path(path)
        self.lock = Lock(self.path / LOCK)
        self._depth = depth
        self._own = OwnFiles(self.path)
        self._writer: RecordWriter | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    # -- making and opening ---------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], *, force: bool = False) -> RunDirectory:
        """Start a run directory. An existing run is replaced only with ``force``; other files are never touched."""
        run = cls(path)
        check_free(run, force=force)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            with run.lock:
                check_free(run, force=force)  # again, now that no other process can start a run here
                if run.exists():
                    clear(run)
                remove_litter(run)
                run.write_config(config)
        except OSError as error:
            raise InputError(f"cannot write a run to {run.path}: {error}; choose another directory") from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open an existing run or group."""
        run = cls(path)
        if not run.exists() and not run.members():
            why = f"{CONFIG} is missing" if run.path.is_dir() else "there is no such folder"
            raise InputError(f"{run.path} holds no run ({why}); `gramscope runs list` shows what is there")
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

    def at(self, name: str) -> Path:
        """The path of a file or folder of this run; a link in its place is an error."""
        return inside(self.path, name)

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> list[RunDirectory]:
        """The runs (or groups) directly inside this directory, by name."""
        found = (run for run in self.folders() if run.exists())
        return sorted(found, key=lambda run: natural(run.path.name))

    def member(self, name: str) -> RunDirectory:
        """The run ``name`` in this group, which need not exist yet."""
        return RunDirectory(self.at(name))

    def folders(self) -> list[RunDirectory]:
        """All folders directly inside this directory, runs or not. The user named it, so that itself may be a link."""
        if self._depth == MOST_DEPTH:
            raise InputError(f"{self.path} is nested in {MOST_DEPTH} groups; more are not read")
        names = [name for name in names_in(self.path.resolve()) if is_folder(self.path / name)]
        return [RunDirectory(self.path / name, self._depth + 1) for name in names]

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
        path = self.at(CONFIG)
        return from_toml(path) if files.exists(path) else {}

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the configuration."""
        import tomli_w

        write_file(self.at(CONFIG), MARK + tomli_w.dumps(dict(config)).encode())

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made with; empty if it was not recorded."""
        path = self.at(ENVIRONMENT)
        facts = from_json(path) if files.exists(path) else {}
        if not isinstance(facts, dict):
            raise InputError(f"{path} holds {type(facts).__name__}, not an object; delete it")
        return facts

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Store what the run is made with."""
        write_file(self.at(ENVIRONMENT), (to_json(dict(facts), indent=1) + "\n").encode())

    # -- records --------------------------------------------------------------------------------------------------
    def records(self, kind: str | None = None) -> list[Record]:
        """All records, those of members included, each with ``run``, the member's path; ``kind`` selects."""
        if not self.members():
            records = read_records(self.at(RECORDS))
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
        truncate_records(self.at(RECORDS), position)

    def edited_records(self, step: int, position: Any) -> str:
        """What shows that lines were deleted or doubled since a checkpoint at ``step`` with this position; else nothing."""
        lines = position.get("lines") if isinstance(position, dict) else None
        if not isinstance(lines, int):  # of an earlier version
            return ""
        found = edited(read_records(self.at(RECORDS)), step, lines)
        return f"{self.at(RECORDS)} was edited: it has {found}" if found else ""

    @property
    def _records(self) -> RecordWriter:
        if self._writer is None:
            self._writer = RecordWriter(self.at(RECORDS))
        return self._writer

    def close(self) -> None:
        """Close the record file; writing opens it again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # -- checkpoints, artefacts, figures --------------------------------------------------------------------------
    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return checkpoint_steps(self.at(CHECKPOINTS))

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint atomically."""
        return write_checkpoint(self.at(CHECKPOINTS), checkpoint)

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` (0 keeps all)."""
        if keep > 0:
            prune_checkpoints(self.at(CHECKPOINTS), keep)

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Go back to a checkpoint, or to the start: forget the records and the checkpoints after it."""
        last = -1 if checkpoint is None else checkpoint.step
        if checkpoint is not None and (found := self.edited_records(checkpoint.step, checkpoint.state.get("records"))):
            raise InputError(f"{found}; restore it, or start again with --force")
        remove_checkpoints(self.at(CHECKPOINTS), [step for step in self.checkpoint_steps() if step > last])
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
        return read_checkpoint(checkpoint_path(self.at(CHECKPOINTS), step))

    def save_artefact(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Store matrices under ``name`` (letters, digits, ``-``, ``_``, ``.``), replacing what was there."""
        from safetensors.torch import save

        path = self._own.add(ARTEFACTS, f"{file_name(name)}.safetensors")
        write_file(path, save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
        return path

    def artefacts(self) -> list[str]:
        """Names of the stored artefacts."""
        return sorted(path.stem for path in self._own.present(ARTEFACTS, ".safetensors"))

    def load_artefact(self, name: str) -> dict[str, Tensor]:
        """Read stored matrices."""
        path = self.at(f"{ARTEFACTS}/{file_name(name)}.safetensors")
        if not files.exists(path):
            raise InputError(
                f"{self.path} has no artefact {name!r}; there are: {', '.join(self.artefacts()) or 'none'}"
            )
        return read_tensors(path)

    def figure_path(self, name: str) -> Path:
        """Where to write figure ``name`` (with its ending); the folder is made."""
        return self._own.add(FIGURES, name)

    def figures(self, ending: str = "") -> list[Path]:
        """The figures in this directory, by name."""
        return self._own.present(FIGURES, ending)

    def growing_files(self) -> list[Path]:
        """The files that change while a run goes on: records and artefacts."""
        return [self.path / RECORDS, *self._own.present(ARTEFACTS)]

    # -- status ---------------------------------------------------------------------------------------------------
    def status(self, records: Sequence[Record] | None = None) -> str:
        """``running``, ``finished``, ``stopped`` (it can be resumed), ``recorded`` or ``new``; a group's is its members' worst.

        ``recorded`` are runs of a user's own loop, of which it is not known whether they have ended. Who has read the
        ``records`` of a single run passes them.
        """
        if self.lock.held_by_other():
            return "running"
        members = self.members()
        if members:
            found = {member.status() for member in members}
            return next(name for name in ("running", "stopped", "new", "recorded", "finished") if name in found)
        records = self.records() if records is None else records
        ends = [record for record in records if record.get("kind") == "end"]
        if ends:
            return "finished" if ends[-1].get("finished") else "stopped"
        if self.checkpoint_steps():
            return "stopped"
        return "recorded" if "method" not in self.config and records else "new"


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
