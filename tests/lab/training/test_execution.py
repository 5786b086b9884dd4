"""Which runs share a step, which get processes, and what the user is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.data import DataSet
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.execution import choose_execution
from gramscope_lab.training.job import prepare
from gramscope_lab.training.train import train
from lab.training.helpers import Config, Notes


class Doubled(nn.Sequential):
    """A net whose forward depends on something that is no weight."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(6), "BatchNorm1d keeps running statistics"),
        (nn.Dropout(0.1), "Dropout draws random numbers"),
        (nn.Dropout(0.0), ""),
    ],
)
def test_what_cannot_be_stacked_is_said(config: Config, blobs: DataSet, layer: nn.Module, reason: str) -> None:
    def net(member: TrainConfig, data: DataSet) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), layer, nn.Linear(6, 3))

    reporter = Notes()
    trained = train(config(seeds=[0, 1], epochs=1), data=blobs, model=net, reporter=reporter)
    if reason:
        assert trained.execution == "one-by-one"
        assert reporter.notes[0] == f"2 runs one after another, because {reason}"
        with pytest.raises(InputError, match=f"execution = 'vectorised': {reason}"):
            train(config(seeds=[0, 1], execution="vectorised"), data=blobs, model=net)
    else:
        assert trained.execution == "vectorised"
        assert reporter.notes == ["2 runs in one vectorised step"]


def test_nets_that_differ_beyond_their_weights_are_noticed(config: Config, blobs: DataSet) -> None:
    jobs = []
    for seed, factor in ((0, 1.0), (1, 2.0)):
        net = Doubled(nn.Linear(8, 3))
        net.factor = factor
        jobs.append(prepare(config(seeds=[seed]), data=blobs, model=net))
    execution, reason = choose_execution(jobs, "auto", portable=False)
    assert execution == "one-by-one"
    assert "differ in more than their weights" in reason


MOMENTUM = {"name": "sgd", "momentum": 0.5}
VALIDATED = {"name": "gaussian", "validation": 0.5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sweep": {"model.hidden": [[4], [5]]}}, "their nets differ in shape"),
        ({"sweep": {"nesterov": [True, False]}, "method": MOMENTUM}, "method.nesterov differs between them"),
        ({"sweep": {"data.n_train": [30, 40]}}, "their numbers of steps or losses differ"),
        ({"patience": 1, "seeds": [0, 1], "data": VALIDATED}, "each run may stop early on its own"),
    ],
)
def test_other_obstacles(config: Config, changes: dict[str, Any], reason: str) -> None:
    settings = config(**{"data": {"name": "gaussian", "n_train": 30}, **changes})
    jobs = [prepare(member, name) for name, member in settings.members().items()]
    assert choose_execution(jobs, "auto", portable=True) == (
        "one-by-one",
        f"{len(jobs)} runs one after another, because {reason}",
    )
    jobs = [replace(job, config=replace(job.config, epochs=1e6)) for job in jobs]  # worth starting processes
    execution, text = choose_execution(jobs, "auto", portable=True)
    assert execution == "processes"
    assert reason in text


def test_large_nets_are_not_stacked_on_a_cpu(config: Config, blobs: DataSet) -> None:
    settings = config(seeds=[0, 1], model={"name": "mlp", "hidden": [800, 800]}, batch_size=64)
    jobs = [prepare(member, name, data=blobs) for name, member in settings.members().items()]
    assert "a stacked step of nets this large is slower" in choose_execution(jobs, "auto", portable=True)[1]
    assert choose_execution(jobs, "vectorised", portable=True)[0] == "vectorised"
