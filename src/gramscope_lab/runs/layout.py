"""The names in a run directory; ``gramscope_lab.runs`` says what is in the files."""

from __future__ import annotations

import re
from pathlib import Path

from gramscope.errors import InputError

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
RECORDS = "records.jsonl"
#: measurements of checkpoints, made after training
MEASURED = "measured.jsonl"
CHECKPOINTS = "checkpoints"
ARTEFACTS = "artefacts"
FIGURES = "figures"
#: who writes here, and the file that the system locks
LOCK, LOCKED = "lock.json", ".lock"
#: a file that asks the processes that train members of a group to save and stop
STOP = ".stop"
#: first line of a configuration that gramscope stored
MARK = b"# a run of gramscope\n"


def file_name(name: str) -> str:
    """``name`` itself, or an error where it cannot name a file in artefacts/ or figures/."""
    if not name or name.startswith(".") or not all(letter.isalnum() or letter in "-_.," for letter in name):
        raise InputError(f"{name!r} cannot name a file here; use letters, digits, '-', '_', '.' and ','")
    return name


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
