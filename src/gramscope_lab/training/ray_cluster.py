"""Members on a Ray cluster, each in an actor of its own."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.training.members import MemberTask, News, Workers, work

try:
    import ray
except ImportError as error:
    raise MissingExtraError(f"--engine ray needs Ray ({error}): pip install 'gramscope[ray]'") from error


class RayCluster(Workers):
    """As many actors at a time as the cluster has CPUs and GPUs for, and one that waits, so that it may grow.

    All nodes need gramscope and see the run directory under the same path.

    Args:
        address: of the cluster, ``auto`` for the one this machine belongs to; empty for ``RAY_ADDRESS``, or else a cluster of
            this machine alone, which ends with the work.
        gpus: share of a GPU for each member, such as 0.25.
    """

    def __init__(self, address: str = "", gpus: float | None = None) -> None:
        self._gpus = gpus or 0
        self._began = not ray.is_initialized()
        main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGTERM) if main and self._began else None
        if self._began:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns while this is open
            try:
                ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"--engine ray --address {address or '(none)'}: {error}") from error
        self._actors: dict[str, Any] = {}
        #: requests for news, by reference
        self._asked: dict[Any, str] = {}
        self._heard: set[str] = set()
        self._unstarted: list[News] = []
        self._actor_class = ray.remote(_MemberActor).options(num_cpus=1, num_gpus=self._gpus, max_restarts=0)
        if self._gpus and not ray.cluster_resources().get("GPU"):
            self.close()
            raise InputError(
                f"--gpus {self._gpus:g}: the Ray cluster has no GPU; leave --gpus out, or add a node with one"
            )

    @property
    @override
    def slots(self) -> int:
        found = ray.cluster_resources()
        fitting = [int(found.get("CPU", 0))] + ([int(found.get("GPU", 0) / self._gpus + 1e-9)] if self._gpus else [])
        return min(fitting) + 1

    @override
    def start(self, task: MemberTask) -> None:
        actor = self._actor_class.remote(task)
        self._actors[task.name] = actor
        self._asked[actor.news.remote()] = task.name

    @override
    def news(self, timeout: float) -> Sequence[News]:
        ready, _ = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout) if self._asked else ([], [])
        )
        found, self._unstarted = self._unstarted, []
        for reference in ready:
            name = self._asked.pop(reference)
            self._heard.add(name)
            try:
                news: list[News] = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                news = [News(name, "lost", f"its Ray worker died ({_first_line(error)})")]
            if news and news[-1].ends:
                ray.kill(self._actors.pop(name))
                self._heard.discard(name)
            else:
                self._asked[self._actors[name].news.remote()] = name
            found += news
        return found

    @override
    def stop(self) -> None:
        for reference, name in list(self._asked.items()):
            if name in self._heard:
                self._actors[name].stop.remote()
            else:  # it may wait for a place; what it has not begun needs no saving
                ray.kill(self._actors[name])
                del self._asked[reference]
                self._unstarted.append(News(name, "interrupted"))

    @override
    def close(self) -> None:
        if self._began:
            ray.shutdown()
            if self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)


class _MemberActor:
    """Trains one member in a thread, so that it can answer meanwhile."""

    def __init__(self, task: MemberTask) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._stop = threading.Event()
        arguments = (task, self._news.put, self._stop.is_set)
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def news(self) -> list[News]:
        """What there is to say; waits half a second where there is nothing."""
        found = []
        try:
            found.append(self._news.get(timeout=0.5))
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return found

    def stop(self) -> None:
        """Save and end."""
        self._stop.set()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
