"""The names in a run directory.

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
"""

from __future__ import annotations

import re
from pathlib import Path

from gramscope.errors import InputError

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
#: groups in groups beyond this depth are not read
MOST_DEPTH = 32


def file_name(name: str) -> str:
    """``name`` itself, or an error where it cannot name a file in artefacts/ or figures/."""
    if not can_name(name):
        raise InputError(f"{name!r} cannot name a file here; use letters, digits, '-', '_' and '.'")
    return name


def can_name(name: str) -> bool:
    """Whether ``name`` is of letters, digits, ``-``, ``_``, ``.`` and ``,``, so that it leads nowhere else."""
    return bool(name) and not name.startswith(".") and all(letter.isalnum() or letter in "-_.," for letter in name)


def natural(name: str) -> list[tuple[int, float, str]]:
    """Sort key that puts seed-2 before seed-10."""
    return [(0, float(part), "") if part.isdecimal() else (1, 0.0, part) for part in re.split(r"(\d+)", name)]


def free_path(path: Path | str) -> Path:
    """``path`` itself, or with the first number that makes it new: x, x-2, x-3 …"""
    path = free = Path(path)
    number = 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
