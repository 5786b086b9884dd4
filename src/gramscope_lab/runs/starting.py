"""Starting a run where something may be already: what may be replaced, what is cleared away, and what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gramscope.errors import InputError
from gramscope_lab.runs import files
from gramscope_lab.runs.checkpoints import prune_checkpoints
from gramscope_lab.runs.files import names_in
from gramscope_lab.runs.layout import ARTEFACTS, CHECKPOINTS, CONFIG, ENVIRONMENT, FIGURES, FILES, LOCK, MARK, RECORDS
from gramscope_lab.runs.own_files import OwnFiles

if TYPE_CHECKING:
    from gramscope_lab.runs.directory import RunDirectory

_FOLDERS = (CHECKPOINTS, ARTEFACTS, FIGURES)


def check_free(run: RunDirectory, *, force: bool = False, members: Sequence[str] = ()) -> None:
    """Raise an error where no run, or none of its ``members``, may be started; nothing is changed."""
    if run.path.exists() and not run.path.is_dir():
        raise InputError(f"{run.path} is a file; choose another directory for the run")
    if run.exists():
        if not _is_ours(run):
            raise InputError(f"{run.path / CONFIG} was not written by gramscope; choose another directory for the run")
        if not force:
            raise InputError(
                f"{run.path} already holds a run; resume it (--resume) or replace it (--force, in Python force=True)"
            )
        _check_clearable(run)
    elif run.path.is_dir() and not _is_litter(run):
        raise InputError(f"{run.path} is not empty and holds no run of gramscope; choose another directory for the run")
    if len(members) > 1:  # a single member is the run itself
        for name in members:
            check_free(run.member(name), force=force)


def _check_clearable(run: RunDirectory) -> None:
    """Raise an error where :func:`clear` would fail half-way."""
    if run.lock.held_by_other():
        raise InputError(f"{run.path} is in use by {run.lock.holder()}; wait for it or use another directory")
    for name in (CONFIG, ENVIRONMENT, RECORDS, FILES, *_FOLDERS):
        run.at(name)
    for member in run.members():
        _check_clearable(member)


def _is_ours(run: RunDirectory) -> bool:
    """Whether the configuration is one that gramscope wrote, and not a ``config.toml`` of another program."""
    if files.read_file(run.at(CONFIG)).startswith(MARK):
        return True
    # runs of earlier versions have no mark
    known = any(files.exists(run.path / name) for name in (ENVIRONMENT, CHECKPOINTS, FILES)) or bool(run.members())
    try:
        return known or {"data", "model", "method"} <= run.config.keys()
    except InputError:
        return False


def _is_litter(run: RunDirectory) -> bool:
    """Whether there is nothing but what a killed writer leaves before there is a run."""
    names = [name for name in names_in(run.path.resolve()) if not name.startswith(files.TEMPORARY)]
    return not names or (names == [LOCK] and run.lock.is_ours())


def clear(run: RunDirectory) -> None:
    """Remove what gramscope wrote, members included, and nothing else."""
    with run.lock:
        for member in run.members():
            clear(member)
            files.remove_if_empty(member.path)
        prune_checkpoints(run.at(CHECKPOINTS), 0)
        for file in OwnFiles(run.path).written():
            files.remove(file)
        remove_litter(run)
        for folder in _FOLDERS:
            files.remove_if_empty(run.at(folder))
        for name in (RECORDS, ENVIRONMENT, FILES, CONFIG):
            files.remove(run.at(name))


def remove_litter(run: RunDirectory) -> None:
    """Remove what killed writers left in a run and in its members."""
    for folder in (run.path.resolve(), *map(run.at, _FOLDERS)):
        files.remove_unfinished(folder)
    for inner in run.folders():
        half_made = bool(names_in(inner.path)) and _is_litter(inner)
        if inner.exists() or half_made:
            with inner.lock:
                remove_litter(inner)
        if half_made:
            files.remove_if_empty(inner.path)
