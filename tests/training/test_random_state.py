from __future__ import annotations

import math

import pytest
import torch

from gramscope.data.seeds import derive_seed, generator
from gramscope.training.config_tables import ScheduleTable
from gramscope.training.plan import schedule_factor
from gramscope.training.random_state import PrivateRandomState, epoch_order


def test_purposes_are_independent() -> None:
    seeds = {derive_seed(s, purpose, e) for s in range(5) for purpose in ("order", "weights") for e in range(5)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "order", 11) != derive_seed(0, "order1", 1)
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))


def test_epoch_orders_are_permutations() -> None:
    orders = [epoch_order(0, epoch, 50) for epoch in range(3)]
    assert all(torch.equal(order.sort().values, torch.arange(50)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[2], epoch_order(0, 2, 50))


def test_private_state_leaves_the_global_one_alone_and_continues() -> None:
    before = torch.get_rng_state()
    whole = PrivateRandomState(3, "dropout")
    with whole.active():
        expected = torch.rand(6)
    parts = PrivateRandomState(3, "dropout")
    with parts.active():
        first = torch.rand(2)
        state = parts.current()
    drawn = []

    def draw_and_fail() -> None:
        with parts.active():
            drawn.append(torch.rand(2))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        draw_and_fail()
    with parts.active():
        third = torch.rand(2)
    assert torch.equal(torch.cat([first, *drawn, third]), expected)
    loaded = PrivateRandomState(99, "other")
    loaded.load(state)
    with loaded.active():
        assert torch.equal(torch.rand(4), expected[2:])
    assert torch.equal(torch.get_rng_state(), before)


def factors(steps: int = 20, per_epoch: int = 5, **table: object) -> list[float]:
    schedule = ScheduleTable.from_table(table)
    return [schedule_factor(schedule, step, steps, per_epoch) for step in range(steps)]


def test_schedules() -> None:
    assert factors() == [1.0] * 20
    assert factors(warm_up=1)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert factors(name="linear")[:2] == pytest.approx([1.0, 0.95])
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
