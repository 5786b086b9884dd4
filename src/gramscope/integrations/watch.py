"""A monitor driven by another library's training loop, which counts the steps and saves the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gramscope.errors import InputError, check_arguments
from gramscope.instruments.log import Log, check_log, scalars, write_record
from gramscope.instruments.monitor import ARGUMENTS, Monitor, cadence
from gramscope.layers.losses import Loss
from gramscope.measures.series import Series

#: every so many, or ``count -> bool``; ``None`` for the usual cadence of a monitor
Every = int | Callable[[int], bool] | None


class Watch:
    """Base of the callbacks: a :class:`gramscope.Monitor` that follows the step numbers of a loop.

    Args:
        data: what the monitor of one process holds; ``None`` if :meth:`begin` and :meth:`record` get each process's data.
        loss: as for the monitor.
        every_n_steps: measure every this many optimizer steps; ``None`` for the geometric cadence of the monitor, or a function
            ``step -> bool``.
        every_n_epochs: measure after every this many epochs, in place of steps.
        log: a further log of the numbers, as that of the monitor.
        options: further arguments of the monitor.
    """

    def __init__(
        self,
        data: Any,
        loss: Loss | None,
        every_n_steps: Every,
        every_n_epochs: Every,
        log: Log | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_epochs is not None:
            raise InputError(
                f"every_n_steps={every_n_steps!r} and every_n_epochs={every_n_epochs!r}: give one of the two"
            )
        check_arguments(options, ["every_n_steps", "every_n_epochs", *ARGUMENTS[1:]])
        self.data, self.loss = data, loss
        # one process measures held-out data; batches as they pass are the parts of one sample in several processes
        self._options = options if data is None else {"process_group": False, **options}
        self.by_epochs = every_n_epochs is not None
        self._due = cadence(every_n_epochs if self.by_epochs else every_n_steps)
        self._log = check_log(log)
        self._count = 0
        self._loaded: dict[str, Any] | None = None
        #: whether this process writes to the log
        self.writes = True
        self.monitor: Monitor | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far."""
        return [] if self.monitor is None else self.monitor.records

    @property
    def series(self) -> Series:
        """The tables of all records, as :attr:`gramscope.Monitor.series`."""
        return Series.from_records(self.records)

    def report(self, path: str | Path, title: str = "Feature learning over training") -> None:
        """Write a page that needs no network: every measure over steps and layers."""
        self.series.report(path, title)

    def begin(self, model: nn.Module, data: Any, step: int) -> dict[str, float]:
        """Make the monitor and its first record; the numbers to log, none where a saved state was loaded."""
        self.monitor = Monitor(model, data, self.loss, **self._options)
        if self._loaded is not None:
            self.monitor.load_state_dict(self._loaded)
            self._loaded = None
            return {}
        self.monitor.step_count = self.monitor.records[0]["step"] = step
        return self._logged(self.monitor.records[0])

    def due(self, count: int) -> bool:
        """Whether a record is due at this number of steps (or epochs), or was due at one that was skipped."""
        passed = range(self._count + 1, count + 1)
        self._count = max(count, self._count)
        return any(map(self._due, passed))

    def skip_to(self, count: int) -> None:
        """Begin counting here."""
        self._count = count

    def record(self, step: int, data: Any = None) -> dict[str, float]:
        """Measure now, on new data where they are given; the numbers to log."""
        assert self.monitor is not None
        if data is not None:
            self.monitor.hold(data)
        self.monitor.step_count = step
        return self._logged(self.monitor.record())

    def _logged(self, record: dict[str, Any]) -> dict[str, float]:
        if self._log is not None and self.writes:
            write_record(self._log, record)
        return scalars(record)

    def state_dict(self) -> dict[str, Any]:
        """The monitor's state, empty before it has begun."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, at once or as soon as the monitor begins."""
        if self.monitor is None:
            self._loaded = state_dict or None
        elif state_dict:
            self.monitor.load_state_dict(state_dict)
