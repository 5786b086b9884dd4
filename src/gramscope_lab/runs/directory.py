"""The run directory: everything that is read from it and written to it."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gramscope
from gramscope.errors import DamagedCheckpointError, InputError, ResultWarning, StorageError
from gramscope_lab.runs import files
from gramscope_lab.runs.checkpoints import (
    Checkpoint,
    checkpoint_path,
    checkpoint_steps,
    is_checkpoint,
    read_checkpoint,
    read_tensors,
    step_of,
    write_checkpoint,
)
from gramscope_lab.runs.files import (
    ARTEFACTS,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    FIGURES,
    LOCK,
    LOCKED,
    MARK,
    MEASURED,
    RECORDS,
    STOP,
    file_name,
    from_json,
    from_toml,
    inside,
    names_in,
    natural,
    to_json,
    write_file,
)
from gramscope_lab.runs.lock import Lock
from gramscope_lab.runs.records import Record, append_records, iter_records, last_record, records_end, truncate_records

if TYPE_CHECKING:
    from torch import Tensor

_FOLDERS = (CHECKPOINTS, ARTEFACTS, FIGURES)


class RunDirectory:
    """A run (or group of runs) on disk.

    Make one with :meth:`create` or :meth:`open`. Writing methods are meant for the process that holds :attr:`lock`. Nothing is
    kept open between calls.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lock = Lock(self.path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    # -- making and opening ---------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], *, force: bool = False) -> RunDirectory:
        """Start a run directory. An existing run is replaced only with ``force``, with its figures and members."""
        run = cls(path)
        run.check_free(force=force)
        try:
            files.make_folder(run.path)
        except StorageError as error:
            raise InputError(
                f"cannot write a run to {run.path}: {error.__cause__}; choose another directory"
            ) from error
        run.lock.acquire(force=force)
        try:
            run.check_free(force=force)  # again, now that no other process can start a run here
            run.clear()
            run.write_config(config)
        finally:
            run.lock.release()
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
        """The run or group at ``path``, or the run a checkpoint belongs to, with the checkpoint's step."""
        path = Path(path)
        return (cls.open(path.parent.parent), step_of(path)) if is_checkpoint(path) else (cls.open(path), None)

    def check_free(self, *, force: bool = False, members: Sequence[str] = ()) -> None:
        """Raise an error where no run, or none of its ``members``, may be started; nothing is changed."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; choose another directory for the run")
        if self.exists():
            if not files.read_file(self.at(CONFIG)).startswith(MARK):
                raise InputError(f"{path / CONFIG} was not written by gramscope; choose another directory for the run")
            if not force:
                raise InputError(
                    f"{path} already holds a run; resume it (--resume) or replace it (--force, in Python force=True)"
                )
            for run in (self, *self.members()):
                if run.lock.held_by_other():
                    raise InputError(
                        f"{run.path} is in use by {run.lock.described()}; wait for it or use another directory"
                    )
        elif any(not name.startswith(files.TEMPORARY) and name not in (LOCK, LOCKED) for name in names_in(path)):
            raise InputError(f"{path} is not empty and holds no run of gramscope; choose another directory for the run")
        if len(members) > 1:  # a single member is the run itself
            for name in members:
                self.member(name).check_free(force=force)

    def clear(self) -> None:
        """Remove what belongs to the run, members included; other files stay."""
        for member in self.members():
            with member.lock:
                member.clear()
            if not names_in(member.path):
                member.path.rmdir()
        self.remove_stale()
        for name in (*_FOLDERS, RECORDS, MEASURED, ENVIRONMENT, STOP, CONFIG):
            files.remove(self.path / name)

    def remove_stale(self) -> None:
        """Remove what killed writers left in a run and in its members."""
        for folder in (self.path, *(self.path / name for name in _FOLDERS)):
            if not folder.is_symlink() or folder == self.path:
                files.remove_stale(folder)
        for member in self.members():
            if not member.lock.held_by_other():
                files.remove(member.path / LOCK)
            member.remove_stale()

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).is_file()

    def at(self, name: str) -> Path:
        """The path of a file or folder of this run; one that leads out of the directory is an error."""
        return inside(self.path, name)

    # -- members --------------------------------------------------------------------------------------------------
    def members(self) -> list[RunDirectory]:
        """The runs (or groups) directly inside this directory, by name."""
        return sorted((run for run in self.folders() if run.exists()), key=lambda run: natural(run.path.name))

    def member(self, name: str) -> RunDirectory:
        """The run ``name`` in this group, which need not exist yet."""
        return RunDirectory(self.at(name))

    def folders(self) -> list[RunDirectory]:
        """All folders directly inside this directory, runs or not; links are left out."""
        paths = (self.path / name for name in names_in(self.path))
        return [RunDirectory(path) for path in paths if path.is_dir() and not path.is_symlink()]

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
        return from_toml(path) if path.exists() else {}

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the configuration."""
        import tomli_w

        write_file(self.at(CONFIG), MARK + tomli_w.dumps(dict(config)).encode())

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made with; empty if it was not recorded."""
        path = self.at(ENVIRONMENT)
        facts = from_json(path) if path.exists() else {}
        if not isinstance(facts, dict):
            raise InputError(f"{path} holds {type(facts).__name__}, not an object; delete it")
        return facts

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Store what the run is made with."""
        write_file(self.at(ENVIRONMENT), (to_json(dict(facts), indent=1) + "\n").encode())

    # -- records --------------------------------------------------------------------------------------------------
    def iter_records(self, kind: str | None = None, damaged: list[str] | None = None) -> Iterator[Record]:
        """All records, one after the other, those of members included, each with ``run``, the member's path.

        Args:
            kind: only records of this kind.
            damaged: takes the messages about lines that are no records, which are errors otherwise.
        """
        for run in self.runs():
            named = {} if run.path == self.path else {"run": run.path.relative_to(self.path).as_posix()}
            for name in (RECORDS, MEASURED):
                for record, _ in iter_records(run.at(name), damaged=damaged):
                    if kind is None or record.get("kind") == kind:
                        yield {**named, **record}

    def records(self, kind: str | None = None) -> list[Record]:
        """What :meth:`iter_records` gives, as a list."""
        return list(self.iter_records(kind))

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records; they are on the disk when this returns."""
        append_records(self.at(RECORDS), records)

    def save_measured(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Store what was measured after training, in place of what was stored before; :meth:`iter_records` gives it too."""
        write_file(self.at(MEASURED), "".join(to_json(dict(record)) + "\n" for record in records).encode())

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return checkpoint_steps(self.at(CHECKPOINTS))

    def save_checkpoint(self, step: int, model: Mapping[str, Tensor], state: Any) -> Path:
        """Write weights and any nested state atomically; the checkpoint remembers the records there are."""
        return write_checkpoint(self.at(CHECKPOINTS), Checkpoint(step, model, state, records_end(self.at(RECORDS))))

    def load_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint at ``step``, by default the newest that is intact; damaged ones are announced."""
        steps = self.checkpoint_steps()
        if not steps:
            raise InputError(f"{self.path} has no checkpoint yet")
        if step is None:
            return newest_intact([self], steps)[0]
        if step not in steps:
            raise InputError(f"{self.path} has no checkpoint at step {step}; there are: {', '.join(map(str, steps))}")
        return read_checkpoint(self.checkpoint_path(step))

    def checkpoint_path(self, step: int) -> Path:
        """The file of a checkpoint."""
        return self.at(str(checkpoint_path(Path(CHECKPOINTS), step)))

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` (0 keeps all)."""
        if keep > 0:
            self._remove_checkpoints(self.checkpoint_steps()[:-keep])

    def _remove_checkpoints(self, steps: Iterable[int]) -> None:
        for step in steps:
            files.remove(self.checkpoint_path(step))

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Go back to a checkpoint, or to the start: forget the records and the checkpoints after it, and later measurements."""
        files.remove(self.path / MEASURED)
        truncate_records(self.at(RECORDS), 0 if checkpoint is None else checkpoint.records_end)
        last = -1 if checkpoint is None else checkpoint.step
        self._remove_checkpoints(step for step in self.checkpoint_steps() if step > last)

    # -- artefacts and figures ------------------------------------------------------------------------------------
    def save_artefact(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Store matrices under ``name`` (letters, digits, ``-``, ``_``, ``.``), replacing what was there."""
        from safetensors.torch import save

        files.make_folder(self.at(ARTEFACTS))
        path = self.at(f"{ARTEFACTS}/{file_name(name)}.safetensors")
        write_file(path, save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
        return path

    def artefacts(self) -> list[str]:
        """Names of the stored artefacts."""
        return [path.stem for path in self._files(ARTEFACTS, ".safetensors")]

    def load_artefact(self, name: str) -> dict[str, Tensor]:
        """Read stored matrices."""
        path = self.at(f"{ARTEFACTS}/{file_name(name)}.safetensors")
        if not path.exists():
            raise InputError(
                f"{self.path} has no artefact {name!r}; there are: {', '.join(self.artefacts()) or 'none'}"
            )
        return read_tensors(path)

    def figure_path(self, name: str) -> Path:
        """Where to write figure ``name`` (with its ending); the folder is made."""
        files.make_folder(self.at(FIGURES))
        return self.at(f"{FIGURES}/{file_name(name)}")

    def figures(self, ending: str = "") -> list[Path]:
        """The figures in this directory, by name."""
        return self._files(FIGURES, ending)

    def _files(self, folder: str, ending: str) -> list[Path]:
        """Regular files in a folder of the run, links left out."""
        place = self.path / folder
        if place.is_symlink():
            return []
        paths = (place / name for name in names_in(place) if name.endswith(ending))
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    # -- status ---------------------------------------------------------------------------------------------------
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` (it can be resumed), ``recorded`` or ``new``; a group's is its members' worst.

        ``recorded`` are runs of a user's own loop, of which it is not known whether they have ended.
        """
        if self.lock.held_by_other():
            return "running"
        members = self.members()
        if members:
            found = {member.status() for member in members}
            return next(name for name in ("running", "stopped", "new", "recorded", "finished") if name in found)
        last = last_record(self.at(RECORDS))
        if last is not None and last.get("kind") == "end":
            return "finished" if last.get("finished") else "stopped"
        if self.checkpoint_steps():
            return "stopped"
        return "recorded" if last is not None and "method" not in self.config else "new"


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


# -- what a run was made with ------------------------------------------------------------------------------------------
def describe_environment(device: str = "cpu") -> dict[str, Any]:
    """Facts about this process and ``device``, as plain values for JSON."""
    import torch

    kind = torch.device(device).type
    return {
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "gramscope": gramscope.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "machine": f"{platform.system()} {platform.machine()} {platform.processor()}".strip(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": git_state(),
        "command": sys.argv,
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; ``None`` outside a repository or without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
