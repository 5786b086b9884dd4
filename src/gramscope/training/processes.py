"""Members in processes of their own, for what cannot be stacked into one step."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from gramscope.errors import GramscopeError
from gramscope.training.config import TrainConfig
from gramscope.training.interrupt import Interrupted, stop_on_signal
from gramscope.training.reporting import Reporter


@dataclass(frozen=True)
class Errand:
    """What a process is told: which member to train, and where."""

    name: str
    config: TrainConfig
    path: Path
    labels: Mapping[str, Any]


def worker_count(members: int) -> int:
    """Processes at a time: one a core this process may use."""
    return max(1, min(members, _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_processes(errands: Sequence[Errand], reporter: Reporter) -> None:
    """Train each member in a fresh process, as many at a time as there are cores, one thread each.

    A member that fails stops the others from starting; its error is raised here. An interrupt reaches every process,
    each of which saves before it ends.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(errands)
    running: dict[Connection, tuple[str, SpawnProcess]] = {}
    workers = worker_count(len(errands))
    failure, done = "", 0
    reporter.start(f"{len(errands)} runs in {workers} processes", len(errands), unit="run")
    with stop_on_signal() as stop:
        while (waiting and not failure and not stop.asked) or running:
            while waiting and len(running) < workers and not failure and not stop.asked:
                errand = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(errand, theirs), name=errand.name)
                process.start()
                theirs.close()
                running[ours] = (errand.name, process)
            for connection in wait(list(running), timeout=0.2):
                assert isinstance(connection, Connection)
                name, process = running.pop(connection)
                try:
                    message = connection.recv()
                except EOFError:
                    process.join()
                    message = f"the process of {name} died with exit code {process.exitcode}"
                process.join()
                connection.close()
                if message == "interrupted":
                    stop.asked = True
                elif message:
                    failure = failure or f"{name}: {message}"
                else:
                    done += 1
                    reporter.advance(done)
    reporter.finish()
    if failure:
        raise GramscopeError(failure)
    if stop.asked:
        root = errands[0].path.parent
        raise Interrupted(f"stopped and saved; continue with: gramscope train --resume {root}")


def _work(errand: Errand, connection: Connection) -> None:
    """Body of a process: train one member and send an empty text, ``interrupted`` or what went wrong."""
    import torch

    from gramscope.training.train import run_member

    torch.set_num_threads(1)
    message = ""
    try:
        run_member(errand)
    except (Interrupted, KeyboardInterrupt):
        message = "interrupted"
    except GramscopeError as error:
        message = str(error)
    except Exception:
        message = traceback.format_exc()
    connection.send(message)
    connection.close()
