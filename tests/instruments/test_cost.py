"""What a measurement was estimated to take, and what it takes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.instruments.live_bytes import LiveBytes
from gramscope.instruments.resized import kept_bytes, square_bytes
from gramscope_lab.nets import build
from refusals import assert_refused

LOSS = nn.CrossEntropyLoss()


def images(name: str, samples: int, **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    model = build(name, (3, 16, 16), 10, generator=g, **options)
    return model, torch.randn(samples, 3, 16, 16, generator=g), torch.randint(10, (samples,), generator=g)


def tokens(samples: int, width: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True) if width == 64 else nn.Tanh()
        model = nn.Sequential(nn.Embedding(50, width), layer, nn.Linear(width, 50))
    x = torch.randint(50, (samples, 16), generator=torch.Generator().manual_seed(0))
    return model, x, x.roll(-1, 1)


def flat_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return (
        nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        .reshape(target.shape)
        .sum(1)
    )


CASES: dict[str, Any] = {
    "mlp": (lambda: images("mlp", 512, hidden=(900, 64)), LOSS, 64, {}),
    "mlp, one batch": (lambda: images("mlp", 512), LOSS, 512, {}),
    "cnn": (lambda: images("cnn", 64), LOSS, 16, {}),
    "transformer": (lambda: tokens(64), flat_cross_entropy, 16, {"reduction": "none"}),
    "wide embedding": (lambda: tokens(64, 600), flat_cross_entropy, 16, {"reduction": "none"}),
    "large layer": (lambda: images("mlp", 64, hidden=(700, 700)), LOSS, 32, {"memory": 2**21}),
}


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_near_the_measurement(name: str) -> None:
    make, loss, batch, options = CASES[name]
    model, x, y = make()
    loader = (x, y) if batch == len(x) else torch.utils.data.DataLoader(list(zip(x, y, strict=True)), batch_size=batch)
    costs = gs.estimate(model, loader, loss, **options)
    with LiveBytes() as live:
        table = gs.measure(model, loader, loss, progress=False, **options)
    start = time.perf_counter()
    gs.measure(model, loader, loss, progress=False, **options)
    seconds = time.perf_counter() - start
    assert list(costs.rows) == ["collecting", *table.columns]
    assert (costs.samples, costs.batch) == (len(x), batch)
    assert live.peak / 2 < costs.total.bytes < 2 * live.peak
    assert seconds / 10 < costs.total.seconds < 10 * seconds  # a factor of two on a quiet machine
    assert json.loads(json.dumps(costs.to_dict()))["total"]["bytes"] == costs.total.bytes
    assert str(costs).splitlines()[-1].startswith("total")


def test_the_number_of_samples() -> None:
    model, x, y = images("mlp", 32)
    assert_refused("pass samples=", gs.estimate, model, iter([(x, y)]), LOSS)
    few, many = (gs.estimate(model, iter([(x, y)]), LOSS, samples=n, measures=["gradient_norm"]) for n in (32, 3200))
    assert many.total.seconds > 5 * few.total.seconds
    assert_refused("no measure 'size'", gs.estimate, model, (x, y), LOSS, measures="size")


def test_symmetric_sums_count_once() -> None:
    g = torch.Generator().manual_seed(0)
    model = build("mlp", (400,), 10, generator=g, hidden=(500, 500))
    data = (torch.randn(600, 400, generator=g), torch.randint(10, (600,), generator=g))
    with LiveBytes() as live:
        statistics = gs.collect(model, data, LOSS, jacobians=True, gram=True, snapshot=False, progress=False)
        del data
    whole = sum(map(square_bytes, statistics))
    assert sum(map(kept_bytes, statistics)) == pytest.approx(live.now, rel=0.01)
    assert live.now < 0.75 * whole
