"""Run directories, their panels and a live server that the report's tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from gramscope_lab.report.live import make_server
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.page import Content
from gramscope_lab.report.panel import Panel
from gramscope_lab.report.write import report_content
from made_up_runs import write_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, and claims; not to be written to."""
    return write_group(tmp_path_factory.mktemp("report") / "both")


@pytest.fixture(scope="session")
def content(group: Path) -> Content:
    return report_content(read_runs([group]))


@pytest.fixture(scope="session")
def panels(content: Content) -> dict[str, Panel]:
    return {panel.key: panel for panel in content.panels}


@pytest.fixture
def serving() -> Callable[[Path], AbstractContextManager[int]]:
    @contextmanager
    def serve(path: Path) -> Iterator[int]:
        """A live server of a run; gives its port."""
        with make_server([path], interval=100) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
                thread.join()

    return serve
