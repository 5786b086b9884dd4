"""The loop: determinism, resuming, early ends, what is recorded."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import GramscopeError, LayerError, ResultWarning
from gramscope_lab.data import DataSet
from gramscope_lab.data.dataset import generator
from gramscope_lab.nets import build
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layer_snapshots import load_diagonals, load_spectra, snapshot_steps
from gramscope_lab.training import trainer
from gramscope_lab.training.config import MeasureTable, TrainConfig
from gramscope_lab.training.job import prepare
from gramscope_lab.training.layer_measures import WHILE_TRAINING, measure_runs
from gramscope_lab.training.random_state import epoch_order
from gramscope_lab.training.train import resume_run, train
from gramscope_lab.training.trainer import Trainer
from lab.training.helpers import DEVICES, Config, train_until, weights, without_time
from refusals import assert_refused

METHODS: list[str | dict[str, Any]] = [
    {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam",
    "adamw",
    "muon",
    {"name": "whiten-sgd", "momentum": 0.9},
    "whiten-adamw",
    "vcl",
    {"name": "vcl", "readout": "adamw", "readout_lr": 0.01, "warm_up_epochs": 1.0},
    {"name": "vcl", "solver": "exact", "gamma": 0.1},
    "free-muon",
]


def test_training_learns_and_records(config: Config, blobs: DataSet) -> None:
    trained = train(config({"name": "adam", "lr": 0.02}, epochs=20, evaluate_train=True), data=blobs)
    member = trained.members["seed-0"]
    assert member.last("test_accuracy") > 0.8
    evaluations = [record for record in member.records if record["kind"] == "evaluation"]
    assert [record["epoch"] for record in evaluations] == list(range(21))
    assert evaluations[0]["batch_loss"] is None
    assert evaluations[-1]["train_loss"] < evaluations[1]["train_loss"]
    with torch.no_grad():
        hits = member.model(blobs.x_test).argmax(1) == blobs.y_test
    assert member.last("test_accuracy") == pytest.approx(float(hits.float().mean()))
    assert member.records[-1] | {"finished": True, "reason": ""} == member.records[-1]


@pytest.mark.parametrize("seed", [0, 1])
def test_one_epoch_of_sgd_is_what_it_should_be(config: Config, blobs: DataSet, seed: int) -> None:
    """Against a loop written out by hand."""
    trained = train(config({"name": "sgd", "lr": 0.3}, epochs=1, seeds=[seed]), data=blobs)
    model = build("mlp", (8,), 3, generator=generator(seed, "weights"), hidden=(6, 5))
    order = epoch_order(seed, 0, 70)
    assert [len(part) for part in order.split(16)] == [16, 16, 16, 16, 6]
    for part in order.split(16):
        model.zero_grad()
        nn.functional.cross_entropy(model(blobs.x_train[part]), blobs.y_train[part]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(trained), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "make"), [("free-muon", gs.FreeMuon), ("vcl", gs.VCL)])
def test_our_optimizers_are_those_of_the_library(config: Config, blobs: DataSet, method: str, make: Any) -> None:
    trained = train(config(method, epochs=1), data=blobs)
    model = build("mlp", (8,), 3, generator=generator(0, "weights"), hidden=(6, 5))
    optimizer = make(model)
    for part in epoch_order(0, 0, 70).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(blobs.x_train[part]), blobs.y_train[part]).backward()
        optimizer.step()
    torch.testing.assert_close(weights(trained), torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [1, 4, 7, 13])
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_and_resumed_is_bit_identical(
    tmp_path: Path, config: Config, blobs: DataSet, method: Any, step: int, device: str
) -> None:
    before = torch.get_rng_state()
    every = {"evaluate_every": 0.4, "checkpoint_every": 0.6, "device": device}
    settings = config(method, schedule={"name": "cosine", "warm_up": 1}, **every)
    whole = train(settings, data=blobs)
    train_until(step, settings, tmp_path / "run", data=blobs)
    assert RunDirectory.open(tmp_path / "run").status() == "stopped"
    resumed = train(settings, tmp_path / "run", data=blobs, resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert without_time(resumed.records) == without_time(whole.records)
    run = RunDirectory.open(tmp_path / "run")
    assert without_time(run.records()) == without_time(list(whole.members["seed-0"].records))
    assert run.status() == "finished"
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_uses_a_private_state_that_is_resumed(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    def net(member: TrainConfig, data: DataSet) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))

    state = torch.get_rng_state()
    settings = config(checkpoint_every=0.5)
    whole = train(settings, data=blobs, model=net)
    torch.set_rng_state(state)
    train_until(4, settings, tmp_path / "run", data=blobs, model=net)
    torch.set_rng_state(state)
    resumed = train(settings, tmp_path / "run", data=blobs, model=net, resume=True)
    assert torch.equal(weights(resumed), weights(whole))


def test_killed_between_record_and_checkpoint(
    tmp_path: Path, config: Config, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(evaluate_every=0.2, checkpoint_every=1.0)
    whole = train(settings, data=blobs)

    class Killed(BaseException):
        pass

    save, calls = Trainer._save, []

    def dies(self: Trainer) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise Killed
        save(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", dies)
        with pytest.raises(Killed):
            train(settings, tmp_path / "run", data=blobs)
    run = RunDirectory.open(tmp_path / "run")
    assert run.checkpoint_steps() == [5]
    assert run.records()[-1]["step"] == 10
    resumed = train(settings, tmp_path / "run", data=blobs, resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert without_time(run.records()) == without_time(list(whole.members["seed-0"].records))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_command_resumes_bit_identically(tmp_path: Path, config: Config) -> None:
    settings = config("adamw", seeds=[0, 1], epochs=12, checkpoint_every=0.6)
    whole, killed = train(settings, tmp_path / "whole", parallel="stack"), tmp_path / "killed"
    command = [sys.executable, "-m", "gramscope_lab", "train"]
    (tmp_path / "c.toml").write_text(settings.to_toml())
    for arguments in ([str(tmp_path / "c.toml"), "--out", str(killed)], ["--resume", str(killed)]):
        before = set(killed.glob("seed-1/checkpoints/step-*"))
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and set(killed.glob("seed-1/checkpoints/step-*")) <= before:
            time.sleep(0.01)
        process.kill()
        process.wait()
    resumed = resume_run(killed)
    assert torch.equal(weights(resumed), weights(whole))
    assert without_time(resumed.records) == without_time(whole.records)


def test_resuming_a_finished_run(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    """It changes nothing, warns where the machine differs, and needs the same configuration."""
    out = tmp_path / "run"
    first = train(config(), out, data=blobs)
    content = (out / "records.jsonl").read_bytes()
    again = train(config(), out, data=blobs, resume=True)
    assert torch.equal(weights(first), weights(again))
    assert (out / "records.jsonl").read_bytes() == content
    run = RunDirectory.open(out)
    run.write_environment({**run.environment, "torch": "1.0"})
    with pytest.warns(ResultWarning, match="torch: 1.0 then"):
        train(config(), out, data=blobs, resume=True)
    assert_refused("another configuration", train, config(epochs=9), out, data=blobs, resume=True)
    assert_refused("already holds a run", train, config(), out, data=blobs)
    train(config(epochs=1), out, data=blobs, force=True)


@pytest.mark.parametrize(
    ("changes", "seconds", "kept"),
    [
        ({"keep": 2, "checkpoint_every": 0.2}, 1e9, [14, 15]),
        ({"keep": 0, "checkpoint_every": 0.2}, 1e9, list(range(1, 16))),
        ({"checkpoint_every": 0}, 1e9, [15]),
        ({"keep": 0, "checkpoint_every": 0}, 0.0, list(range(1, 16))),  # by time
        ({"epochs": 0}, 1e9, [0]),  # the initial net
    ],
)
def test_the_newest_checkpoints_are_kept(
    tmp_path: Path, config: Config, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, changes: Any, seconds: float,
    kept: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr("gramscope_lab.training.trainer.CHECKPOINT_SECONDS", seconds)
    trained = train(config(**changes), tmp_path / "run", data=blobs)
    assert trained.members["seed-0"].last("step") == kept[-1]
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == kept


def test_divergence_ends_a_run_and_says_so(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    trained = train(config({"name": "sgd", "lr": 1e30}), tmp_path / "run", data=blobs)
    end = trained.members["seed-0"].records[-1]
    assert end["reason"].startswith("diverged")
    assert RunDirectory.open(tmp_path / "run").status() == "finished"


def test_measurements_are_recorded_at_their_cadence(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    def measure(model: nn.Module, job: Any, step: int) -> list[dict[str, Any]]:
        return [
            {"layer": name, "norm": float(p.detach().norm())} for name, p in model.named_parameters() if p.dim() == 2
        ]

    trained = train(config(measure={"every": 1.5}), tmp_path / "run", data=blobs, measure=measure)
    records = RunDirectory.open(tmp_path / "run").records("measurement")
    assert [r["step"] for r in records if r["layer"] == "readout.weight"] == [0, 8, 15]
    final = trained.members["seed-0"].model.get_parameter("readout.weight")
    assert records[-1]["norm"] == pytest.approx(float(final.detach().norm()))


def test_layers_are_measured_at_the_start_and_the_end_by_default(
    tmp_path: Path, config: Config, blobs: DataSet
) -> None:
    trained = train(config(measure={}, epochs=3), tmp_path / "run", data=blobs)
    records = RunDirectory.open(tmp_path / "run").records("measurement")
    assert [record["step"] for record in records if record["layer"] == "readout"] == [0, trained.records[-1]["step"]]
    assert set(WHILE_TRAINING) <= set(records[-1])
    assert train(config(measure={"samples": 0}), data=blobs).records[-1]["kind"] == "end"


class Unmeasurable(nn.Module):
    """A net without a layer that can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * self.scale


def test_nets_without_layers_train_unless_a_measurement_is_asked_for(config: Config, blobs: DataSet) -> None:
    with pytest.warns(ResultWarning, match="layers are not measured: "):
        train(config(measure={}), data=blobs, model=lambda config, data: Unmeasurable())
    with pytest.raises(LayerError):
        train(config(measure={"every": 1}), data=blobs, model=lambda config, data: Unmeasurable())


def test_full_batch_and_regression(config: Config) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=g)
    data = DataSet("line", x[:30], x[:30, :1], x[30:], x[30:, :1])
    settings = config({"name": "sgd", "lr": 0.1}, batch_size=0, epochs=200, loss="half-squared", dtype="float64")
    trained = train(settings, data=data)
    member = trained.members["seed-0"]
    assert member.last("step") == 200
    assert member.last("test_accuracy") is None
    assert member.last("batch_loss") < 0.05
    assert next(member.model.parameters()).dtype == torch.float64
    assert_refused("the data's task is regression", train, config(loss="cross-entropy"), data=data)


def test_kept_matrices_follow_the_gram(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    """For small full-batch gradient descent the summed virtual shifts are the change of the Gram, to second order."""
    measure = {"every": 10, "matrices": True}
    net = {"name": "mlp", "hidden": [8, 8]}  # the second hidden layer takes as many numbers as an image has pixels
    settings = config({"name": "sgd", "lr": 0.01}, model=net, batch_size=0, epochs=20, dtype="float64", measure=measure)
    trained = train(settings, tmp_path / "run", data=images(blobs))
    run = RunDirectory.open(tmp_path / "run")
    assert snapshot_steps(run, "spectra") == snapshot_steps(run, "diagonals") == [0, 10, 20]
    W = trained.members["seed-0"].model.get_parameter("hidden1.weight").detach()
    assert set(load_diagonals(run, 20)) == {"hidden1"}  # the only layer that sees images
    assert set(load_spectra(run, 20)) == {"hidden1", "hidden2", "readout"}
    first, last = (load_diagonals(run, step)["hidden1"] for step in (0, 20))
    assert last["nfm"].shape == (2, 4)
    torch.testing.assert_close(last["nfm"].flatten(), (W.mT @ W).diagonal().float())
    torch.testing.assert_close(load_spectra(run, 20)["hidden1"], torch.linalg.svdvals(W).float())
    change = last["nfm"] - first["nfm"]
    assert float((last["vcs"] - change).norm()) < 0.02 * float(change.norm())
    assert "vcs" not in first
    records = run.records("measurement")
    assert {record["layer"] for record in records} == {"hidden1", "hidden2", "readout"}
    assert records[-1]["weight_norm"] == pytest.approx(
        float(trained.members["seed-0"].model.get_parameter("readout.weight").detach().norm())
    )


def images(data: DataSet) -> DataSet:
    """The eight inputs as images of 2 × 4."""
    return replace(data, x_train=data.x_train.reshape(-1, 1, 2, 4), x_test=data.x_test.reshape(-1, 1, 2, 4))


def test_watched_shifts_are_resumed(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    settings = config("adamw", measure={"every": 1, "matrices": True}, checkpoint_every=0.5)
    blobs = images(blobs)
    train(settings, tmp_path / "whole", data=blobs)
    train_until(7, settings, tmp_path / "run", data=blobs)
    train(settings, tmp_path / "run", data=blobs, resume=True)
    for name in RunDirectory(tmp_path / "whole").artefacts():
        expected, found = (RunDirectory(tmp_path / run).load_artefact(name) for run in ("whole", "run"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    whole, run = (RunDirectory(tmp_path / name).records() for name in ("whole", "run"))
    assert without_time(whole) == without_time(run)


def test_the_machine_is_left_as_it_was(config: Config, blobs: DataSet) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        measure = lambda model, job, step: seen.append(torch.get_num_threads()) or []  # noqa: E731
        train(config(epochs=1, measure={"every": 1}), data=blobs, measure=measure)
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


def test_the_gradient_is_clipped(config: Config, blobs: DataSet) -> None:
    settings = config({"name": "sgd", "lr": 1.0}, epochs=1, batch_size=0, clip=1e-3)
    before = torch.cat([p.detach().flatten() for p in prepare(settings, data=blobs).model.parameters()])
    moved = weights(train(settings, data=blobs)) - before
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_the_stopwatch_leaves_out_what_happens_while_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watch = trainer.Stopwatch(torch.device("cpu"), 5.0)
    now[0] += 2
    with watch.paused():
        now[0] += 40
        assert watch.seconds == 7.0
    now[0] += 1
    assert watch.seconds == 8.0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "mlp", "hidden": [0]}},
        {"data": {"name": "nosuch"}},
        {"data": {"name": "digits", "label_noise": 3.0}},
        {"loss": "cross-entropy", "data": {"name": "swiss-roll"}},
        {"method": {"name": "vcl", "layers": "nosuch*"}},
        {"method": {"name": "vcl"}, "sweep": {"layers": ["hidden*", "nosuch*"]}},
        {"method": {"name": "vcl", "layers": "nosuch*"}, "seeds": [0, 1], "parallel": "2"},
        {"method": {"name": "vcl", "layers": "nosuch*"}, "seeds": [0, 1], "parallel": "stack"},
        {"parallel": "stack", "seeds": [0, 1], "clip": 1.0},
    ],
)
def test_a_wrong_command_destroys_nothing_and_leaves_nothing(
    tmp_path: Path, config: Config, changes: dict[str, Any]
) -> None:
    small = {"name": "digits", "samples": 32, "test_samples": 10}
    train(config(data=small, epochs=1), tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    parallel = changes.get("parallel", "auto")
    wrong = config(**{key: value for key, value in changes.items() if key != "parallel"})
    with pytest.raises(GramscopeError):
        train(wrong, tmp_path / "old", force=True, parallel=parallel)
    assert {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()} == before
    with pytest.raises(GramscopeError):
        train(wrong, tmp_path / "new", parallel=parallel)
    assert not (tmp_path / "new").exists()
    train(config(data=small, epochs=1), tmp_path / "new")


def test_a_relative_file_is_found_from_everywhere(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = config(data={"name": "x.npz"})
    whole = train(settings)
    train_until(4, settings, tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(weights(resume_run(tmp_path / "run")), weights(whole))
    table = MeasureTable(samples=20, names=("weight_norm",))
    assert len(list(measure_runs(tmp_path / "run", table, device="cpu"))) == 1
    assert_refused("another configuration", train, settings, tmp_path / "run", resume=True)
