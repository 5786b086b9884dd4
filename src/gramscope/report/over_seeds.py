"""Mean and spread over the seeds of a setting, aligned by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gramscope.report.reading import Run, Setting, is_number
from gramscope.runs.records import Record


@dataclass(frozen=True)
class Summary:
    """Mean of some values and their standard deviation (of a sample, n − 1); one value has deviation ``None``."""

    mean: float
    deviation: float | None
    count: int

    @property
    def low(self) -> float:
        """Mean − 2σ."""
        return self.mean - 2 * (self.deviation or 0.0)

    @property
    def high(self) -> float:
        """Mean + 2σ."""
        return self.mean + 2 * (self.deviation or 0.0)


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summary of the values that are there; ``None`` of nothing.

    >>> summarise([1.0, None, 3.0])
    Summary(mean=2.0, deviation=1.4142135623730951, count=2)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Summary(mean, None, 1)
    return Summary(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)), len(known))


@dataclass(frozen=True)
class Curve:
    """A value over training: steps, the moment of each (epoch, step or seconds) and the summary over seeds."""

    steps: list[int]
    moments: list[float]
    values: list[Summary]

    def __bool__(self) -> bool:
        return bool(self.steps)


def evaluation_curve(setting: Setting, key: str, clock: str) -> Curve:
    """A value of the whole net over training; ``clock`` is what its moments are: epoch, step or seconds."""
    if (key, clock) not in setting.known:
        setting.known[key, clock] = _curve(setting, lambda run: run.evaluations, key, clock)
    found: Curve = setting.known[key, clock]
    return found


def layer_curve(setting: Setting, measure: str, layer: str, clock: str) -> Curve:
    """A measure of one layer over training."""
    if (measure, layer, clock) not in setting.known:
        setting.known[measure, layer, clock] = _curve(setting, lambda run: run.by_layer.get(layer, []), measure, clock)
    found: Curve = setting.known[measure, layer, clock]
    return found


def _curve(setting: Setting, rows: Callable[[Run], Sequence[Record]], key: str, clock: str) -> Curve:
    found: dict[int, list[float]] = {}
    times: dict[int, list[float]] = {}
    for run in setting.runs:
        for record in rows(run):
            value = record.get(key)
            if not is_number(value):
                continue
            step = int(record.get("step", 0))
            moment = record.get("seconds") if clock == "seconds" else run.moment(step) if clock == "epoch" else step
            if is_number(moment):
                found.setdefault(step, []).append(float(value))  # type: ignore[arg-type]
                times.setdefault(step, []).append(float(moment))  # type: ignore[arg-type]
    steps = sorted(found)
    values = [summary for step in steps if (summary := summarise(found[step])) is not None]
    return Curve(steps, [math.fsum(times[step]) / len(times[step]) for step in steps], values)
