"""Official files of downloaded sets: where they lie on disk, and fetching them with pooch."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gramscope.errors import GramscopeError, InputError

#: environment variable that names the data directory
ENVIRONMENT = "GRAMSCOPE_DATA"
#: seconds without an answer after which a server is given up
TIMEOUT = 30

#: part of a data set → its file
Files: TypeAlias = dict[str, Path]


class DownloadError(GramscopeError, OSError):
    """A file could not be fetched."""


@dataclass(frozen=True)
class RemoteFile:
    """One file to download, with its SHA-256 and its size in bytes."""

    name: str
    size: int
    sha256: str
    url: str


@dataclass(frozen=True)
class Source:
    """The files of one data set; ``sets.toml`` says what each field means."""

    name: str
    homepage: str
    folder: str
    archives: Sequence[RemoteFile]
    folders: Sequence[str]
    splits: Mapping[str, Sequence[str]]
    members: Sequence[str] = ()
    pickled: str = ""


def data_root(data_dir: str | Path | None = None) -> Path:
    """The data directory: ``data_dir``, else ``$GRAMSCOPE_DATA``, else the user's cache folder of the system."""
    chosen = data_dir or os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("gramscope"))


def locate(source: Source, root: Path) -> Files | None:
    """The files of a data set from the first folder that has all of them, or ``None``."""
    present = (_present(source, folder) for folder in _folders(source, root))
    return next((files for files in present if len(files) == len(source.splits)), None)


def _folders(source: Source, root: Path) -> list[Path]:
    """Folders a set may be in: those below ``root``, and ``root`` where it is already such a folder."""
    tails = [Path(folder).parts for folder in source.folders]
    itself = any(root.absolute().parts[-len(tail) :] == tail for tail in tails if tail)
    return [*([root] if itself else []), *(root / folder for folder in source.folders)]


def _present(source: Source, folder: Path) -> Files:
    paths = {split: [folder / name for name in names] for split, names in source.splits.items()}
    first = {split: next((path for path in options if path.exists()), None) for split, options in paths.items()}
    return {split: path for split, path in first.items() if path is not None}


def _not_there(source: Source, root: Path) -> InputError:
    """The error for a set that is not there: what was looked for, what is missing, and the ways to get it."""
    pickled = (root, root / source.pickled, root / source.name / source.pickled)
    for path in pickled if source.pickled else ():
        if path.name == source.pickled and path.is_dir():
            return InputError(
                f"{path} is the Python version of {source.name}, whose files are pickles: programs, which are not run. "
                f"Take {source.archives[0].name} from {source.homepage}, or run `gramscope data fetch {source.name}`"
            )
    names = {split: options[0] for split, options in source.splits.items()}
    missing = ""
    for folder in _folders(source, root):
        if present := _present(source, folder):
            absent = ", ".join(name for split, name in names.items() if split not in present)
            missing = f"; {folder} has only a part of it, without {absent}"
            break
    return InputError(
        f"{source.name} is not in the data directory {root} (looked in {', '.join(source.folders)} for "
        f"{', '.join(names.values())}){missing}. Run `gramscope data fetch {source.name} --data-dir {root}`, allow "
        f"downloads, point --data-dir or ${ENVIRONMENT} to where it lies, or take the files from {source.homepage}"
    )


def ensure(source: Source, root: Path, *, download: bool = True, force: bool = False) -> Files:
    """The data set on disk; downloaded, checked and unpacked first where it is not there and may be.

    Args:
        source: the data set.
        root: the data directory.
        download: fetch what is missing.
        force: fetch what is there too, and replace files whose digest is not the official one.
    """
    files = None if force else locate(source, root)
    if files is None and download:
        from filelock import FileLock

        folder = root / source.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".gramscope-fetch.lock"):  # another process may fetch it while this one waits
                files = None if force else locate(source, root)
                if files is None:
                    _fetch(source, folder, force)
                    files = locate(source, root)
        except DownloadError:
            raise
        except OSError as error:
            raise DownloadError(f"cannot write to {folder} ({error}); choose another data directory") from error
    if files is None:
        raise _not_there(source, root)
    return files


def _fetch(source: Source, folder: Path, force: bool) -> None:
    import pooch

    for file in source.archives:
        path = folder / file.name
        if path.exists() and not force and pooch.file_hash(path) != file.sha256:
            raise InputError(
                f"{path} is not the official file: its SHA-256 differs from {file.sha256}; it may be truncated. Delete "
                f"it, or run `gramscope data fetch {source.name} --force` to replace it"
            )
        download = pooch.HTTPDownloader(timeout=TIMEOUT)
        try:
            pooch.retrieve(file.url, f"sha256:{file.sha256}", fname=file.name, path=folder, downloader=download)
        except (OSError, ValueError) as error:  # of the network, the proxy or the server; a digest that differs
            raise DownloadError(
                f"cannot fetch {file.name} ({file.size / 1e6:.0f} MB) of {source.name} from {file.url} ({error}). Without "
                f"a network, put it into {folder} yourself and run `gramscope data fetch {source.name} --data-dir DIR`; "
                f"it is described at {source.homepage}"
            ) from error
    if source.members:
        archive = folder / source.archives[0].name
        unpack(archive, folder, source.members)
        archive.unlink()


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> None:
    """Copy the named files out of a tar archive; nothing else in it is looked at.

    Each file appears in ``folder`` as a whole, so that an interrupted unpacking leaves no truncated file.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as name:
        scratch = Path(name)
        try:
            with tarfile.open(archive) as tar:
                for index, member in enumerate(members):
                    file = tar.extractfile(member)
                    if file is None:
                        raise KeyError(member)
                    with file, (scratch / str(index)).open("wb") as out:
                        shutil.copyfileobj(file, out)
        except Exception as error:
            raise InputError(f"{archive} cannot be unpacked ({error}); delete it and fetch it again") from error
        for index, member in enumerate(members):
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            (scratch / str(index)).replace(folder / member)
