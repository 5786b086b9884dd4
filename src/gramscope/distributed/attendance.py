"""Which processes take part in a call, found out before any of them waits in an operation of the group.

Processes that measure together call the same function. One that calls it alone (``if rank == 0: gs.measure(...)``) must neither
wait for ever nor disturb operations that the others are in. So every process enters its name in the group's store when its call
begins, and looks for the names of the others when its own work is done. If they do not come, it goes on alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gramscope.distributed.exchange import Exchange

#: seconds that a process which has finished its own part waits for others to begin theirs
PATIENCE = 60.0


class Attendance:
    """The attendance of one call; made when the call begins.

    Calls are numbered by rounds. A round ends when all have come ("together") or the patience of one process ended ("apart");
    the store decides which, once for all processes. The keys of a round that ended together are deleted by the process that
    leaves it last. Those of the other rounds stay, a few bytes each: a process that is late must find that they are closed.
    """

    def __init__(self, exchange: Exchange) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._size = exchange.size
        name = f"gramscope/{exchange.group.group_name}"
        self._store = PrefixStore(name, _get_default_store())
        while True:
            self._round = self._store.add("round", 0)
            self._store.set(self._key(exchange.rank), "here")
            self._store.add(self._key("count"), 1)
            if not self._store.add(self._key("closed"), 0) or self._decided("apart") == "together":
                return
            while self._store.add("round", 0) == self._round:  # the process that closed it opens the next one
                time.sleep(0.001)

    def absent(self, patience: float | None = None) -> list[int]:
        """The processes that did not come; empty if all take part, and the same for all of them.

        Args:
            patience: seconds to wait, :data:`PATIENCE` by default.
        """
        end = time.monotonic() + (PATIENCE if patience is None else patience)
        pause = 0.001
        while True:
            together = self._store.add(self._key("count"), 0) == self._size
            if together or time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        decided = self._decided("together" if together else "apart")
        if self._store.add(self._key("closed"), 1) == 1:
            self._store.add("round", 1)
        if decided == "together":
            if self._store.add(self._key("left"), 1) == self._size:
                for what in (*range(self._size), "count", "closed", "decision", "left"):
                    self._store.delete_key(self._key(what))
            return []
        missing = [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]
        return missing or list(range(self._size))

    def _decided(self, wish: str) -> str:
        """What was decided about this round: the wish of the first process that asked."""
        found: bytes = self._store.compare_set(self._key("decision"), "", wish)
        return found.decode()

    def _key(self, what: object) -> str:
        return f"{self._round}/{what}"


def of_own_data(absent: Sequence[int], exchange: Exchange) -> str:
    """What a result is of where other processes did not take part."""
    return (
        f"of the data of process {exchange.rank} alone: processes {', '.join(map(str, absent))} of {exchange.size} did not "
        "measure with it; process_group=False measures in one process without waiting for others"
    )
