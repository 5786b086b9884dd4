from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from gramscope.errors import InputError
from gramscope.report.live import LiveReport, make_server
from gramscope.runs.directory import RunDirectory
from made_up_runs import append_epoch, write_run

Ask = Callable[..., tuple[HTTPResponse, bytes]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "going", epochs=1, finished=False)


@pytest.fixture
def ask(run: RunDirectory, serving: Callable[[Path], AbstractContextManager[int]]) -> Iterator[Ask]:
    with serving(run.path) as port:

        def question(path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
            connection = HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer, body

        yield question


def test_page_and_updates(ask: Ask, run: RunDirectory) -> None:
    answer, body = ask("/")
    assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert b"connect-src" in body
    answer, body = ask("/data.json?version=")
    first = json.loads(body)
    assert answer.status == 200
    assert first["interval"] >= 100
    assert ask(f"/data.json?version={first['version']}")[0].status == 204
    append_epoch(run, 2)
    answer, body = ask(f"/data.json?version={first['version']}")
    second = json.loads(body)
    assert answer.status == 200
    assert points(second) == points(first) + 1 == 3
    assert "epoch 2" in second["summary_html"]
    assert ask("/", "HEAD")[1] == b""


def points(payload: dict[str, Any]) -> int:
    accuracy = next(panel for panel in payload["panels"] if panel["key"] == "accuracy")
    return len(accuracy["views"][0]["facets"][0]["frames"][0][-1]["y"])


PATHS = (
    "/records.jsonl /config.toml /../config.toml /..%2f..%2fetc/passwd //etc/passwd /%2e%2e/%2e%2e/etc/passwd "
    "/data.json/../../etc/passwd /figures/report.html file:///etc/passwd http://example.org/"
)


@pytest.mark.parametrize("path", PATHS.split())
def test_no_file_is_sent(ask: Ask, path: str) -> None:
    answer, body = ask(path)
    assert answer.status in (403, 404)
    assert b"root:" not in body


def test_only_this_machine_is_answered(ask: Ask) -> None:
    assert ask("/data.json", Host="evil.example")[0].status == 403
    assert ask("/data.json", Host="localhost:1234")[0].status == 200
    assert ask("/data.json", "POST")[0].status == 501


def test_addresses(run: RunDirectory) -> None:
    with make_server([run.path]) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(InputError, match="cannot listen on 127.0.0.1"):
            make_server([run.path], port=server.server_port)
    with pytest.raises(InputError, match="holds no run"):
        make_server([run.path.parent / "nothing"])
    with pytest.raises(InputError, match="at least one"):
        make_server([])
    if socket.has_dualstack_ipv6():
        with pytest.raises(InputError, match="cannot listen"):
            make_server([run.path], host="no.such.host.invalid")


def test_a_removed_run_is_no_crash(ask: Ask, run: RunDirectory) -> None:
    assert ask("/data.json")[0].status == 200
    run.clear()
    answer, body = ask("/data.json?version=old")
    assert answer.status == 503
    assert b"holds no run" in body


def test_a_slow_report_is_asked_for_less_often(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 3.0])
    monkeypatch.setattr("gramscope.report.live.time.perf_counter", lambda: next(ticks))
    assert json.loads(LiveReport([run.path]).update("") or b"")["interval"] == 30_000


def test_version_sees_records_artefacts_and_the_lock(run: RunDirectory) -> None:
    live = LiveReport([run.path])
    seen = {live.version()}
    assert live.version() in seen
    append_epoch(run, 2)
    seen.add(live.version())
    run.save_artefact("spectra-000000020", {})
    seen.add(live.version())
    with RunDirectory(run.path).lock:
        seen.add(live.version())
    assert len(seen) == 4
    run.close()
