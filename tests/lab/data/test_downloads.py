"""Fetching over a real HTTP connection to a server on this machine: digests, broken transfers, archives, commands."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gramscope.errors import InputError
from gramscope_lab.cli.data import app
from gramscope_lab.data import catalogue, load, named_sets
from gramscope_lab.data.downloads import DownloadError, RemoteFile, Source, ensure, unpack
from official_files import cifar_records, random_images, tar_bytes
from refusals import assert_refused

CONTENT = np.random.default_rng(0).bytes(300_000)


@dataclass
class Site:
    """What the server offers, and what it was asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    offered = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            offered.asked.append(self.path)
            content = offered.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: offered.cut_after])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    offered.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield offered
    server.shutdown()
    server.server_close()
    thread.join()


def one_file(site: Site, url: str = "") -> Source:
    digest = hashlib.sha256(CONTENT).hexdigest()
    remote = RemoteFile("file.dat", len(CONTENT), digest, url or f"{site.address}/file.dat")
    return Source("thing", "http://home", "things", (remote,), ("things",), {"file": ("file.dat",)})


def test_a_file_is_fetched_once_and_checked(site: Site, tmp_path: Path) -> None:
    source = one_file(site)
    with pytest.raises(InputError, match=r"thing is not in the data directory.*gramscope data fetch thing"):
        ensure(source, tmp_path, download=False)
    assert site.asked == []
    site.files["/file.dat"] = CONTENT
    threads = [threading.Thread(target=ensure, args=(source, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = ensure(source, tmp_path, download=False)
    assert files == {"file": tmp_path / "things" / "file.dat"}
    assert files["file"].read_bytes() == CONTENT
    assert len(site.asked) == 1
    assert {path.name for path in (tmp_path / "things").iterdir()} <= {"file.dat", ".gramscope-fetch.lock"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # requests leaves a refused socket open
@pytest.mark.parametrize("trouble", ["gone", "wrong", "cut", "nobody"])
def test_failures_say_where_to_put_the_file(site: Site, tmp_path: Path, trouble: str) -> None:
    if trouble != "gone":
        site.files["/file.dat"] = CONTENT[::-1] if trouble == "wrong" else CONTENT
    site.cut_after = 1000 if trouble == "cut" else None
    source = one_file(site, "http://127.0.0.1:9/file.dat" if trouble == "nobody" else "")
    with pytest.raises(DownloadError) as caught:
        ensure(source, tmp_path)
    for text in ("cannot fetch file.dat", f"put it into {tmp_path / 'things'} yourself", "http://home"):
        assert text in str(caught.value)
    assert not (tmp_path / "things" / "file.dat").exists()


def test_a_file_in_the_way_is_kept_unless_forced(site: Site, tmp_path: Path) -> None:
    site.files["/file.dat"] = CONTENT
    source = one_file(site)
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "file.dat").write_bytes(b"precious")
    two = replace(source, splits={"file": ("file.dat",), "other": ("other.dat",)})
    assert_refused(r"not the official file.*--force", ensure, two, tmp_path)
    assert (tmp_path / "things" / "file.dat").read_bytes() == b"precious"
    ensure(source, tmp_path, force=True)
    assert (tmp_path / "things" / "file.dat").read_bytes() == CONTENT


def test_a_data_directory_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="choose another data directory"):
        ensure(one_file(site), tmp_path / "file")


def small_cifar10(site: Site) -> Source:
    """The official source with its archive replaced by a small one on our server."""
    source = named_sets.find_entry("cifar10").source
    assert source is not None
    images, labels = random_images(12, (3, 32, 32), 10)
    batches = zip(source.members, np.split(images, 6), np.split(labels, 6), strict=True)
    archive = tar_bytes({name: cifar_records(x, y) for name, x, y in batches} | {"../escape.txt": b"no", "junk": b"no"})
    site.files["/cifar.tar.gz"] = archive
    digest, url = hashlib.sha256(archive).hexdigest(), f"{site.address}/cifar.tar.gz"
    return replace(source, archives=(RemoteFile("cifar-10-binary.tar.gz", len(archive), digest, url),))


@pytest.fixture
def entries(site: Site, monkeypatch: pytest.MonkeyPatch) -> tuple[named_sets.Entry, ...]:
    small = small_cifar10(site)
    changed = tuple(replace(entry, source=small) if entry.name == "cifar10" else entry for entry in catalogue())
    monkeypatch.setattr(named_sets, "catalogue", lambda: changed)
    return changed


@pytest.mark.usefixtures("entries")
def test_an_archive_is_unpacked_and_only_what_is_needed(tmp_path: Path) -> None:
    data = load("cifar10", tmp_path / "data")
    assert (len(data.x_train), len(data.x_test)) == (10, 2)
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {"cifar-10-batches-bin", ".gramscope-fetch.lock"}
    assert not (tmp_path / "escape.txt").exists()
    assert len(load("cifar10", tmp_path / "data", download=False).x_train) == 10


def test_a_bad_archive_leaves_nothing_behind(tmp_path: Path) -> None:
    good = tar_bytes({"top/a": b"a" * 5000, "top/b": b"b" * 5000})
    archive = tmp_path / "x.tar.gz"
    for content in (good[:-20], b"<html>", tar_bytes({"top/a": b"a"})):
        archive.write_bytes(content)
        assert_refused(r"x.tar.gz cannot be unpacked", unpack, archive, tmp_path, ("top/a", "top/b"))
        assert [path.name for path in tmp_path.iterdir()] == ["x.tar.gz"]


def test_command_fetches_and_lists(entries: tuple[named_sets.Entry, ...], tmp_path: Path) -> None:
    run = CliRunner().invoke
    there = ["--data-dir", str(tmp_path), "--json"]
    listed = {row["name"]: row for row in json.loads(run(app, ["list", *there]).stdout)}
    assert set(listed) == {entry.name for entry in entries}
    assert listed["cifar10"]["folder"] is None
    assert listed["mnist"]["download_bytes"] == 11594722
    assert listed["digits"]["citation"]

    fetched = run(app, ["fetch", "cifar10", "digits", *there])
    assert fetched.exit_code == 0
    assert [row["folder"] for row in json.loads(fetched.stdout)] == [str(tmp_path / "cifar-10-batches-bin"), None]
    assert "nothing to fetch" in run(app, ["fetch", "digits", "--data-dir", str(tmp_path)]).stdout
    assert "on disk" in run(app, ["list", "--data-dir", str(tmp_path)]).stdout
    assert isinstance(run(app, ["fetch", "no-such-set", *there]).exception, InputError)
    assert run(app, ["fetch", *there]).exit_code == 2


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from gramscope_lab.cli.data import app; app(['list', '--json'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
