"""Train members elsewhere: what a worker is told and sends back, and the loop that starts, watches and restarts workers."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from gramscope.errors import GramscopeError
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.interrupt import Interrupted, stop_on_signal
from gramscope_lab.training.reporter import Reporter

#: seconds between a worker's messages about its progress
NEWS_EVERY = 0.5
#: times that a member is started again without a new checkpoint
RESTARTS = 3
#: seconds to wait for the lock of a worker that is thought to be dead
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class MemberTask:
    """What a worker needs to know: which member to train, in how many steps, and where."""

    name: str
    config: TrainConfig
    path: Path
    labels: Mapping[str, Any]
    steps: int


@dataclass(frozen=True)
class News:
    """A message about one member.

    Its ``kind`` is ``step`` (content: steps done), ``records`` (evaluation records), or one of the ends: ``finished``,
    ``interrupted`` (saved, because asked to stop), ``failed`` (content: the error) and ``lost`` (content: how its worker died).
    """

    member: str
    kind: str
    content: Any = None

    @property
    def ends(self) -> bool:
        """Whether the worker is gone."""
        return self.kind not in ("step", "records")


class Workers(ABC):
    """Where members train: each in a worker of its own, with one thread."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many workers to have at a time."""

    @abstractmethod
    def start(self, task: MemberTask) -> None:
        """Start a worker that trains a member from its last checkpoint on."""

    @abstractmethod
    def news(self, timeout: float) -> Sequence[News]:
        """What came from the workers, after at most ``timeout`` seconds."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to save and end; their last news says that they did."""

    def close(self) -> None:  # noqa: B027 - not every kind has something to free
        """Free what belongs to all workers."""


def run_members(tasks: Sequence[MemberTask], workers: Workers, reporter: Reporter) -> None:
    """Train all members.

    A member whose worker dies is started again from its last checkpoint, at most three times in a row without a new one. A
    member that fails stops the others, and its error is raised here. On an interrupt every member is saved.
    """
    known = {task.name: task for task in tasks}
    done, restarts = dict.fromkeys(known, 0), {name: _Restarts(task) for name, task in known.items()}
    waiting, running = list(known), set[str]()
    failure, told = "", False
    reporter.start(f"{len(tasks)} runs", sum(task.steps for task in tasks))
    with stop_on_signal() as stop:
        while (waiting and not failure and not stop.asked) or running:
            ending = bool(failure) or stop.asked
            while waiting and len(running) < workers.slots and not ending:
                running.add(waiting[0])
                workers.start(known[waiting.pop(0)])
            if ending and not told:
                told = True
                workers.stop()
            for news in workers.news(0.2):
                name = news.member
                if news.kind == "step":
                    done[name] = news.content
                    reporter.member(name, news.content, known[name].steps)
                    reporter.advance(sum(done.values()))
                elif news.kind == "records":
                    reporter.records(news.content, name)
                if not news.ends:
                    continue
                running.remove(name)
                reporter.member_ended(name, news.kind)
                stop.asked |= news.kind == "interrupted" and not failure
                if news.kind == "lost" and not told:
                    if restarts[name].again():
                        reporter.note(f"{name}: {news.content}; it starts again from its last checkpoint")
                        waiting.insert(0, name)
                    else:
                        failure = failure or f"{name}: {news.content}, {RESTARTS + 1} times without a new checkpoint"
                elif news.kind == "failed" and not told:
                    failure = failure or f"{name}: {news.content}"
    reporter.finish()
    if failure:
        raise GramscopeError(failure)
    if stop.asked:
        trust = " --trust" if tasks[0].config.factories() else ""
        raise Interrupted(f"stopped and saved; continue with: gramscope train --resume {tasks[0].path.parent}{trust}")


class _Restarts:
    """Counts how often a member was started again since its last new checkpoint."""

    def __init__(self, task: MemberTask) -> None:
        self._path = task.path
        self._step, self._count = self._saved(), 0

    def _saved(self) -> int:
        return max(RunDirectory(self._path).checkpoint_steps(), default=-1)

    def again(self) -> bool:
        """Whether to start it once more."""
        saved = self._saved()
        self._step, self._count = saved, self._count + 1 if saved == self._step else 1
        return self._count <= RESTARTS


class _Messenger(Reporter):
    """Sends progress to the process that started the worker, and hears from it whether to stop."""

    def __init__(self, name: str, send: Callable[[News], None], stop_asked: Callable[[], bool]) -> None:
        self._name, self._send, self._stop_asked = name, send, stop_asked
        self._sent = 0.0

    @override
    def advance(self, done: int) -> None:
        if time.perf_counter() - self._sent > NEWS_EVERY:
            self._sent = time.perf_counter()
            self._send(News(self._name, "step", done))

    @override
    def records(self, records: Sequence[dict[str, Any]], label: str = "") -> None:
        self._send(News(self._name, "step", records[0]["step"]))
        self._send(News(self._name, "records", list(records)))

    @override
    def stop_asked(self) -> bool:
        return self._stop_asked()


def work(task: MemberTask, send: Callable[[News], None], stop_asked: Callable[[], bool] = lambda: False) -> None:
    """Body of a worker: train one member, and send its progress and how it ended."""
    import torch

    from gramscope_lab.training.train import run_member

    torch.set_num_threads(1)
    end = News(task.name, "finished")
    try:
        _wait_for_lock(task)
        run_member(task, _Messenger(task.name, send, stop_asked))
    except (Interrupted, KeyboardInterrupt):
        end = News(task.name, "interrupted")
    except GramscopeError as error:
        end = News(task.name, "failed", str(error))
    except Exception:
        end = News(task.name, "failed", traceback.format_exc())
    send(end)


def _wait_for_lock(task: MemberTask) -> None:
    """Wait until a worker that this one replaces is really gone; after a minute, training says who is there."""
    run = RunDirectory(task.path)
    if not run.exists():
        raise GramscopeError(
            f"{task.path} is not there; the run directory must be in a file system that all workers share"
        )
    end = time.monotonic() + LOCK_SECONDS
    while run.lock.held_by_other() and time.monotonic() < end:
        time.sleep(0.2)
