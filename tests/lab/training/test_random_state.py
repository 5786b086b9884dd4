from __future__ import annotations

import pytest
import torch

from gramscope_lab.data.dataset import derive_seed, generator
from gramscope_lab.training.random_state import PrivateRandomState, epoch_order


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
