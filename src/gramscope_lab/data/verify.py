"""Checking files on disk against the published digests."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gramscope_lab.data.locate import locate, not_found
from gramscope_lab.data.sources import Source


@dataclass(frozen=True)
class FileCheck:
    """What was found out about one file.

    ``good``: the digest is the published one. ``bad``: it is not. ``unchecked``: no digest is published for this form.
    """

    path: Path
    state: Literal["good", "bad", "unchecked"]
    note: str


def verify(source: Source, root: Path) -> list[FileCheck]:
    """Check every file of a data set that :func:`gramscope_lab.data.load` would read."""
    found = locate(source, root)
    if found is None:
        raise not_found(source, root)
    digests = {file.name: f"sha256:{file.sha256}" for file in source.archives} | source.checksums
    return [_check(path, digests) for path in found.paths.values()]


def has_digest(path: Path, digest: str, *, unzipped: bool = False) -> bool:
    """Whether a file has a digest ``"sha256:…"`` or ``"md5:…"``; with ``unzipped`` what is inside a gzip file."""
    algorithm, _, expected = digest.partition(":")
    summary = hashlib.new(algorithm, usedforsecurity=False)
    with gzip.open(path) if unzipped else path.open("rb") as file:
        while block := file.read(1 << 20):
            summary.update(block)
    return summary.hexdigest() == expected


def _check(path: Path, digests: dict[str, str]) -> FileCheck:
    name = path.name.replace(".idx", "-idx")
    digest = digests.get(name)
    if digest is not None and has_digest(path, digest):
        return FileCheck(path, "good", f"{_algorithm(digest)} as published")
    if path.suffix == ".gz" and path.stem.replace(".idx", "-idx") in digests:  # packed again, by another gzip
        digest = digests[path.stem.replace(".idx", "-idx")]
        try:
            same = has_digest(path, digest, unzipped=True)
        except (OSError, EOFError, zlib.error) as error:
            return FileCheck(path, "bad", f"cannot be unzipped ({error}); delete it and fetch it again")
        if same:
            return FileCheck(path, "good", f"{_algorithm(digest)} of the content as published")
    if digest is None:
        return FileCheck(path, "unchecked", "no digest is published for this form")
    return FileCheck(path, "bad", f"{_algorithm(digest)} is not the published one; delete it and fetch it again")


def _algorithm(digest: str) -> str:
    return {"sha256": "SHA-256", "md5": "MD5"}[digest.partition(":")[0]]
