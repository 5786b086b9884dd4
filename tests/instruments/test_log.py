"""A monitor's log: TensorBoard files are read back and compared with what gs.measure and plain formulas give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import train


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    x = torch.rand(30, 1, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, (x.flatten(1)[:, :10].sum(1) > 5).long()


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) / 4)
    return net


def test_tensorboard_file_holds_what_measure_gives(tmp_path: Path, images: tuple[Tensor, Tensor]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    x, y = images
    net, measures = make_net(), ["nfa", "target_linearity", "effective_rank", "nc1"]
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = gs.Monitor(net, (x, y), nn.CrossEntropyLoss(), measures=measures, every=2, log=writer)
        train(net, x, y, 4, monitor)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "histograms": 0, "scalars": 0}).Reload()
    table = gs.measure(net, (x, y), nn.CrossEntropyLoss(), measures=measures)
    for layer, row in table.rows.items():
        for name, value in row.items():
            logged = events.Scalars(f"gramscope/{name}/{layer}")
            assert [event.step for event in logged] == [0, 2, 4]
            assert logged[-1].value == pytest.approx(value, rel=1e-6)
    for name in ("accuracy", "loss"):
        assert events.Scalars(f"gramscope/{name}")[-1].value == pytest.approx(table.network[name], rel=1e-6)


def test_a_writer_of_scalars_alone_gets_scalars(images: tuple[Tensor, Tensor]) -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: dict[str, float] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.found[tag] = scalar_value

    writer = Writer()
    monitor = gs.Monitor(make_net(), images, measures=["effective_rank"], log=writer)
    ranks = {
        f"gramscope/effective_rank/{layer}": row["effective_rank"]
        for layer, row in monitor.records[0]["layers"].items()
    }
    assert {name: value for name, value in writer.found.items() if "rank" in name} == ranks
    assert set(writer.found) - set(ranks) <= {"gramscope/accuracy", "gramscope/loss"}  # no more keys by default
