"""Search for inputs that a reader cannot handle, guided by coverage. Needs atheris (Linux), which no test needs.

    pip install atheris
    PYTHONPATH=src:tests python tests/fuzz/guided.py --seconds 3600 --work DIR --out studies/reliability/fuzz.json

Every target of ``targets.py``, or each one named with ``--target``, gets an equal share of the time, in a process of its own.
What is not a documented error, or takes too long or too much memory, is counted by kind and its first input kept in
``DIR/failures``. Inputs that reach new code are kept in ``DIR/corpus``, where the next call begins; ``--keep N`` copies the N
smallest of each target to ``corpus`` beside this file. Counts are summed over all calls with the same DIR.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST = 4096


def search(name: str, seconds: int, work: Path) -> None:
    """Fuzz one target in this process; it ends in libFuzzer, which leaves no way to return."""
    import atheris
    import torch  # noqa: F401 - before the instrumentation, which would take minutes for it

    with atheris.instrument_imports(include=["gramscope", "tomllib", "zipfile", "numpy.lib.format"]):
        from fuzz.targets import TARGETS

    target = TARGETS[name]
    found, failures = (work / part / file_name(name) for part in ("corpus", "failures"))
    found.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    for index, seed in enumerate(target.seeds(folder)):
        (found / f"seed-{index}").write_bytes(seed)
    before = counts(work, name)
    kinds = Counter(before["failures"])
    inputs, began, written = before["inputs"], time.monotonic(), 0.0

    def once(content: bytes) -> None:
        nonlocal inputs, written
        inputs += 1
        try:
            target.read(folder, content)
        except Exception as error:
            kinds[type(error).__name__] += 1
            if kinds[type(error).__name__] == 1:
                failures.mkdir(parents=True, exist_ok=True)
                (failures / type(error).__name__).write_bytes(content)
        if time.monotonic() - written > 1:
            written = time.monotonic()
            seconds = before["seconds"] + written - began
            result_path(work, name).write_text(
                json.dumps({"inputs": inputs, "failures": dict(kinds), "seconds": round(seconds)})
            )

    options = [f"-max_total_time={seconds}", f"-max_len={LARGEST}", "-timeout=60", "-rss_limit_mb=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(found)], once)
    atheris.Fuzz()


def file_name(name: str) -> str:
    """A target's name as that of a folder."""
    return name.replace("/", "_")


def result_path(work: Path, name: str) -> Path:
    """Where the counts of a target are."""
    return work / f"{file_name(name)}.json"


def counts(work: Path, name: str) -> dict[str, Any]:
    """The counts of a target over all calls until now."""
    path = result_path(work, name)
    return json.loads(path.read_text()) if path.exists() else {"inputs": 0, "failures": {}, "seconds": 0}


def search_in_turn(names: Sequence[str], seconds: int, work: Path) -> None:
    """Fuzz the named targets one after the other, each in a process of its own."""
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        share = max(1, seconds // len(names))
        command = [sys.executable, __file__, "--here", "--target", name, "--seconds", str(share), "--work", str(work)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        found = counts(work, name)
        if done.returncode:
            kind = f"ended with {done.returncode}"
            found["failures"][kind] = found["failures"].get(kind, 0) + 1
            result_path(work, name).write_text(json.dumps(found))
            sys.stderr.write(done.stderr[-2000:])
        print(f"{name}: {found}", flush=True)


def keep_corpus(work: Path, most: int) -> None:
    """Copy the smallest inputs of each target into the tree."""
    place = Path(__file__).parent / "corpus"
    for folder in sorted((work / "corpus").iterdir()):
        smallest = sorted((path for path in folder.iterdir() if path.stat().st_size), key=lambda p: p.stat().st_size)
        (place / folder.name).mkdir(parents=True, exist_ok=True)
        for path in smallest[:most]:
            shutil.copyfile(path, place / folder.name / path.name[:12])


def main() -> None:
    """Fuzz all targets, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600, help="for all targets together; 0: only write the counts")
    parser.add_argument("--work", type=Path, required=True, help="folder of the search")
    parser.add_argument("--target", action="append", help="search this target (may be repeated), not all")
    parser.add_argument("--here", action="store_true", help="search the one target in this process")
    parser.add_argument("--out", type=Path, help="file for the counts of all targets")
    parser.add_argument("--keep", type=int, default=0, help="inputs of each target to copy into the tree")
    arguments = parser.parse_args()
    if arguments.here:
        search(arguments.target[0], arguments.seconds, arguments.work)
        return
    from fuzz.targets import TARGETS

    if arguments.seconds:
        search_in_turn(arguments.target or list(TARGETS), arguments.seconds, arguments.work)
    if arguments.out:
        found = {name: counts(arguments.work, name) for name in TARGETS}
        total = {"seconds": sum(each["seconds"] for each in found.values()), "targets": found}
        arguments.out.write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    if arguments.keep:
        keep_corpus(arguments.work, arguments.keep)


if __name__ == "__main__":
    main()
