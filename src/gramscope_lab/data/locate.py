"""Where data lies on disk: the one data directory, and official layouts found in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gramscope.errors import InputError
from gramscope_lab.data.sources import Layout, Source

#: environment variable that names the data directory
ENVIRONMENT = "GRAMSCOPE_DATA"


@dataclass(frozen=True)
class Found:
    """A data set found on disk: its folder and the path of every part."""

    folder: Path
    paths: dict[str, Path]


def data_root(data_dir: str | Path | None = None) -> Path:
    """The data directory: ``data_dir``, else ``$GRAMSCOPE_DATA``, else the user's cache folder of the system."""
    chosen = data_dir or os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    try:
        import pooch
    except ImportError:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gramscope"
    return Path(pooch.os_cache("gramscope"))


def _folders(layout: Layout, root: Path) -> Iterator[Path]:
    """The folders a layout may be in: those below ``root``, and ``root`` where it is already such a folder."""
    for folder in layout.folders:
        parts = Path(folder).parts
        if root.absolute().parts[-len(parts) :] == parts:
            yield root
        yield root / folder


def _candidates(source: Source, root: Path) -> Iterator[tuple[Layout, Found]]:
    """Every folder a set may be in, with the parts that are there."""
    for layout in source.layouts:
        for folder in _folders(layout, root):
            files = {part: [folder / name for name in names] for part, names in layout.parts.items()}
            there = {part: next((path for path in paths if path.exists()), None) for part, paths in files.items()}
            yield layout, Found(folder, {part: path for part, path in there.items() if path is not None})


def locate(source: Source, root: Path) -> Found | None:
    """The data set in the first folder that has all of it, or ``None``."""
    return next((found for layout, found in _candidates(source, root) if len(found.paths) == len(layout.parts)), None)


def not_found(source: Source, root: Path) -> InputError:
    """The error for a set that is not there: what was looked for, what is missing, and the ways to get it."""
    partial = ""
    for layout, found in _candidates(source, root):
        if found.paths:
            missing = [names[0] for part, names in layout.parts.items() if part not in found.paths]
            partial = f"; {found.folder} has only a part of it, without {', '.join(missing)}"
            break
    layout = source.layouts[0]
    wanted = ", ".join(names[0] for names in layout.parts.values())
    return InputError(
        f"{source.name} is not in the data directory {root} (looked in {', '.join(layout.folders)} for {wanted})"
        f"{partial}. Run `gramscope data fetch {source.name} --data-dir {root}`, allow downloads, point "
        f"--data-dir or ${ENVIRONMENT} to where it lies, or take the files from {source.homepage}"
    )
