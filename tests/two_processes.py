"""A script run twice at once, as the two processes of a ``torch.distributed`` group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def answers(name: str, folder: Path) -> list[list[str]]:
    """The lines that ``NAME RANK STORE``, a script beside this file, prints as rank 0 and as rank 1."""
    script, store = Path(__file__).with_name(name), folder / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), store], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
