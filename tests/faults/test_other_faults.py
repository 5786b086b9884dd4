"""Every file operation of a report, of a download and of saving a table fails once: what was there stays whole, or is said."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gramscope as gs
from faults.faulty_disk import ERRORS, FaultyDisk
from gramscope.errors import GramscopeError
from gramscope_lab.data.downloads import RemoteFile, Source, ensure
from gramscope_lab.report import page, write_report
from made_up_runs import write_run
from official_files import tar_bytes

MEMBERS = {"top/a": b"a" * 5000, "top/b": b"b" * 5000}
ARCHIVE = tar_bytes(MEMBERS)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def report(folder: Path) -> None:
    write_report([folder / "run"])


def download(folder: Path) -> None:
    remote = RemoteFile("x.tar.gz", len(ARCHIVE), hashlib.sha256(ARCHIVE).hexdigest(), "http://there/x.tar.gz")
    splits = {name: (name,) for name in MEMBERS}
    ensure(Source("thing", "http://home", "", (remote,), ("",), splits, tuple(MEMBERS)), folder, force=True)


def save(ending: str) -> Callable[[Path], None]:
    table = gs.Table({"fc": {"nfa": 0.5, "nc1": None}}, {"sat": 1.0})
    return lambda folder: table.save(folder / f"table{ending}")


ACTIONS = {"report": report, "download": download, "table, json": save(".json"), "table, parquet": save(".parquet")}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize("what", ACTIONS)
def test_every_file_operation_may_fail(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    if what.endswith("parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(page, "_made", lambda refresh: "made today")
    monkeypatch.setattr(
        "pooch.HTTPDownloader", lambda **_: lambda url, file, pooch: Path(file).write_bytes(ARCHIVE) and None
    )
    folder, action = tmp_path / "folder", ACTIONS[what]
    write_run(folder / "run", epochs=1, layers=["a"])
    action(folder)
    whole = contents(folder)
    counter = FaultyDisk(folder)
    with counter.installed():
        action(folder)
    assert contents(folder) == whole
    lost: Counter[str] = Counter()
    wrong = []
    for at, name in enumerate(counter.calls):
        for fault in ERRORS:
            try:
                check_fault(folder, action, FaultyDisk(folder, at, fault), whole)
            except Exception as error:
                lost[fault] += 1
                wrong.append(f"operation {at} ({name}), {fault}: {type(error).__name__}: {error}")
                shutil.rmtree(folder)
                write_run(folder / "run", epochs=1, layers=["a"])
                action(folder)
    for fault in ERRORS:
        record_property("fault", f"{fault}|{what.partition(',')[0]}|{len(counter.calls)}|{lost[fault]}")
    assert len(counter.calls) >= 4
    assert wrong == []


def check_fault(folder: Path, action: Callable[[Path], None], disk: FaultyDisk, whole: dict[str, bytes]) -> None:
    """All files are as before, or a page says what it lacks; and the second try gives the first result."""
    with disk.installed(), suppress(GramscopeError):  # an error of the system itself is a failure
        action(folder)
    after = contents(folder)
    for name in {*whole, *after}:
        said = name.endswith("report.html") and b"Could not be read:" in after.get(name, b"")
        fetched = name == "x.tar.gz" and after[name] == ARCHIVE  # kept until it is unpacked
        assert said or fetched or after.get(name) == whole.get(name), f"{name} is not what it was"
    action(folder)
    assert contents(folder) == whole


def test_a_table_is_flushed_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, path = [], tmp_path / "table.json"
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append((os.fstat(handle).st_size, path.exists())))
    save(".json")(tmp_path)
    assert flushed == [(path.stat().st_size, False)]
