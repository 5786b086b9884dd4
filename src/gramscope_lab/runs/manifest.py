"""A manifest of digests: shows whether the files of a checkpoint are those that were written.

    manifest.json  {"step": 123, "files": {"model.safetensors": "sha256:…", …}}

It protects against damage and mixed-up files, not against somebody who writes a manifest of his own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from gramscope.errors import DamagedCheckpointError
from gramscope_lab.runs.files import to_json

MANIFEST = "manifest.json"
_REMEDY = "restore the checkpoint or remove its folder"


def with_manifest(step: int, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files and, last, the manifest of their digests."""
    facts = {"step": step, "files": {name: _digest(content) for name, content in files.items()}}
    return {**files, MANIFEST: (to_json(facts, indent=1) + "\n").encode()}


def check_manifest(folder: Path, step: int, files: Mapping[str, bytes], manifest: bytes) -> None:
    """Raise an error unless the manifest is of this step and has the digests of exactly these files."""
    try:
        facts = json.loads(manifest)
        wanted, found_step = dict(facts["files"]), facts["step"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{folder / MANIFEST} is damaged; {_REMEDY}") from error
    if found_step != step:
        raise DamagedCheckpointError(f"{folder} holds the checkpoint of step {found_step!r}; {_REMEDY}")
    wrong = [name for name, content in files.items() if wanted.get(name) != _digest(content)]
    if wrong or set(wanted) != set(files):
        names = ", ".join(wrong or sorted(set(wanted) ^ set(files)))
        raise DamagedCheckpointError(f"{folder} is damaged: {names} is not what was written; {_REMEDY}")


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
