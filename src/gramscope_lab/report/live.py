"""The live report: a small server that shows runs while they go on.

It answers two addresses, the page and its data, both computed from the given run directories. It serves no files, so no
address can lead outside them.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from gramscope.errors import GramscopeError, InputError
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.page import Content, render_page, render_update, require_extra
from gramscope_lab.report.write import report_content
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import to_json

#: least milliseconds between two requests of the page
INTERVAL = 2000
#: most connections that are answered at a time
CONNECTIONS = 32
#: seconds after which a silent connection is closed, and after which any connection is
SILENT, LONGEST = 10, 60
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
        self._shown = ""
        self._content: Content | None = None
        self._bytes: dict[str, bytes] = {}
        read_runs(self._paths)  # raise an error for wrong paths now, not on the first request

    def version(self) -> str:
        """A text that changes when a record or an artefact is added, or a run starts or ends."""
        parts = []
        for path in self._paths:
            root = RunDirectory(path)
            for run in (root, *root.runs()):
                sizes = (f"{file}:{_size(file)}" for file in run.growing_files())
                parts += [f"{run.path}:{run.lock.held_by_other()}", *sizes]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """The whole page."""
        return self._rendered("page")

    def update(self, known: str) -> bytes | None:
        """The data behind the page as JSON, or ``None`` when ``known`` is still the present version."""
        return None if self.version() == known else self._rendered("data")

    def _rendered(self, what: str) -> bytes:
        """The page or its data, rendered once for each version: parallel requests wait and share the result."""
        with self._lock:
            version = self.version()
            if version != self._shown or self._content is None:
                began = time.perf_counter()
                self._content = report_content(read_runs(self._paths))
                self._interval = max(self._least, round(1000 * (time.perf_counter() - began) / SHARE))
                self._shown, self._bytes = version, {}
            if what not in self._bytes:
                state: dict[str, Any] = {"version": version, "interval": self._interval}
                page = what == "page"
                text = render_page(self._content, **state) if page else to_json(render_update(self._content, **state))
                self._bytes[what] = text.encode("utf-8", "replace")
            return self._bytes[what]


def make_server(
    paths: Sequence[Path | str],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    interval: int = INTERVAL,
    names: Sequence[str] = (),
) -> LiveServer:
    """A server for ``serve_forever``; port 0 takes a free one (``server.server_port``).

    Args:
        paths: the run directories to show, and the only ones.
        host: address to listen on, IPv4 or IPv6; any but a loopback address is reachable from the network.
        port: port to listen on, 0 to 65535.
        interval: least milliseconds between two requests of the page.
        names: further host names under which browsers may ask; those of this machine are always allowed.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"port {port} does not exist; choose one from 0 to 65535 (0: any free one)")
    report = LiveReport(paths, interval)
    allowed = frozenset({"localhost", "127.0.0.1", "::1", host, socket.gethostname(), *names})

    class Handler(_Handler):
        live = report
        own_names = frozenset(name.lower() for name in allowed)
        by_number = is_reachable(host)

    class Server(LiveServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return Server((host, port), Handler)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}; choose another --port or --host") from error


def is_reachable(host: str) -> bool:
    """Whether a server on ``host`` can be reached from the network."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def is_address(name: str) -> bool:
    """Whether a host name is a numeric address, which no foreign page can bind to this machine."""
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


class LiveServer(ThreadingHTTPServer):
    """A server whose threads end with the program. At most :data:`CONNECTIONS` requests are answered at a time."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(*args)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer within :data:`LONGEST` seconds, then make room for another connection."""
        timer = threading.Timer(LONGEST, _cut, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but not connections that broke off."""
        if not isinstance(sys.exception(), OSError | ValueError):  # writing to a closed file is a ValueError
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    live: LiveReport
    #: host names a browser may use, and whether it may use any numeric address
    own_names: frozenset[str]
    by_number: bool
    server_version = "gramscope"
    sys_version = ""
    timeout = SILENT

    def do_GET(self) -> None:
        """Answer the page, its data, or nothing; not under a foreign name, which its owner may bind to our address."""
        try:
            name, address = urlsplit(f"//{self.headers.get('Host', '')}").hostname, urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"the address or the Host header cannot be read")
            return
        if name not in self.own_names and not (self.by_number and is_address(name or "")):
            self._send(HTTPStatus.FORBIDDEN, b"this host name is not allowed; allow it with --allow-host")
            return
        try:
            if address.path == "/":
                self._send(HTTPStatus.OK, self.live.page(), "text/html; charset=utf-8")
            elif address.path == "/data.json":
                data = self.live.update(parse_qs(address.query).get("version", [""])[0])
                status = HTTPStatus.NO_CONTENT if data is None else HTTPStatus.OK
                self._send(status, data or b"", "application/json")
            else:
                self._send(HTTPStatus.NOT_FOUND, b"there is only the report, at /")
        except (
            GramscopeError,
            OSError,
            RuntimeError,
        ) as error:  # the run was replaced, removed, or is a circular link
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())

    do_HEAD = do_GET

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
        except OSError:  # the browser has gone, or is too slow
            self.close_connection = True

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the user."""


def _cut(connection: socket.socket) -> None:
    """End a connection while its thread reads from it."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _size(path: Path) -> str:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return "none"
    return f"{facts.st_size}:{facts.st_mtime_ns}"
