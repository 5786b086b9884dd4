from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from gramscope.errors import InputError
from gramscope_lab.report.live import CONNECTIONS, LiveReport, is_reachable, make_server
from gramscope_lab.report.loaded_runs import Runs
from gramscope_lab.report.page import Content
from gramscope_lab.report.write import report_content
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.starting import clear
from made_up_runs import append_epoch, write_run

Ask = Callable[..., tuple[HTTPResponse, bytes]]
Serving = Callable[[Path], AbstractContextManager[int]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "going", epochs=1, finished=False)


@pytest.fixture
def ask(run: RunDirectory, serving: Serving) -> Iterator[Ask]:
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
    assert ask("/data.json", Host="10.0.0.7")[0].status == 403
    assert ask("/data.json", Host="[")[0].status == 400
    assert ask("http://[/", Host="localhost")[0].status == 400
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
    for port in (-1, 99_999):
        with pytest.raises(InputError, match=f"port {port} does not exist"):
            make_server([run.path], port=port)
    if socket.has_dualstack_ipv6():
        with make_server([run.path], host="::1") as server:
            assert server.server_address[0] == "::1"
        with pytest.raises(InputError, match="cannot listen"):
            make_server([run.path], host="no.such.host.invalid")


def test_a_removed_run_is_no_crash(ask: Ask, run: RunDirectory) -> None:
    assert ask("/data.json")[0].status == 200
    clear(run)
    answer, body = ask("/data.json?version=old")
    assert answer.status == 503
    assert b"holds no run" in body


def test_a_run_replaced_by_a_circular_link_is_no_crash(ask: Ask, run: RunDirectory) -> None:
    run.path.rename(run.path.with_name("moved"))
    run.path.symlink_to(run.path)
    assert ask("/data.json?version=old")[0].status == 503


def test_a_slow_report_is_asked_for_less_often(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 3.0])
    monkeypatch.setattr("gramscope_lab.report.live.time.perf_counter", lambda: next(ticks))
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


def test_names_are_checked_on_every_address(run: RunDirectory) -> None:
    with make_server([run.path], host="0.0.0.0", names=["lab.example"]) as server:
        handler = server.RequestHandlerClass
    assert "lab.example" in handler.own_names
    assert "evil.example" not in handler.own_names
    assert handler.by_number
    assert [is_reachable(host) for host in ("0.0.0.0", "::", "127.0.0.1", "::1", "localhost", "lab.example")] == [
        True, True, False, False, False, True,
    ]  # fmt: skip


def test_parallel_requests_share_one_rendering(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def slowly(runs: Runs) -> Content:
        rendered.append(runs)
        time.sleep(0.2)
        return report_content(runs)

    monkeypatch.setattr("gramscope_lab.report.live.report_content", slowly)
    live = LiveReport([run.path])
    with ThreadPoolExecutor(12) as pool:
        pages = list(pool.map(lambda _: live.page(), range(12)))
    assert len(rendered) == 1
    assert all(page is pages[0] for page in pages)


def test_silent_connections_are_closed(run: RunDirectory, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope_lab.report.live._Handler.timeout", 0.2)
    with serving(run.path) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert connection.recv(1) == b""


def test_slow_connections_are_closed(run: RunDirectory, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope_lab.report.live.LONGEST", 0.3)
    with serving(run.path) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        ended = threading.Event()
        threading.Thread(target=lambda: (connection.recv(1), ended.set())).start()
        for _ in range(100):  # never silent for long
            with suppress(OSError):
                connection.sendall(b"G")
            if ended.wait(0.05):
                break
        assert ended.is_set()


def test_too_many_connections_are_refused(run: RunDirectory, serving: Serving) -> None:
    with serving(run.path) as port, ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        time.sleep(0.5)
        last = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        assert last.recv(1) == b""
