"""Two processes: unequal parts, an empty part, an error or a measurement in one of them alone: none waits for ever."""

from __future__ import annotations

from pathlib import Path

import two_processes


def test_unequal_parts_and_one_process_alone(tmp_path: Path) -> None:
    for lines in two_processes.answers("parts_of_processes.py", tmp_path):
        assert lines == ["unequal", "empty", "raises: the disk is gone", "alone", "trains"], "\n".join(lines)
