"""The live report: a small server that shows runs while they go on.

It answers two addresses, the page and its data, both computed from the given run directories. It serves no files, so no
address can lead outside them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from gramscope.errors import GramscopeError, InputError
from gramscope.report.loaded_runs import read_runs
from gramscope.report.page import Content, render_page, render_update, require_extra
from gramscope.report.write import report_content
from gramscope.runs.directory import ARTEFACTS, RECORDS, RunDirectory
from gramscope.runs.files import to_json

#: least milliseconds between two requests of the page
INTERVAL = 2000
#: largest share of the time spent on rendering, so that training on the same machine is hardly slowed
SHARE = 0.1


class LiveReport:
    """The present state of some runs, rendered when it changes."""

    def __init__(self, paths: Sequence[Path | str], interval: int = INTERVAL) -> None:
        require_extra()
        if not paths:
            raise InputError("name at least one run directory")
        self._paths = [Path(path) for path in paths]
        self._least, self._interval = interval, interval
        self._lock = threading.Lock()
        self._update: tuple[str, bytes] = ("", b"")
        read_runs(self._paths)  # raise an error for wrong paths now, not on the first request

    def version(self) -> str:
        """A text that changes when a record or an artefact is added, or a run starts or ends."""
        parts = []
        for path in self._paths:
            root = RunDirectory(path)
            for run in (root, *root.runs()):
                files = [run.path / RECORDS, *sorted((run.path / ARTEFACTS).glob("*"))]
                parts += [f"{run.path}:{run.lock.held_by_other()}", *(f"{file}:{_size(file)}" for file in files)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """The whole page."""
        version, content = self.version(), self._content()
        return render_page(content, version=version, interval=self._interval).encode()

    def update(self, known: str) -> bytes | None:
        """The data behind the page as JSON, or ``None`` when ``known`` is still the present version."""
        version = self.version()
        if version == known:
            return None
        with self._lock:
            if self._update[0] != version:
                data = render_update(self._content(), version=version, interval=self._interval)
                self._update = version, to_json(data).encode()
            return self._update[1]

    def _content(self) -> Content:
        began = time.perf_counter()
        content = report_content(read_runs(self._paths))
        self._interval = max(self._least, round(1000 * (time.perf_counter() - began) / SHARE))
        return content


def make_server(
    paths: Sequence[Path | str], host: str = "127.0.0.1", port: int = 0, *, interval: int = INTERVAL
) -> ThreadingHTTPServer:
    """A server for ``serve_forever``; port 0 takes a free one (``server.server_port``).

    Args:
        paths: the run directories to show, and the only ones.
        host: address to listen on; any but a loopback address is reachable from the network.
        port: port to listen on.
        interval: least milliseconds between two requests of the page.
    """
    report = LiveReport(paths, interval)

    class Handler(_Handler):
        live = report
        own_names = _own_names(host)

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}; choose another --port or --host") from error
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    live: LiveReport
    #: host names a browser may use; ``None`` for any
    own_names: frozenset[str] | None
    server_version = "gramscope"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer the page, its data, or nothing."""
        if not self._addressed_to_us():
            self._send(HTTPStatus.FORBIDDEN, b"this server answers under its own address only")
            return
        address = urlsplit(self.path)
        try:
            if address.path == "/":
                self._send(HTTPStatus.OK, self.live.page(), "text/html; charset=utf-8")
            elif address.path == "/data.json":
                data = self.live.update(parse_qs(address.query).get("version", [""])[0])
                status = HTTPStatus.NO_CONTENT if data is None else HTTPStatus.OK
                self._send(status, data or b"", "application/json")
            else:
                self._send(HTTPStatus.NOT_FOUND, b"there is only the report, at /")
        except (GramscopeError, OSError) as error:  # the run is being replaced or was removed
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())

    do_HEAD = do_GET

    def _addressed_to_us(self) -> bool:
        """Whether the Host header names this machine; a foreign page that rebinds its name to our address does not."""
        if self.own_names is None:
            return True
        return (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") in self.own_names

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:  # the browser has gone
            self.close_connection = True

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the user."""


def _own_names(host: str) -> frozenset[str] | None:
    """Host names allowed for a server on ``host``; ``None`` (any) if it is reachable from the network."""
    if host == "localhost":
        return frozenset({"localhost", "127.0.0.1", "::1"})
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if loopback else None


def _size(path: Path) -> str:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return "none"
    return f"{facts.st_size}:{facts.st_mtime_ns}"
