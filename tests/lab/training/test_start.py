"""A command that is wrong destroys nothing and leaves nothing; a resumed run has the data it was begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gramscope.errors import GramscopeError, ResultWarning
from gramscope_lab.data import DataSet
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config_tables import MeasureTable
from gramscope_lab.training.layer_measures import measure_runs
from gramscope_lab.training.train import resume_run, train
from lab.training.helpers import Config, train_until, weights
from refusals import assert_refused


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "mlp", "hidden": [0]}},
        {"data": {"name": "nosuch"}},
        {"data": {"name": "digits", "label_noise": 3.0}},
        {"loss": "cross-entropy", "data": {"name": "swiss-roll"}},
        {"method": {"name": "vcl", "layers": "nosuch*"}},
        {"method": {"name": "vcl", "layers": "nosuch*"}, "seeds": [0, 1], "execution": "processes"},
        {"method": {"name": "vcl", "layers": "nosuch*"}, "seeds": [0, 1], "execution": "vectorised"},
        {"execution": "vectorised", "seeds": [0, 1], "patience": 1, "data": {"name": "digits", "validation": 0.1}},
    ],
)
def test_a_wrong_command_destroys_nothing_and_leaves_nothing(
    tmp_path: Path, config: Config, changes: dict[str, Any]
) -> None:
    small = {"name": "digits", "samples": 32, "test_samples": 10}
    train(config(data=small, epochs=1), tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    wrong = config(**changes)
    with pytest.raises(GramscopeError):
        train(wrong, tmp_path / "old", force=True)
    assert {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()} == before
    with pytest.raises(GramscopeError):
        train(wrong, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    train(config(data=small, epochs=1), tmp_path / "new")


def save(path: Path, n: int, seed: int = 0) -> None:
    source = np.random.default_rng(seed)
    x, y = source.normal(size=(n, 4)), np.arange(n) % 2
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)


def test_a_relative_file_is_found_from_everywhere(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "x.npz", 40)
    settings = config(data={"name": "x.npz"})
    whole = train(settings)
    train_until(4, settings, tmp_path / "run")
    (tmp_path / "other").mkdir()
    save(tmp_path / "other" / "x.npz", 40, seed=1)
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(weights(resume_run(tmp_path / "run")), weights(whole))
    table = MeasureTable(samples=20, names=("weight_norm",))
    assert len(list(measure_runs(tmp_path / "run", table, device="cpu"))) == 1
    assert_refused("another configuration", train, settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize(("rows", "seed"), [(48, 0), (40, 1)])
def test_other_data_are_noticed(tmp_path: Path, config: Config, rows: int, seed: int) -> None:
    save(tmp_path / "x.npz", 40)
    settings = config(data={"name": str(tmp_path / "x.npz")}, seeds=[0, 1])
    train_until(4, settings, tmp_path / "run")
    save(tmp_path / "x.npz", rows, seed)
    both = rf"begun with other data: x \(x_train float32 \[40, 4\].* then, x \(x_train float32 \[{rows}, 4\].* now"
    assert_refused(both, resume_run, tmp_path / "run")
    save(tmp_path / "x.npz", 40)
    assert torch.equal(weights(resume_run(tmp_path / "run")), weights(train(settings)))


def test_a_run_without_a_fingerprint_goes_on(tmp_path: Path, config: Config, blobs: DataSet) -> None:
    train_until(4, config(), tmp_path / "run", data=blobs)
    run = RunDirectory.open(tmp_path / "run")
    run.write_environment({key: value for key, value in run.environment.items() if key != "data"})
    resumed = train(config(), tmp_path / "run", data=blobs, resume=True)
    assert torch.equal(weights(resumed), weights(train(config(), data=blobs)))
    assert len(run.environment["data"]) == 1


@pytest.mark.parametrize("data", [7, True, "x", {}, ["x"], [None], [[1]]])
def test_what_is_no_fingerprint_is_refused(tmp_path: Path, config: Config, blobs: DataSet, data: object) -> None:
    train_until(2, config(), tmp_path / "run", data=blobs)
    run = RunDirectory.open(tmp_path / "run")
    run.write_environment({**run.environment, "data": data})
    assert_refused("not fingerprints", train, config(), tmp_path / "run", data=blobs, resume=True)


def test_data_drawn_anew_on_another_machine_are_announced(tmp_path: Path, config: Config) -> None:
    settings = config(data={"name": "gaussian", "n_train": 40, "n_test": 10})
    train_until(2, settings, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    (found,) = run.environment["data"]
    run.write_environment({**run.environment, "data": [{**found, "digest": "sha256:other"}]})
    assert_refused("other data", resume_run, tmp_path / "run")
    run.write_environment({**run.environment, "torch": "1.0"})
    with pytest.warns(ResultWarning, match="drawn anew"), pytest.warns(ResultWarning, match="torch: 1.0 then"):
        resume_run(tmp_path / "run")
