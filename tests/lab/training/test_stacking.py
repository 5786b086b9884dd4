"""Many runs at once give what they give one by one."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.data import DataSet
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import Job, prepare
from gramscope_lab.training.stacking import StackedEngine, stack_obstacle
from gramscope_lab.training.train import Trained, train
from lab.training.helpers import DEVICES, Config, Notes, train_until, weights, without_time

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam": {"name": "adam", "weight_decay": 0.01},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "whiten-sgd": {"name": "whiten-sgd", "momentum": 0.9},
    "whiten-adamw": {"name": "whiten-adamw", "whiten_readout": False},
    "gram-fixed-sgd": {"name": "gram-fixed-sgd", "layers": "hidden*"},
}


def compare(one: Trained, other: Trained, tolerance: float = 2e-4) -> None:
    assert list(one.members) == list(other.members)
    for name, member in one.members.items():
        for (key, p), q in zip(member.model.named_parameters(), other.members[name].model.parameters(), strict=True):
            difference = float((p - q).detach().abs().max())
            assert difference <= tolerance * max(1.0, float(q.detach().abs().max())), (name, key, difference)
        for a, b in zip(member.records, other.members[name].records, strict=True):
            assert a.keys() == b.keys()
            assert a["step"] == b["step"]
            if a["kind"] == "evaluation":
                assert a["test_loss"] == pytest.approx(b["test_loss"], rel=1e-3)
                if a["step"]:
                    assert a["batch_loss"] == pytest.approx(b["batch_loss"], rel=1e-3)


def stacked_and_alone(settings: TrainConfig, data: DataSet | None = None) -> tuple[Trained, Trained]:
    made = [train(settings, data=data, parallel=way) for way in ("stack", "1")]
    assert [trained.execution for trained in made] == ["stack", "one-by-one"]
    return made[0], made[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_stack_equals_one_by_one(config: Config, blobs: DataSet, name: str, device: str) -> None:
    schedule = {"name": "linear", "warm_up": 1}
    settings = config(METHODS[name], seeds=[0, 4], sweep={"lr": [0.05, 0.01]}, schedule=schedule, device=device)
    tolerance = 5e-3 if device == "cuda" else 2e-4
    compare(*stacked_and_alone(settings, blobs), tolerance)


@pytest.mark.parametrize("method", ["adamw", "whiten-sgd"])
def test_stack_of_convolutions_with_validation_and_full_batch(config: Config, method: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(48, 3, 8, 8, generator=g), torch.randint(4, (48,), generator=g)
    data = DataSet("images", x[:36], y[:36], x[36:], y[36:], classes=4).split_validation(0.25)
    settings = config(
        method, model={"name": "cnn", "channels": [4, 4, 4]}, seeds=[1, 2], batch_size=0, epochs=4, reduction="sum"
    )
    stacked, alone = stacked_and_alone(settings, data)
    compare(stacked, alone)
    assert "validation_accuracy" in stacked.records[0]


def test_stack_over_data_and_initial_scale(config: Config) -> None:
    """Members may differ in data of one shape and in initial weights."""
    settings = config(
        data={"name": "gaussian", "n_train": 40, "n_test": 10, "d": 6},
        sweep={"data.seed": [0, 1], "model.init_scale": [0.5, 2.0]},
    )
    stacked, alone = stacked_and_alone(settings)
    compare(stacked, alone)
    found = {
        (r["data_seed"], r["model_init_scale"]): r["test_loss"] for r in stacked.records if r["kind"] == "evaluation"
    }
    assert set(found) == {(0, 0.5), (0, 2.0), (1, 0.5), (1, 2.0)}
    assert len(set(found.values())) == 4


def test_members_with_the_same_data_share_them(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four members on two data sets hold two sets; on one, that one, uncopied."""
    held: list[torch.Tensor] = []
    make = StackedEngine.__init__

    def watched(engine: StackedEngine, jobs: list[Job]) -> None:
        make(engine, jobs)
        held.append(engine._x)
        assert held[-1].dim() == 3 or held[-1] is jobs[0].data.x_train

    monkeypatch.setattr(StackedEngine, "__init__", watched)
    data = {"name": "gaussian", "n_train": 40, "n_test": 10, "d": 6}
    for sweep, shape in (({"data.seed": [0, 1], "lr": [0.1, 0.2]}, (2, 40, 6)), ({"lr": [0.1, 0.2]}, (40, 6))):
        train(config(data=data, sweep=sweep), parallel="stack")
        assert held[-1].shape == shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["momentum", "adamw", "whiten-sgd"])
def test_stacked_run_resumes_bit_identically(
    tmp_path: Path, config: Config, blobs: DataSet, method: str, device: str
) -> None:
    every = {"checkpoint_every": 0.4, "device": device}
    settings = config(METHODS[method], seeds=[0, 1, 2], **every)
    whole = train(settings, data=blobs, parallel="stack")
    train_until(8, settings, tmp_path / "run", data=blobs, parallel="stack")
    group = RunDirectory.open(tmp_path / "run")
    assert group.status() == "stopped"
    # a kill while checkpoints were being written: one member lacks the newest
    (tmp_path / "run" / "seed-1" / "checkpoints" / "step-000000008.safetensors").unlink()
    resumed = train(settings, tmp_path / "run", data=blobs, resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert without_time(resumed.records) == without_time(whole.records)
    assert without_time(group.records()) == without_time(whole.records)


@pytest.mark.parametrize("method", ["sgd", "whiten-sgd"])
def test_a_stack_that_diverges_in_one_member_goes_on(
    tmp_path: Path, config: Config, blobs: DataSet, method: str
) -> None:
    settings = config(method, sweep={"lr": [0.05, 1e30]})
    trained = train(settings, tmp_path / "run", data=blobs, parallel="stack")
    good, bad = trained.members.values()
    assert good.last("test_loss") > 0
    assert not bad.last("test_loss") < float("inf")
    assert RunDirectory.open(tmp_path / "run").records("evaluation")[-1]["test_loss"] is None


class Doubled(nn.Sequential):
    """A net whose forward depends on something that is no weight."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(6), "BatchNorm1d keeps running statistics"),
        (nn.Dropout(0.1), "vmap cannot run Sequential .it draws random numbers."),
        (nn.Dropout(0.0), ""),
    ],
)
def test_what_cannot_be_stacked_is_said(config: Config, blobs: DataSet, layer: nn.Module, reason: str) -> None:
    def net(member: TrainConfig, data: DataSet) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), copy.deepcopy(layer), nn.Linear(6, 3))

    reporter = Notes()
    trained = train(config(seeds=[0, 1], epochs=1), data=blobs, model=net, reporter=reporter)
    if reason:
        assert trained.execution == "one-by-one"
        assert re.match(f"2 runs one after another, because {reason}", reporter.notes[0])
        with pytest.raises(InputError, match=f"--parallel stack: {reason}"):
            train(config(seeds=[0, 1]), data=blobs, model=net, parallel="stack")
    else:
        assert trained.execution == "stack"
        assert reporter.notes == ["2 runs in one vectorised step"]


def test_nets_that_differ_beyond_their_weights_are_noticed(config: Config, blobs: DataSet) -> None:
    jobs = []
    for seed, factor in ((0, 1.0), (1, 2.0)):
        net = Doubled(nn.Linear(8, 3))
        net.factor = factor
        jobs.append(prepare(config(seeds=[seed]), data=blobs, model=lambda *_, net=net: net))
    assert "differ in more than their weights" in stack_obstacle(jobs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sweep": {"model.hidden": [[4], [5]]}}, "their nets differ"),
        ({"sweep": {"data.n_train": [30, 40]}}, "their numbers of steps or losses differ"),
        ({"clip": 1.0, "seeds": [0, 1]}, "each run's gradient is clipped on its own"),
        ({"method": "muon", "seeds": [0, 1]}, "muon has no vectorised form"),
        ({"method": "vcl", "seeds": [0, 1]}, "vcl has no vectorised form"),
    ],
)
def test_other_obstacles(config: Config, changes: dict[str, Any], reason: str) -> None:
    settings = config(**{"data": {"name": "gaussian", "n_train": 30}, **changes})
    assert reason in stack_obstacle([prepare(member) for member in settings.members().values()])


def test_large_nets_are_not_stacked_on_a_cpu(config: Config, blobs: DataSet) -> None:
    settings = config(seeds=[0, 1], model={"name": "mlp", "hidden": [800, 800]}, epochs=0)
    reporter = Notes()
    assert train(settings, data=blobs, reporter=reporter).execution == "one-by-one"
    assert "a stacked step of nets this large is slower" in reporter.notes[0]
