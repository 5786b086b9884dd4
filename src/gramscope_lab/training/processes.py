"""Members in processes of this machine, for runs that cannot be stacked into one step.

joblib was the alternative. Its workers have no way to send progress while a task runs or to be asked to save and stop, and one
that dies takes all tasks of its pool with it. A process and a pipe for each member give all three.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from typing_extensions import override

from gramscope_lab.training.interrupt import children_ignore_interrupts
from gramscope_lab.training.members import MemberTask, News, Workers, work


class LocalProcesses(Workers):
    """As many processes at a time as there are cores; with a share of GPUs, as many as those hold.

    Args:
        members: how many there are.
        gpus: share of a GPU for each (0.5: two share one), or whole GPUs; ``None`` lets all see all GPUs.
        visible: names of the GPUs, for ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, members: int, gpus: float | None = None, visible: Sequence[str] = ()) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._places = gpu_places(visible, gpus) if gpus else []
        self._slots = max(1, min(members, cores, len(self._places) or cores))
        self._free = list(reversed(self._places[: self._slots]))
        self._running: dict[Connection, tuple[str, SpawnProcess, str]] = {}

    @property
    @override
    def slots(self) -> int:
        return self._slots

    @override
    def start(self, task: MemberTask) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        place = self._free.pop() if self._places else ""
        process = context.Process(target=_work, args=(task, theirs, place), name=task.name)
        with children_ignore_interrupts():
            process.start()
        theirs.close()
        self._running[ours] = (task.name, process, place)

    @override
    def news(self, timeout: float) -> Sequence[News]:
        found = []
        for connection in wait(list(self._running), timeout=timeout):
            assert isinstance(connection, Connection)
            name, process, place = self._running[connection]
            try:
                news: News = connection.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                news = News(name, "lost", f"its process died with exit code {process.exitcode}")
            if news.ends:
                process.join()
                connection.close()
                del self._running[connection]
                self._free += [place] * bool(self._places)
            found.append(news)
        return found

    @override
    def stop(self) -> None:
        for _, process, _ in self._running.values():
            process.terminate()  # training then saves and stops


def gpu_places(visible: Sequence[str], share: float) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each run that fits on the GPUs at one time.

    >>> gpu_places(["0", "1"], 0.5)
    ['0', '1', '0', '1']
    >>> gpu_places(["0", "1", "2", "3"], 2)
    ['0,1', '2,3']
    """
    if share <= 1:
        return list(visible) * int(1 / share + 1e-9)
    each = int(share)
    return [",".join(visible[i : i + each]) for i in range(0, len(visible) - each + 1, each)]


def _work(task: MemberTask, connection: Connection, place: str) -> None:
    """Body of a process."""
    if place:
        os.environ["CUDA_VISIBLE_DEVICES"] = place  # before CUDA starts
    work(task, connection.send)
    connection.close()
