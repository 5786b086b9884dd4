"""The log of a monitor: a function, or a TensorBoard writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from gramscope.errors import InputError


@runtime_checkable
class ScalarWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that every record needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""


#: entries of a record's network that say how much was measured; no curve is wanted of them
SIZES = ("samples", "positions")

#: called with ``(step, record)``, or a TensorBoard writer
Log: TypeAlias = Callable[[int, dict[str, Any]], object] | ScalarWriter


def check_log(log: Log | None) -> Log | None:
    """The log, or an error unless it is ``None``, a function or a writer."""
    if log is None or callable(log) or isinstance(log, ScalarWriter):
        return log
    raise InputError(
        f"log={log!r} is a {type(log).__name__}; give a function of (step, record) or a writer with add_scalar, such as "
        "torch.utils.tensorboard.SummaryWriter"
    )


def tag(measure: str, layer: str | None = None) -> str:
    """The name of a number in a log: ``gramscope/measure/layer``, or ``gramscope/measure`` for one of the whole network.

    >>> tag("target_linearity", "fc1"), tag("loss")
    ('gramscope/target_linearity/fc1', 'gramscope/loss')
    """
    return "/".join(["gramscope", measure] + ([] if layer is None else [layer]))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by their :func:`tag`: one for each measure and layer, and the network's loss and accuracy.

    >>> scalars({"step": 5, "layers": {"fc1": {"nc1": 0.5, "nfa": None}}, "network": {"samples": 9, "loss": 2.0}})
    {'gramscope/loss': 2.0, 'gramscope/nc1/fc1': 0.5}
    """
    found = {tag(name): value for name, value in record["network"].items() if name not in SIZES}
    for layer, row in record["layers"].items():
        found |= {tag(name, layer): value for name, value in row.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def write_record(log: Log, record: dict[str, Any]) -> None:
    """Hand a record to a function, or its :func:`scalars` to a writer."""
    if not isinstance(log, ScalarWriter):
        log(record["step"], record)
        return
    for name, value in scalars(record).items():
        log.add_scalar(name, value, record["step"])
