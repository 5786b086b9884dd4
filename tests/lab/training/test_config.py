from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from gramscope.errors import InputError
from gramscope_lab.training.config import TrainConfig
from lab.training.helpers import configs
from refusals import assert_refused


def tree(**changes: Any) -> dict[str, Any]:
    return {"data": {"name": "digits"}, "model": {"name": "mlp"}, "method": {"name": "sgd"}, **changes}


@given(configs())
def test_toml_round_trip(config: TrainConfig) -> None:
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": -1}, "epochs = -1.0: must be at least 0"),
        ({"epochs": "two"}, "epochs = 'two': must be float"),
        ({"epochs": float("nan")}, "epochs = nan: must be at least 0"),
        ({"batch_size": True}, "batch_size = True: must be int"),
        ({"lr": 0.1}, "lr = 0.1: unknown key; known: data, model, method"),
        ({"method": {"name": "sdg"}}, "method.name = 'sdg': choose one of sgd, adam, adamw, muon, vcl"),
        ({"method": {"name": "sgd", "gamma": 1}}, "method.gamma = 1: sgd has no such option; it has lr, momentum"),
        ({"method": {"name": "sgd", "nesterov": 1}}, "method.nesterov = 1: must be bool"),
        ({"method": {"name": "vcl", "rank": 0}}, "method.rank = 0: must be at least 1"),
        ({"method": {"lr": 1}}, "method.name is missing"),
        ({"method": "sgd"}, "method = 'sgd': must be a table"),
        ({"schedule": {"name": "exponential"}}, "schedule.name = 'exponential': choose one of 'constant', 'linear'"),
        ({"schedule": {"every": 0}}, "schedule.every = 0.0: must be above 0"),
        ({"schedule": {"gamma": 0}}, "schedule.gamma = 0: unknown key"),
        ({"data": {"name": "digits", "validation": 1.5}}, "data.validation = 1.5: must be below 1"),
        ({"seeds": 3}, "seeds = 3: must be a list"),
        ({"seeds": []}, "seeds = "),
        ({"seeds": [0, 0]}, "a seed occurs twice"),
        ({"seeds": [-1]}, "whole numbers from 0"),
        ({"sweep": {"lr": 0.1}}, "sweep.lr = 0.1: must be a list"),
        ({"sweep": {"lr": []}}, "must be a list of values to try"),
        ({"sweep": {"lr": [1, 1.0]}}, "the value 1.0 occurs twice"),
        ({"epochs": float("inf")}, "epochs = inf: must be at most 1e+09"),
        ({"evaluate_every": float("inf")}, "evaluate_every = inf: must be a finite number"),
        ({"method": {"name": "sgd", "lr": float("inf")}}, "method.lr = inf: must be a finite number"),
        ({"sweep": {"epochs": [1, 2]}}, "sweep over an option of the method, model or data"),
        ({"sweep": {"lr": [0.1, -1.0]}}, "method.lr = -1.0: must be at least 0"),
        ({"sweep": {"method.gamma": [1.0]}}, "sgd has no such option"),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig.from_dict(tree(**changes))
    assert message in str(caught.value)


def test_missing_tables() -> None:
    lacking = {"model": {"name": "mlp"}, "method": {"name": "sgd"}}
    assert_refused(r"\[data\] is missing; give at least data.name", TrainConfig.from_dict, lacking)


def test_members_are_every_combination() -> None:
    config = TrainConfig.from_dict(
        tree(seeds=[0, 3], sweep={"lr": [0.1, 0.01], "model.hidden": [[8], [8, 4]]}, method={"name": "sgd", "lr": 9})
    )
    members = config.members()
    assert len(members) == 8
    member = members["lr-0.01,model_hidden-8x4,seed-3"]
    assert (member.method.options["lr"], member.model.options["hidden"], member.seed) == (0.01, (8, 4), 3)
    assert member.sweep == {}
    assert config.swept(member) == {"lr": 0.01, "model_hidden": [8, 4]}
    assert_refused("take one of its members", lambda: config.seed)


@pytest.mark.parametrize(
    ("key", "values", "names"),
    [
        ("data.operation", ["x+y", "x*y", "x/y"], ["x_plus_y", "x_times_y", "x_over_y"]),
        ("lr", [0.12345678, 0.12345679], ["0.12345678", "0.12345679"]),
        ("lr", [0.5, 1], ["0.5", "1"]),
        ("model.activation", ["a b", "a,b"], ["a_b-1", "a_b-2"]),
        ("data.name", ["one/a.npz", "two/b.npz"], ["a.npz", "b.npz"]),
        ("data.name", ["one/a.npz", "two/a.npz"], ["one_a.npz", "two_a.npz"]),
    ],
)
def test_every_value_has_a_member_with_a_name_of_its_own(key: str, values: list[Any], names: list[str]) -> None:
    config = TrainConfig.from_dict(tree(sweep={key: values}))
    found = config.members()
    assert [name.removesuffix(",seed-0").split("-", 1)[1] for name in found] == names
    table, _, option = key.rpartition(".")
    assert [member.to_dict()[table or "method"][option] for member in found.values()] == values


def test_anchored_names_files_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.from_dict(
        tree(data={"name": "a/x.npz", "dir": "sets"}, sweep={"data.name": ["y.npz", "digits"]})
    )
    anchored = config.anchored()
    assert (anchored.data.name, anchored.data.dir) == (str(tmp_path / "a" / "x.npz"), str(tmp_path / "sets"))
    assert anchored.sweep["data.name"] == (str(tmp_path / "y.npz"), "digits")
    plain = TrainConfig.from_dict(tree())
    assert plain.anchored() == plain


def test_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    config = TrainConfig.from_dict(tree())
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config
    path.write_text("epochs = [")
    assert_refused(r"cannot read .*c.toml", TrainConfig.from_toml, path)
    assert_refused("cannot read", TrainConfig.from_toml, tmp_path / "missing.toml")
