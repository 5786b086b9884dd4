"""Fetching official files: pooch checks the digests, mirrors are tried in turn, broken transfers are resumed."""

from __future__ import annotations

import logging
import shutil
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from gramscope.errors import GramscopeError, InputError, MissingExtraError
from gramscope_lab.data.locate import Found, locate, not_found
from gramscope_lab.data.sources import RemoteFile, Source
from gramscope_lab.data.verify import has_digest

#: seconds without an answer after which a server is given up
TIMEOUT = 30
#: how often a broken transfer is continued from the same server, as long as it gets further
CONTINUATIONS = 5

Report = Callable[[int], None]


class DownloadError(GramscopeError, OSError):
    """No mirror gave the file."""


class _WrongFileError(OSError):
    """A server answered with something that cannot be the file."""


def ensure(source: Source, root: Path, *, download: bool = True) -> Found:
    """The data set on disk, fetched first if it is not there and may be."""
    found = locate(source, root)
    if found is None:
        if not download:
            raise not_found(source, root)
        found = fetch(source, root)
    return found


def fetch(source: Source, root: Path, *, force: bool = False, progress: bool | None = None) -> Found:
    """Download, check and unpack a data set, unless it is there already.

    Args:
        source: what to fetch.
        root: the data directory.
        force: replace files whose digest is not the official one.
        progress: show a progress bar; ``None``: when standard error is a terminal.
    """
    found = None if force else locate(source, root)
    if found is not None:
        return found
    folder = root / source.folder
    with _lock(folder):
        found = None if force else locate(source, root)  # another process may have fetched it while this one waited
        if found is not None:
            return found
        for file in source.archives:
            _fetch_file(file, folder, source, force=force, progress=progress)
        if source.members:
            archive = folder / source.archives[0].name
            unpack(archive, folder, source.members)
            archive.unlink()
        found = locate(source, root)
    if found is None:
        raise not_found(source, root)
    return found


def _fetch_file(file: RemoteFile, folder: Path, source: Source, *, force: bool, progress: bool | None) -> None:
    path = folder / file.name
    if path.exists():
        if has_digest(path, f"sha256:{file.sha256}"):
            return
        if not force:
            raise InputError(
                f"{path} is not the official file: its SHA-256 differs from {file.sha256}; it may be truncated. Delete "
                f"it, or run `gramscope data fetch {source.name} --force` to replace it"
            )
    failures = []
    with _progress(file, progress) as report:
        for url in file.urls:
            reason = _retrieve(file, url, folder, report)
            if reason is None:
                return
            failures.append(f"  {url}: {reason}")
    raise DownloadError(
        f"could not download {file.name} ({file.size / 1e6:.0f} MB) of {source.name}:\n"
        + "\n".join(failures)
        + f"\nCheck the network and run `gramscope data fetch {source.name}` again (a broken transfer is resumed), "
        f"or put the file into {folder} yourself; it is described at {source.homepage}"
    )


def _retrieve(file: RemoteFile, url: str, folder: Path, report: Report) -> str | None:
    """Get one file from one mirror into ``folder``; the reason where it failed."""
    try:
        import pooch
    except ImportError as error:
        raise MissingExtraError("downloading needs pooch: pip install pooch") from error
    part = folder / f"{file.name}.part"
    logger = pooch.get_logger()

    def transfer_all(url: str, output: str, _: object) -> None:
        for attempt in range(CONTINUATIONS + 1):
            before = part.stat().st_size if part.exists() else 0
            try:
                _transfer(url, part, file.size, report)
                break
            except _WrongFileError:
                raise
            except (OSError, HTTPException):
                after = part.stat().st_size if part.exists() else 0
                if attempt == CONTINUATIONS or after <= before:
                    raise
        part.replace(output)

    for _ in range(2):  # once more from the start when what a former transfer left was of another file
        resumed = part.exists()
        level = logger.level
        logger.setLevel(logging.ERROR)  # the caller reports; pooch would write to standard error
        try:
            pooch.retrieve(url, f"sha256:{file.sha256}", fname=file.name, path=folder, downloader=transfer_all)
            return None
        except ValueError as error:  # pooch's word for a digest that differs; it has deleted the file
            if not resumed:
                return f"wrong checksum ({str(error).split(' (')[0]})"
        except (OSError, HTTPException) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__
        finally:
            logger.setLevel(level)
    return "wrong checksum"


def _transfer(url: str, part: Path, size: int, report: Report) -> None:
    """Append to ``part`` what is missing of ``size`` bytes."""
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    request = Request(url, headers={"User-Agent": "gramscope"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code == 416 and have:  # the server's file ends before ours: it is not the same file
                part.unlink()
            raise OSError(f"the server answers {error.code} {error.reason}") from error
    with response:
        if have and not (
            response.status == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
        ):
            have = 0
        length = response.headers.get("Content-Length")
        if length is not None and have + int(length) != size:
            raise _WrongFileError(f"the server offers {have + int(length)} bytes, the official file has {size}")
        report(have)
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(1 << 16):
                have += len(chunk)
                if have > size:
                    part.unlink()
                    raise _WrongFileError(f"the server sends more than the {size} bytes of the official file")
                file.write(chunk)
                report(have)
    if have < size:
        raise OSError(f"the connection broke after {have} of {size} bytes")


def unpack(archive: Path, folder: Path, members: tuple[str, ...]) -> None:
    """Copy the named files out of a tar archive; nothing else in it is looked at.

    They appear in ``folder`` all at once, so that an interrupted unpacking leaves no half data set.
    """
    scratch = folder / f".{archive.name}.unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            for member in members:
                file = tar.extractfile(member)
                if file is None:
                    raise KeyError(member)
                target = scratch / member
                target.parent.mkdir(parents=True, exist_ok=True)
                with file, target.open("wb") as out:
                    shutil.copyfileobj(file, out)
        for top in sorted({Path(member).parts[0] for member in members}):
            shutil.rmtree(folder / top, ignore_errors=True)
            (scratch / top).replace(folder / top)
    except (KeyError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive} cannot be unpacked ({error}); delete it and fetch it again") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time fetch into a folder, which is made; others wait. Without flock (Windows) nobody waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".gramscope-fetch.lock").open("w")
    except OSError as error:
        raise DownloadError(f"cannot write to {folder} ({error}); choose another data directory") from error
    with file:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(file: RemoteFile, show: bool | None) -> Iterator[Report]:
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(file.name, total=file.size)
        yield lambda done: bar.update(task, completed=done)
