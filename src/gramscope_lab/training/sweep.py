"""Many members in processes of this machine or on a Ray cluster: submitted, watched through their records, started again."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from gramscope.errors import GramscopeError, InputError, MissingExtraError
from gramscope_lab.runs import files
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import RECORDS, STOP
from gramscope_lab.runs.records import iter_records, records_end
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Interrupted, Reporter, children_ignore_interrupts, stop_on_signal

#: seconds between looks at records, and at the file that asks to stop
LOOK_EVERY = 0.5
#: times in a row that runs are started again without a new checkpoint
RESTARTS = 3
#: seconds to wait for the lock of a process that is thought to be dead
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class MemberTask:
    """What a worker needs to know: which member to train, and where."""

    name: str
    config: TrainConfig
    path: Path
    labels: Mapping[str, Any]


# -- in a worker --------------------------------------------------------------------------------------------------
class _Worker(Reporter):
    """Looks whether training is to stop: a file in the group's directory says so, or the parent is gone."""

    def __init__(self, path: Path) -> None:
        self._path, self._looked, self._parent = path.parent / STOP, 0.0, os.getppid()

    @override
    def advance(self, done: int) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return False
        self._looked = now
        return self._path.exists() or self.orphaned()

    def orphaned(self) -> bool:
        """Whether the process that started this one has died."""
        return os.getppid() != self._parent


@functools.cache
def _preparer() -> Any:
    """The data sets of this worker, which it loads once."""
    from gramscope_lab.training.job import Preparer

    return Preparer()


def train_member(task: MemberTask) -> str:
    """Body of a worker: train one member from its last checkpoint on; ``finished`` or ``interrupted``."""
    import torch

    from gramscope_lab.training.train import is_complete, train_jobs
    from gramscope_lab.training.trainer import SingleEngine

    torch.set_num_threads(1)
    run, worker = RunDirectory(task.path), _Worker(task.path)
    if not run.exists():
        raise GramscopeError(f"{task.path} is not there; all workers must see the run directory under the same path")
    end = time.monotonic() + LOCK_SECONDS
    while run.lock.held_by_other() and time.monotonic() < end:  # of a worker that this one replaces
        time.sleep(0.2)
    if worker.advance(0):
        return "interrupted"
    if is_complete(run):
        return "finished"
    try:
        train_jobs(SingleEngine(_preparer()(task.config, task.name, task.labels)), [run], reporter=worker)
    except Interrupted:
        if worker.orphaned():
            os._exit(1)  # nobody waits for an answer
        return "interrupted"
    return "finished"


def _begin(count: Any, visible: Sequence[str]) -> None:
    """Give a new process its GPU, before CUDA starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent asks for the end
    if visible:
        with count.get_lock():
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[count.value % len(visible)]
            count.value += 1


# -- executors ----------------------------------------------------------------------------------------------------
def local_executor(workers: int, device: str) -> Executor:
    """Processes of this machine, which share its GPUs in turn if the runs are to use them."""
    import torch

    visible: list[str] = []
    if device in ("auto", "cuda") and torch.cuda.is_available():
        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        visible = named or [str(index) for index in range(torch.cuda.device_count())]
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _begin, (context.Value("i", 0), visible))


class RayExecutor(Executor):
    """Tasks on a Ray cluster, which Ray starts again where a node or a process dies.

    All nodes need gramscope and see the run directory under the same path.

    Args:
        address: of the cluster, ``auto`` for the one this machine belongs to; empty for ``RAY_ADDRESS``, or else a cluster of
            this machine alone, which ends with the work.
        gpus: share of a GPU for each run, such as 0.25.
    """

    def __init__(self, address: str = "", gpus: float | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError(f"--parallel ray needs Ray ({error}): pip install 'gramscope[ray]'") from error
        self._ray, self._gpus, self._began = ray, gpus or 0, not ray.is_initialized()
        main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGTERM) if main and self._began else None
        if self._began:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns while this is open
            try:
                ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"--parallel ray:{address}: {error}") from error
        if self._gpus and not ray.cluster_resources().get("GPU"):
            self.shutdown()
            raise InputError(
                f"--gpus {self._gpus:g}: the Ray cluster has no GPU; leave --gpus out, or add a node with one"
            )

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        remote = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=RESTARTS)(fn)
        future: Future[Any] = remote.remote(*args, **kwargs).future()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._began and self._ray.is_initialized():
            self._ray.shutdown()
            if self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)


# -- the parent ---------------------------------------------------------------------------------------------------
def run_members(tasks: Sequence[MemberTask], executor: Callable[[], Executor], reporter: Reporter) -> None:
    """Train all members; on an interrupt every one is saved.

    Where a process dies, its members go on from their last checkpoints, at most three times in a row without a new one. A
    member that fails stops the others, and its error is raised here.

    Args:
        tasks: the members.
        executor: makes what they are submitted to; again where its processes have died.
        reporter: receives notes and progress.
    """
    root = tasks[0].path.parent
    watched = _Progress(tasks, reporter)
    waiting, failure, restarts, saved = list(tasks), "", 0, _saved(tasks)
    files.remove(root / STOP)
    try:
        while waiting and not failure:
            pool = executor()
            with stop_on_signal() as stop:
                with children_ignore_interrupts():
                    futures = {pool.submit(train_member, task): task for task in waiting}
                waiting, failure = _wait(futures, watched, stop, root)
            pool.shutdown(cancel_futures=True)
            if stop.asked:
                break
            if waiting and not failure:
                before, saved = saved, _saved(tasks)
                restarts = 0 if saved > before else restarts + 1
                if restarts > RESTARTS:
                    failure = f"{waiting[0].name}: its process died {restarts} times without a new checkpoint"
                else:
                    reporter.note("a process died; its runs start again from their last checkpoints")
    finally:
        files.remove(root / STOP)
        reporter.finish()
    if failure:
        raise GramscopeError(failure)
    if stop.asked:
        trust = " --trust" if tasks[0].config.factories() else ""
        raise Interrupted(f"stopped and saved; continue with: gramscope train --resume {root}{trust}")


def _wait(
    futures: Mapping[Future[str], MemberTask], watched: _Progress, stop: Any, root: Path
) -> tuple[list[MemberTask], str]:
    """Wait for all futures: the members whose process died, and the first error."""
    lost: list[MemberTask] = []
    pending, failure = set(futures), ""
    while pending:
        done, pending = wait(pending, LOOK_EVERY, FIRST_COMPLETED)
        watched.look()
        for future in done:
            task = futures[future]
            try:
                stop.asked |= future.result() == "interrupted" and not failure
                watched.ended(task)
            except BrokenExecutor:
                lost.append(task)
            except GramscopeError as error:
                failure = failure or f"{task.name}: {error}"
            except Exception as error:
                failure = failure or f"{task.name}: {type(error).__name__}: {error}"
        if stop.asked or failure:
            files.write_file(root / STOP, b"")
    return lost, failure


def _saved(tasks: Sequence[MemberTask]) -> int:
    """A number that grows with every new checkpoint."""
    return sum(max(RunDirectory(task.path).checkpoint_steps(), default=0) for task in tasks)


class _Progress:
    """Reads new evaluations from the members' records, and reports them."""

    def __init__(self, tasks: Sequence[MemberTask], reporter: Reporter) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._ends = {task.name: records_end(task.path / RECORDS) for task in tasks}
        self._reporter, self._done = reporter, 0
        reporter.start(f"{len(tasks)} runs", len(tasks), "run")

    def look(self) -> None:
        """Report what is new."""
        for name, task in self._tasks.items():
            path = task.path / RECORDS
            start = min(self._ends[name], records_end(path))  # a run that starts again cuts its records
            with suppress(InputError):
                for record, end in iter_records(path, start):
                    start = end
                    if record.get("kind") == "evaluation":
                        self._reporter.records([record], name)
            self._ends[name] = start

    def ended(self, task: MemberTask) -> None:
        """One more is done."""
        self._tasks.pop(task.name, None)
        self._done += 1
        self._reporter.advance(self._done)
