"""How training and those who started it speak: progress and notes one way, Ctrl-C and SIGTERM the other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gramscope.errors import GramscopeError


class Reporter:
    """Receives notes and progress from training. This one ignores them; the command line prints them."""

    def note(self, text: str) -> None:
        """Something worth saying once: how members are run, which parameters an optimizer leaves to another."""

    def start(self, label: str, total: int, unit: str = "step") -> None:
        """Work of ``total`` units begins."""

    def advance(self, done: int) -> bool | None:
        """``done`` units are complete; true asks to save and stop, where no signal can."""

    def records(self, records: Sequence[dict[str, Any]], label: str = "") -> None:
        """New evaluation records, one a member; ``label`` names them where they are not of the work begun last."""

    def finish(self) -> None:
        """The work begun last is over."""


class Interrupted(GramscopeError):
    """Training was stopped by the user after saving; the message says how to go on."""


class StopRequest:
    """Whether the user asked to stop."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C; the process that started them stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one interrupts at once.

    Only the main thread can do this; in others the request is never set and signals act as usual.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # signals that the caller ignores stay ignored
                previous[number] = signal.signal(number, ask)
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
