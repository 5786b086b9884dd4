"""``gs.Monitor``: measures through a training run that the user already has.

monitor = gs.Monitor(model, (x, y), loss)      # one line to create
for batch in loader:
    ...                                        # the user's own step
    monitor.step()                             # one line to call
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramscope.distributed.exchange import find_exchange
from gramscope.errors import InputError, Note, NumericalError, check_arguments
from gramscope.instruments.log import (
    Log,
    check_log,
    write_record,
)
from gramscope.instruments.measure import given_by, measure, needs_of
from gramscope.layers.batches import NoBatchError, Unpack, batches, first_tensor, head, to_device
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import model_device, model_dtype
from gramscope.layers.modules import outside_graphs, unwrap
from gramscope.layers.select import LayerSelector
from gramscope.measures.column import Column
from gramscope.measures.columns import columns_of
from gramscope.measures.series import Series
from gramscope.measures.table import Table

#: what is recorded unless measures are named: nothing that needs a backward pass, so that a record is cheap
DEFAULT = ("weight_norm", "effective_rank", "target_linearity", "surrogate", "surrogate_linearized", "nc1")

#: all arguments but the first three: those of a measurement, and the monitor's own
ARGUMENTS = ("every", "samples", "log", *list(inspect.signature(measure).parameters)[3:])


def geometric(step: int, ratio: float = 1.35) -> bool:
    """Whether ``step`` belongs to the default cadence: 0, 1, 2, 3, 4, then every time the step has grown by ``ratio``.

    It depends on the step alone, so that resumed runs record the same steps; 20 records take about 800 steps and 30 take
    about 15,000.

    >>> [step for step in range(40) if geometric(step)]
    [0, 1, 2, 3, 4, 6, 9, 13, 18, 25, 34]
    """
    due = 0
    while due < step:
        due = due + 1 if due < 4 else int(due * ratio) + 1
    return due == step


class Monitor:
    """Measures a model on a fixed sample every few steps of a training run and keeps the records.

    Args:
        model: the model being trained; it is never changed.
        data: tensors or arrays ``(x, y)``, a loader or a data set, of which the first ``samples`` are held.
        loss: as for :func:`gramscope.measure`; without one, measures of gradients are left out.
        measures: names of measures; ``None`` for a cheap set without backward passes.
        every: record every this many calls of :meth:`step`; ``None`` for the geometric cadence (dense at the start, about
            30 records in 15,000 steps); or a function ``step -> bool``. To record by epochs, call :meth:`step` once an epoch
            with ``every=1``.
        layers: names, globs or types of layers; ``None`` for all.
        samples: how many samples to hold. Target linearity wants several times as many as a layer has features.
        reference: ``"initial"`` keeps a copy of the model as it is now for measures that need the initialisation (only if
            one of them is asked for); or a network of one's own.
        log: called with ``(step, record)`` for every record, or a TensorBoard ``SummaryWriter``.
        unpack: ``batch -> (inputs, target)`` for loaders that yield something else.
        options: all other arguments of :func:`gramscope.measure`.

    In several processes of ``torch.distributed`` each holds samples of its own part of the data, and all of them record the
    measures of the samples of all processes; ``process_group=False`` measures in this process alone.

    Creating the monitor makes the first record, of step 0. Between records :meth:`step` only counts. Once the model's
    outputs or the loss are NaN or infinite, records hold no layers but a note on that, and the run goes on.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> monitor = gs.Monitor(net, (torch.rand(30, 3), torch.arange(30) % 2), torch.nn.CrossEntropyLoss(), every=5)
    >>> for _ in range(10):
    ...     _ = monitor.step()
    >>> [record["step"] for record in monitor.records]
    [0, 5, 10]
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: Loss | None = None,
        *,
        measures: str | Column | Iterable[str | Column] | None = None,
        every: int | Callable[[int], bool] | None = None,
        layers: LayerSelector = None,
        samples: int = 1024,
        reference: nn.Module | str | None = "initial",
        log: Log | None = None,
        unpack: Unpack | None = None,
        **options: Any,
    ) -> None:
        check_arguments(options, ARGUMENTS)
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
            raise InputError(f"samples={samples!r}: give the number of samples to hold, at least 2")
        self.model = model
        self.records: list[dict[str, Any]] = []
        self.step_count = 0
        self._loss = loss
        self._due = cadence(every)
        self._log = check_log(log)
        measures = DEFAULT if measures is None else measures
        needs = needs_of(columns_of(measures, given_by(model, loss) | {"reference", "held_out"}))
        needs_reference = "reference" in needs
        self._initial = None  # our own copy of the initial network
        if reference == "initial":
            reference = self._initial = copy.deepcopy(unwrap(model)) if needs_reference else None
        elif isinstance(reference, str):
            raise InputError(f"reference={reference!r}: give 'initial', a network or None")
        self._options = {"progress": False, **options, "measures": measures, "layers": layers}
        self._options["reference"] = reference if needs_reference else None
        self._samples, self._unpack = samples, unpack
        self.hold(data)
        self.record()

    def hold(self, data: Any) -> None:
        """Measure on the first ``samples`` samples of these data from now on."""
        device, dtype = model_device(self.model), model_dtype(self.model)
        options = self._options
        together = find_exchange(options.get("process_group"), self.model) is not None
        self._data = hold(data, self._samples, self._unpack, device, dtype, options.get("batch_dim", 0), together)

    @outside_graphs
    def step(self) -> dict[str, Any] | None:
        """Count one step; the record if one is due, else ``None``."""
        self.step_count += 1
        return self.record() if self._due(self.step_count) else None

    __call__ = step

    def record(self) -> dict[str, Any]:
        """Measure now, whatever the cadence, and keep the record ``{step, layers, network, notes}``."""
        try:
            table = self.measure()
        except NumericalError as error:
            if not self.records:  # the run has not diverged: the data or the model cannot be measured
                raise
            table = Table({}, notes={"(model)": Note("undefined", str(error))})
        record = {"step": self.step_count, **table.to_dict()}
        self.records.append(record)
        if self._log is not None:
            write_record(self._log, record)
        return record

    def measure(self) -> Table:
        """The table of the chosen measures at this moment, on the monitored sample."""
        return measure(self.model, self._data, self._loss, **self._options)

    @property
    def series(self) -> Series:
        """The tables of all records: ``monitor.series["nfa"]["fc1"]`` is ``{step: value}``, and it plots and saves itself."""
        return Series.from_records(self.records)

    def report(self, path: str | Path, title: str = "Feature learning over training") -> None:
        """Write a page that needs no network: every measure over steps and layers."""
        self.series.report(path, title)

    def __repr__(self) -> str:
        return f"Monitor: {self.series}"

    def _repr_html_(self) -> str:
        """The records so far as curves, and the last one as a table, in a notebook."""
        return self.series._repr_html_()

    def state_dict(self) -> dict[str, Any]:
        """The step and all records, as plain values, and the initial weights where a measure compares with them."""
        state = {"step": self.step_count, "records": copy.deepcopy(self.records)}
        if self._initial is not None:
            state["initial"] = {name: value.clone() for name, value in self._initial.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the records of that state replace the present ones."""
        if self._initial is not None and "initial" in state:
            self._initial.load_state_dict(state["initial"])
        self.step_count = int(state["step"])
        self.records = copy.deepcopy(state["records"])


def cadence(every: Any) -> Callable[[int], bool]:
    """Whether a step is due, from a number of steps, a function, or ``None`` for the geometric cadence."""
    if every is None:
        return geometric
    if callable(every):
        return every  # type: ignore[no-any-return]
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        raise InputError(
            f"every={every!r}: give a positive whole number of steps, a function step -> bool, or None; to record by "
            "epochs call step() once an epoch with every=1"
        )
    number = int(every)
    return lambda step: step % number == 0


def hold(
    data: Any,
    samples: int,
    unpack: Unpack | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    batch_dim: int = 0,
    may_be_empty: bool = False,
) -> list[tuple[Any, Any]]:
    """The first ``samples`` samples of tensors, arrays (as ``dtype``), a loader or a data set, as batches on ``device``.

    Where the batch is not the first axis, whole batches are held.
    """
    held: list[tuple[Any, Any]] = []
    count = 0
    ignored = (NoBatchError,) if may_be_empty else ()
    with suppress(*ignored), torch.random.fork_rng(devices=[]):  # a shuffling loader draws from the global generator
        for inputs, target in batches(data, unpack, dtype):
            first = first_tensor(inputs)
            n = 0 if first is None else first.shape[batch_dim] if first.dim() > batch_dim else 1
            rest = samples - count if batch_dim == 0 else n
            held.append((to_device(head(inputs, rest, n), device), to_device(head(target, rest, n), device)))
            count += min(n, rest)
            if count >= samples:
                break
    return held
