"""The steps of a run: how many, what is due at each, and the factor on the step size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.config_tables import ScheduleTable


@dataclass(frozen=True)
class Plan:
    """How many steps a run takes, and at which of them something is due."""

    samples: int
    batch_size: int
    steps: int
    steps_per_epoch: int
    evaluate_every: int
    measure_every: int
    checkpoint_every: int
    schedule: ScheduleTable

    @classmethod
    def of(cls, config: TrainConfig, samples: int) -> Plan:
        """The plan for a training set of ``samples``."""
        batch_size = min(config.batch_size or samples, samples)
        per_epoch = -(-samples // batch_size)

        def cadence(epochs: float) -> int:
            return max(1, round(epochs * per_epoch)) if epochs > 0 else 0

        return cls(
            samples=samples,
            batch_size=batch_size,
            steps=round(config.epochs * per_epoch),
            steps_per_epoch=per_epoch,
            evaluate_every=cadence(config.evaluate_every),
            measure_every=cadence(config.measure.every),
            checkpoint_every=cadence(config.checkpoint_every),
            schedule=config.schedule,
        )

    def due(self, every: int, step: int) -> bool:
        """Whether something with cadence ``every`` is due after ``step`` steps; the end always is."""
        return step == self.steps or (every > 0 and step % every == 0)

    def factor(self, step: int) -> float:
        """Schedule factor of the step from ``step`` to ``step + 1``."""
        return schedule_factor(self.schedule, step, self.steps, self.steps_per_epoch)

    def slice(self, step: int) -> tuple[int, slice]:
        """Epoch of the step from ``step`` to ``step + 1``, and its part of the epoch's order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch, slice(position * self.batch_size, min((position + 1) * self.batch_size, self.samples))


def schedule_factor(table: ScheduleTable, step: int, steps: int, steps_per_epoch: int) -> float:
    """Factor for step ``step`` (from 0) of ``steps``.

    A linear warm-up over ``warm_up`` epochs ends at 1. From there ``constant`` stays at 1, ``linear`` and ``cosine`` reach
    ``final`` at the end of the last step, and ``step`` multiplies by ``factor`` every ``every`` epochs.
    """
    warm = min(round(table.warm_up * steps_per_epoch), steps)
    if step < warm:
        return (step + 1) / warm
    if table.name == "constant":
        return 1.0
    if table.name == "step":
        return table.factor ** math.floor((step - warm) / (table.every * steps_per_epoch))
    progress = (step - warm) / max(steps - warm, 1)
    if table.name == "linear":
        return 1.0 + (table.final - 1.0) * progress
    return table.final + (1.0 - table.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
