from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gramscope_lab.cli.app import app
from gramscope_lab.cli.flags import FLAGS, find_field, parse_seeds, read_config
from gramscope_lab.training.config import TrainConfig
from refusals import assert_refused


def parsed(arguments: list[str]) -> TrainConfig:
    """What the command line itself makes of the arguments."""
    result = CliRunner().invoke(app, ["train", *arguments, "--print-config"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return TrainConfig.from_dict(tomllib.loads(result.stdout))


def test_every_flag_reaches_its_key() -> None:
    kinds = {str: ("x", "x"), int: ("3", 3), float: ("0.5", 0.5)}
    fixed = {"--method": "vcl", "--loss": "mse", "--schedule": "step", "--dtype": "float64", "--hidden": "3,4"}
    for flag, key in FLAGS.items():
        method = {"--lr": "sgd", "--momentum": "sgd", "--weight-decay": "sgd"}.get(flag, "vcl")
        field = find_field(key)
        text, expected = kinds.get(getattr(field, "annotation", str), ("x", "x"))
        config = parsed(["--method", method, flag, fixed.get(flag, text)])
        table, _, name = key.rpartition(".")
        tree = config.to_dict()
        value = (tree[table] if table else tree)[name]
        assert value == ([3, 4] if flag == "--hidden" else fixed.get(flag, expected)), flag


def test_flags_go_on_top_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'epochs = 7\nseeds = [4]\n[data]\nname = "mnist"\n[model]\nname = "cnn"\n[method]\nname = "sgd"\nlr = 3'
    )
    config = parsed([str(path), "--epochs", "2", "--set", "data.seed=5"])
    assert (config.epochs, config.seeds, config.data.name, config.data.seed) == (2.0, (4,), "mnist", 5)
    assert config.method.options["lr"] == 3.0
    other = parsed([str(path), "--method", "vcl"])  # another method: the old one's options do not apply
    assert other.method.options["gamma"] == 1.0


def test_seeds() -> None:
    assert parse_seeds("5") == [0, 1, 2, 3, 4]
    assert parse_seeds("2", 7) == [7, 8]
    assert parse_seeds(None, 7) == [7]
    assert parse_seeds("3,1") == [3, 1]
    for text, seed in (("x", None), ("0", None), ("1,2", 3), ("-1", None)):
        assert_refused("--seeds", parse_seeds, text, seed)


@pytest.mark.parametrize(
    ("flags", "settings_", "sweeps", "message"),
    [
        ({"hidden": "a,b"}, [], [], "--hidden a,b: give whole numbers"),
        ({}, ["nonsense"], [], "--set nonsense: write key=value"),
        ({}, [], ["lr"], "--sweep lr: write key=value, such as lr=0.1,0.01"),
        ({}, ["sweep=3"], ["lr=0.1"], "--set sweep=3: sweep is a table"),
        ({}, ["epochs.x=3"], [], "unknown key|is not a table|must be"),
    ],
)
def test_wrong_use_is_explained(flags: Any, settings_: list[str], sweeps: list[str], message: str) -> None:
    assert_refused(message, read_config, None, flags, settings_, sweeps)


def test_values_are_toml_or_text() -> None:
    config = read_config(None, {}, ["model.activation=relu", "model.bias=false", "model.hidden=[3,4]"], ["lr=0.1,1e-2"])
    assert config.model.options == {"activation": "relu", "bias": False, "hidden": (3, 4)}
    assert config.sweep == {"method.lr": (0.1, 0.01)}
