"""Members in processes of their own, for runs that cannot be stacked into one step."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from typing_extensions import override

from gramscope.errors import GramscopeError
from gramscope.training.config import TrainConfig
from gramscope.training.interrupt import Interrupted, children_ignore_interrupts, stop_on_signal
from gramscope.training.reporter import Reporter

#: seconds between a process's messages about its progress
_NEWS_EVERY = 0.5


@dataclass(frozen=True)
class MemberTask:
    """What a process needs to know: which member to train, in how many steps, and where."""

    name: str
    config: TrainConfig
    path: Path
    labels: Mapping[str, Any]
    steps: int


def worker_count(members: int) -> int:
    """Processes at a time: one a core this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(members, cores))


def run_in_processes(tasks: Sequence[MemberTask], reporter: Reporter) -> None:
    """Train each member in a fresh process, as many at a time as there are cores, one thread each.

    A member that fails stops the others, and its error is raised here. On an interrupt every process saves and ends.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(tasks)
    running: dict[Connection, tuple[MemberTask, SpawnProcess]] = {}
    done = {task.name: 0 for task in tasks}
    workers = worker_count(len(tasks))
    failure, told = "", False
    reporter.start(f"{len(tasks)} runs in {workers} processes", sum(task.steps for task in tasks))
    with stop_on_signal() as stop:
        while (waiting and not failure and not stop.asked) or running:
            while waiting and len(running) < workers and not failure and not stop.asked:
                task = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(task, theirs), name=task.name)
                with children_ignore_interrupts():
                    process.start()
                theirs.close()
                running[ours] = (task, process)
            if (stop.asked or failure) and not told:
                told = True
                for _, process in running.values():
                    process.terminate()  # training then saves and stops
            for connection in wait(list(running), timeout=0.2):
                assert isinstance(connection, Connection)
                task, process = running[connection]
                kind, content = _receive(connection, process, task.name)
                if kind == "step":
                    done[task.name] = content
                    reporter.advance(sum(done.values()))
                elif kind == "records":
                    reporter.records(content, task.name)
                else:
                    process.join()
                    connection.close()
                    del running[connection]
                    stop.asked |= kind == "interrupted"
                    if kind == "failed" and not told:
                        failure = failure or f"{task.name}: {content}"
    reporter.finish()
    if failure:
        raise GramscopeError(failure)
    if stop.asked:
        trust = " --trust" if tasks[0].config.factories() else ""
        raise Interrupted(f"stopped and saved; continue with: gramscope train --resume {tasks[0].path.parent}{trust}")


def _receive(connection: Connection, process: SpawnProcess, name: str) -> tuple[str, Any]:
    try:
        kind, content = connection.recv()
        return str(kind), content
    except EOFError:
        process.join()
        return "failed", f"its process died with exit code {process.exitcode}"


class _Messenger(Reporter):
    """Sends progress to the process that started this one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent = 0.0

    @override
    def advance(self, done: int) -> None:
        if time.perf_counter() - self._sent > _NEWS_EVERY:
            self._sent = time.perf_counter()
            self._connection.send(("step", done))

    @override
    def records(self, records: Sequence[dict[str, Any]], label: str = "") -> None:
        self._connection.send(("step", records[0]["step"]))
        self._connection.send(("records", records))


def _work(task: MemberTask, connection: Connection) -> None:
    """Body of a process: train one member, and send its progress and how it ended."""
    import torch

    from gramscope.training.train import run_member

    torch.set_num_threads(1)
    end: tuple[str, Any] = ("finished", "")
    try:
        run_member(task, _Messenger(connection))
    except (Interrupted, KeyboardInterrupt):
        end = ("interrupted", "")
    except GramscopeError as error:
        end = ("failed", str(error))
    except Exception:
        end = ("failed", traceback.format_exc())
    connection.send(end)
    connection.close()
