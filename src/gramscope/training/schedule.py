"""The factor on the step size at each step."""

from __future__ import annotations

import math

from gramscope.training.config import ScheduleTable


def schedule_factor(table: ScheduleTable, step: int, steps: int, steps_per_epoch: int) -> float:
    """Factor for step ``step`` (from 0) of ``steps``.

    A linear warm-up over ``warm_up`` epochs ends at 1; what follows starts there: ``constant`` stays, ``linear`` and
    ``cosine`` go to ``final`` at the last step's end, ``step`` multiplies by ``factor`` every ``every`` epochs.
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
