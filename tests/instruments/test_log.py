"""A monitor's log: TensorBoard files are read back and compared with what gs.measure and plain formulas give."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import gramscope as gs
from cases import train
from gramscope.instruments.log import as_picture, input_diagonals, layer_spectra


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

    weights = {"1": net[1].weight.detach(), "3": net[3].weight.detach()}
    assert set(events.Tags()["histograms"]) == {f"gramscope/singular_values/{layer}" for layer in "13"}
    for layer, W in weights.items():
        values = torch.linalg.svdvals(W)
        last = events.Histograms(f"gramscope/singular_values/{layer}")[-1]
        assert (last.step, last.histogram_value.num) == (4, len(values))
        assert last.histogram_value.max == pytest.approx(float(values.max()))
        assert last.histogram_value.sum_squares == pytest.approx(float(W.square().sum()))

    assert set(events.Tags()["images"]) == {f"gramscope/diagonal_{name}/1" for name in ("nfm", "agop")}
    expected = {"nfm": gs.weight_gram(weights["1"]), "agop": gs.agop(net, x, "1")["1"]}
    for name, matrix in expected.items():
        diagonal = matrix.diagonal()
        last_image = events.Images(f"gramscope/diagonal_{name}/1")[-1]
        pixels = np.asarray(Image.open(io.BytesIO(last_image.encoded_image_string)).convert("L"), dtype=float)
        scaled = (diagonal - diagonal.min()) / (diagonal.max() - diagonal.min())
        assert np.abs(pixels / 255 - scaled.reshape(4, 5).numpy()).max() < 0.005


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


def test_diagonals_only_where_inputs_are_images(images: tuple[Tensor, Tensor]) -> None:
    x, net = images[0], make_net()
    found = input_diagonals(net, x, agop=False)
    assert list(found["1"]) == ["nfm"]
    torch.testing.assert_close(found["1"]["nfm"].flatten(), net[1].weight.square().sum(0).detach())
    assert input_diagonals(net, x.flatten(1)) == {}
    assert input_diagonals(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2)).double(), x) == {}
    assert layer_spectra(net, "3")["3"].shape == (2,)


def test_pictures_lie_between_0_and_1() -> None:
    g = torch.Generator().manual_seed(0)
    assert as_picture(torch.randn(3, 4, 4, generator=g)).shape == (3, 4, 4)
    five = as_picture(torch.randn(5, 4, 4, generator=g))
    assert five.shape == (1, 4, 4)
    assert (float(five.min()), float(five.max())) == (0.0, 1.0)
    assert not as_picture(torch.ones(2, 2)).any()
