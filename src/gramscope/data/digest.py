"""Digests of files."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path


def has_digest(path: Path, digest: str, *, unzipped: bool = False) -> bool:
    """Whether a file has a digest ``"sha256:…"`` or ``"md5:…"``; with ``unzipped`` what is inside a gzip file."""
    algorithm, _, expected = digest.partition(":")
    summary = hashlib.new(algorithm, usedforsecurity=False)
    with gzip.open(path) if unzipped else path.open("rb") as file:
        while block := file.read(1 << 20):
            summary.update(block)
    return summary.hexdigest() == expected
