"""A configuration in a file runs no code unless the user says so."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
import torch
from torch import nn

from gramscope.errors import InputError
from gramscope_lab.cli.flags import read_config
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import MeasureTable, TrainConfig
from gramscope_lab.training.layer_measures import load_weights, measure_runs
from gramscope_lab.training.train import resume_run, train

TABLE = MeasureTable(samples=5, names=("weight_norm",))
MODULE = """
import pathlib
from torch import nn
pathlib.Path("imported").touch()
def build(width=2): return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module ``own_net``, which leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    return tmp_path


LAZY = """
from torch import nn
def build():
    import own_layers
    return own_layers.net()
"""


def configuration(name: str = "own_net:build") -> dict[str, object]:
    return {
        "epochs": 0, "device": "cpu", "data": {"name": "digits", "samples": 20, "test_samples": 5},
        "model": {"name": name}, "method": {"name": "sgd"},
    }  # fmt: skip


@pytest.mark.parametrize("place", ["model", "sweep"])
def test_nothing_named_in_a_file_is_imported(foreign: Path, place: str) -> None:
    tree = configuration() if place == "model" else {**configuration("mlp"), "sweep": {"model.name": ["own_net:build"]}}
    (foreign / "a.toml").write_text(tomli_w.dumps(tree))
    run = RunDirectory.create(foreign / "run", tree)
    run.save_checkpoint(0, {}, {})
    refused: list[Callable[[], object]] = [
        lambda: TrainConfig.from_toml(foreign / "a.toml"),
        lambda: read_config(foreign / "a.toml", {}),
        lambda: resume_run(run.path),
        lambda: list(measure_runs(run.path, TABLE, device="cpu")),
    ]
    for action in refused:
        with pytest.raises(InputError, match=r"names the function 'own_net:build'.*--trust.*--model own_net:build"):
            action()
    assert not (foreign / "imported").exists()


def test_a_function_named_on_the_command_line_or_trusted_is_used(foreign: Path) -> None:
    (foreign / "a.toml").write_text(tomli_w.dumps(configuration()))
    named = read_config(foreign / "a.toml", {"model": "own_net:build"})
    trusted = read_config(foreign / "a.toml", {}, trust=True)
    assert named == trusted == TrainConfig.from_toml(foreign / "a.toml", trust=True)
    assert train(named, foreign / "run").members["seed-0"].last("test_loss") is not None
    resume_run(foreign / "run", trust=True)
    assert len(list(measure_runs(foreign / "run", TABLE, device="cpu", trust=True))) == 1


def test_a_factory_may_import_when_it_is_called(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (foreign / "own_net.py").write_text(LAZY)
    (foreign / "own_layers.py").write_text(MODULE.replace("build(width=2)", "net(width=2)"))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(foreign))])
    monkeypatch.delitem(sys.modules, "own_layers", raising=False)
    assert train(TrainConfig.from_dict(configuration())).members["seed-0"].last("test_loss") is not None


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    """A file of a megabyte could unpack to more than the memory."""
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    load_weights(nn.Linear(3, 2), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(InputError, match=r"packed.pt has compressed entries \(plain/"):
        load_weights(model, tmp_path / "packed.pt")


def test_an_error_inside_a_factory_is_its_own(foreign: Path) -> None:
    (foreign / "failing_net.py").write_text("def build(width=2):\n    return 'a' + width\n")
    with pytest.raises(TypeError, match="concatenate"):
        train(TrainConfig.from_dict(configuration("failing_net:build")))
