"""Fetching over a real HTTP connection to a server on this machine: mirrors, resuming, digests, broken transfers."""

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

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.cli.data import app
from gramscope_lab.data import catalogue, download, load, named_sets, sources
from gramscope_lab.data.download import DownloadError, ensure, fetch, unpack
from gramscope_lab.data.locate import data_root
from gramscope_lab.data.sources import Layout, RemoteFile, Source
from official_files import cifar_records, random_images, tar_bytes

CONTENT = np.random.default_rng(0).bytes(300_000)


@dataclass
class Site:
    """What the server offers, how it misbehaves, and what it was asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None
    send_length: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    offered = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            offered.asked.append((self.path, wanted))
            content = offered.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and offered.ranges else 0
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if offered.send_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            self.wfile.write(body if offered.cut_after is None else body[: offered.cut_after])

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


def one_file(site: Site, *paths: str, content: bytes = CONTENT) -> Source:
    urls = tuple(path if "://" in path else site.address + path for path in paths or ("/file.dat",))
    remote = RemoteFile("file.dat", hashlib.sha256(content).hexdigest(), len(content), urls)
    return Source("thing", "http://home", "things", (remote,), (Layout(("things",), {"file": ("file.dat",)}),))


def test_a_file_is_fetched_once_and_checked(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    site.files["/file.dat"] = CONTENT
    source = one_file(site)
    found = fetch(source, tmp_path)
    assert found.paths["file"] == tmp_path / "things" / "file.dat"
    assert found.paths["file"].read_bytes() == CONTENT
    assert ensure(source, tmp_path, download=False) == found == fetch(source, tmp_path)
    assert len(site.asked) == 1
    assert {p.name for p in found.folder.iterdir()} == {"file.dat", ".gramscope-fetch.lock"}
    assert capfd.readouterr() == ("", "")  # no terminal: no progress bar, and pooch is silent


def test_mirrors_are_tried_in_turn(site: Site, tmp_path: Path) -> None:
    site.files |= {"/wrong.dat": CONTENT[::-1], "/page.html": b"<html>sign in</html>", "/good.dat": CONTENT}
    nobody = "http://127.0.0.1:9/file.dat"
    found = fetch(one_file(site, "/gone.dat", nobody, "/wrong.dat", "/page.html", "/good.dat"), tmp_path)
    assert found.paths["file"].read_bytes() == CONTENT
    assert [path for path, _ in site.asked] == ["/gone.dat", "/wrong.dat", "/page.html", "/good.dat"]


def test_when_no_mirror_works_every_reason_is_told(site: Site, tmp_path: Path) -> None:
    site.files |= {"/wrong.dat": CONTENT[::-1], "/page.html": b"<html>sign in</html>"}
    source = one_file(site, "/gone.dat", "http://127.0.0.1:9/file.dat", "/wrong.dat", "/page.html")
    with pytest.raises(DownloadError) as caught:
        fetch(source, tmp_path)
    for reason in (
        "404 Not Found", "refused", "wrong checksum", "offers 20 bytes, the official file has 300000",
        "gramscope data fetch thing", f"into {tmp_path / 'things'} yourself", "http://home",
    ):  # fmt: skip
        assert reason in str(caught.value)
    assert not (tmp_path / "things" / "file.dat").exists()


@pytest.mark.parametrize("send_length", [True, False])
def test_a_broken_transfer_is_continued(site: Site, tmp_path: Path, send_length: bool) -> None:
    site.files["/file.dat"] = CONTENT
    site.cut_after, site.send_length = 100_000, send_length
    assert fetch(one_file(site), tmp_path).paths["file"].read_bytes() == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, "bytes=100000-", "bytes=200000-"]


def test_an_interrupted_download_is_resumed_next_time(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files["/file.dat"] = CONTENT
    site.cut_after = 100_000
    monkeypatch.setattr(download, "CONTINUATIONS", 0)
    with pytest.raises(DownloadError, match="after 100000 of 300000 bytes"):
        fetch(one_file(site), tmp_path)
    assert (tmp_path / "things" / "file.dat.part").stat().st_size == 100_000
    site.cut_after = None
    assert fetch(one_file(site), tmp_path).paths["file"].read_bytes() == CONTENT
    assert site.asked[-1][1] == "bytes=100000-"
    assert not (tmp_path / "things" / "file.dat.part").exists()


@pytest.mark.parametrize("left", [CONTENT[:1000], b"x" * 1000, b"x" * 300_000, b"x" * 300_001])
@pytest.mark.parametrize("ranges", [True, False])
def test_what_was_left_does_not_spoil_the_download(site: Site, tmp_path: Path, left: bytes, ranges: bool) -> None:
    site.files["/file.dat"], site.ranges = CONTENT, ranges
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "file.dat.part").write_bytes(left)
    assert fetch(one_file(site), tmp_path).paths["file"].read_bytes() == CONTENT


def test_an_endless_answer_is_cut_off(site: Site, tmp_path: Path) -> None:
    site.files["/file.dat"] = CONTENT + b"more"
    site.send_length = False
    with pytest.raises(DownloadError, match="more than the 300000 bytes"):
        fetch(one_file(site), tmp_path)
    assert not (tmp_path / "things" / "file.dat.part").exists()


def test_a_file_in_the_way_is_kept_unless_forced(site: Site, tmp_path: Path) -> None:
    site.files["/file.dat"] = CONTENT
    source = one_file(site)
    two = replace(source, layouts=(Layout(("things",), {"file": ("file.dat",), "other": ("other.dat",)}),))
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "file.dat").write_bytes(b"precious")
    with pytest.raises(InputError, match="not the official file.*--force"):
        fetch(two, tmp_path)
    assert (tmp_path / "things" / "file.dat").read_bytes() == b"precious"
    fetch(source, tmp_path, force=True)
    assert (tmp_path / "things" / "file.dat").read_bytes() == CONTENT


def test_without_permission_to_download(site: Site, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"thing is not in the data directory.*gramscope data fetch thing"):
        ensure(one_file(site), tmp_path, download=False)
    assert site.asked == []


def test_without_pooch_only_downloading_fails(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.delenv("GRAMSCOPE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "gramscope"
    with pytest.raises(MissingExtraError, match="pip install pooch"):
        fetch(one_file(site), tmp_path)
    (tmp_path / "things" / "file.dat").write_bytes(CONTENT)
    assert fetch(one_file(site), tmp_path).paths["file"].read_bytes() == CONTENT


def test_a_data_directory_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="choose another data directory"):
        fetch(one_file(site), tmp_path / "file")


def test_two_at_once_download_once(site: Site, tmp_path: Path) -> None:
    site.files["/file.dat"] = CONTENT
    source = one_file(site)
    threads = [threading.Thread(target=fetch, args=(source, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "things" / "file.dat").read_bytes() == CONTENT
    assert len(site.asked) == 1


def small_cifar10(site: Site) -> Source:
    """The official source with its archive replaced by a small one on our server."""
    images, labels = random_images(12, (3, 32, 32), 10)
    parts = zip(sources.CIFAR10.members, np.split(images, 6), np.split(labels, 6), strict=True)
    archive = tar_bytes({name: cifar_records(x, y) for name, x, y in parts} | {"../escape.txt": b"no", "junk": b"no"})
    site.files["/cifar.tar.gz"] = archive
    remote = RemoteFile(
        "cifar-10-binary.tar.gz", hashlib.sha256(archive).hexdigest(), len(archive), (site.address + "/cifar.tar.gz",)
    )
    return replace(sources.CIFAR10, archives=(remote,))


def test_an_archive_is_unpacked_and_only_what_is_needed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CIFAR10", small_cifar10(site))
    data = load("cifar10", tmp_path / "data")
    assert (len(data.x_train), len(data.x_test)) == (10, 2)
    assert {p.name for p in (tmp_path / "data").iterdir()} == {"cifar-10-batches-bin", ".gramscope-fetch.lock"}
    assert not (tmp_path / "escape.txt").exists()
    assert len(load("cifar10", tmp_path / "data", download=False).x_train) == 10


def test_a_bad_archive_leaves_nothing_behind(tmp_path: Path) -> None:
    good = tar_bytes({"top/a": b"a" * 5000, "top/b": b"b" * 5000})
    archive = tmp_path / "x.tar.gz"
    for content in (good[:-20], b"<html>", tar_bytes({"top/a": b"a"})):
        archive.write_bytes(content)
        with pytest.raises(InputError, match=r"x.tar.gz cannot be unpacked"):
            unpack(archive, tmp_path, ("top/a", "top/b"))
        assert [p.name for p in tmp_path.iterdir()] == ["x.tar.gz"]


def test_progress_bar_on_demand(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    site.files["/file.dat"] = CONTENT
    fetch(one_file(site), tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "file.dat" in err


def test_command_fetches_lists_and_verifies(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_cifar10(site)
    entries = tuple(replace(e, source=small) if e.name == "cifar10" else e for e in catalogue())
    monkeypatch.setattr(named_sets, "_ENTRIES", entries)
    run = CliRunner().invoke
    there = ["--data-dir", str(tmp_path), "--json"]

    listed = {row["name"]: row for row in json.loads(run(app, ["list", *there]).stdout)}
    assert set(listed) == {entry.name for entry in entries}
    assert listed["cifar10"]["folder"] is None
    assert listed["mnist"]["download_bytes"] == 11594722
    assert listed["digits"]["citation"]

    fetched = run(app, ["fetch", "CIFAR-10", "digits", *there])
    assert fetched.exit_code == 0
    assert [row["folder"] for row in json.loads(fetched.stdout)] == [str(tmp_path / "cifar-10-batches-bin"), None]
    assert "nothing to fetch" in run(app, ["fetch", "digits", "--data-dir", str(tmp_path)]).stdout
    assert "on disk" in run(app, ["list", "--data-dir", str(tmp_path)]).stdout

    verified = run(app, ["verify", *there])  # these small files are not the official ones
    assert verified.exit_code == 1
    assert {row["state"] for row in json.loads(verified.stdout)} == {"bad"}
    assert "no downloaded data set" in run(app, ["verify", "--data-dir", str(tmp_path / "none")]).stdout

    assert isinstance(run(app, ["fetch", "no-such-set", *there]).exception, InputError)
    assert run(app, ["fetch", *there]).exit_code == 2


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from gramscope_lab.cli.data import app; app(['list', '--json'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
