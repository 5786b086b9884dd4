from __future__ import annotations

import math

import pytest
import torch

from gramscope_lab.training.config_tables import ScheduleTable
from gramscope_lab.training.plan import schedule_factor


def factors(steps: int = 20, per_epoch: int = 5, **table: object) -> list[float]:
    schedule = ScheduleTable.from_table(table)
    return [schedule_factor(schedule, step, steps, per_epoch) for step in range(steps)]


def test_schedules() -> None:
    assert factors() == [1.0] * 20
    assert factors(warm_up=1)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert factors(name="linear", final=0.5)[-1] == pytest.approx(0.525)
    assert factors(name="step", every=1, factor=0.5)[::5] == [1, 0.5, 0.25, 0.125]
    cosine = factors(name="cosine", warm_up=2)
    assert cosine[10] == 1.0
    assert cosine[15] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert factors(warm_up=100)[-1] == 1.0  # never longer than the run


def test_schedules_agree_with_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name, build in {
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 20),
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1),
    }.items():
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = build(optimizer)
        expected = []
        for _ in range(20):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert factors(name=name, every=1) == pytest.approx(expected), name
