from __future__ import annotations

import inspect
import math
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from pydantic.fields import FieldInfo
from torch import nn

import gramscope as gs
from gramscope.errors import InputError
from gramscope_lab.training.config import MethodTable, ScheduleTable, TrainConfig
from gramscope_lab.training.job import schedule_factor
from gramscope_lab.training.method_options import METHODS
from gramscope_lab.training.methods import build_method
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
        ({"epochs": -1}, "epochs = -1: must be greater than or equal to 0"),
        ({"epochs": "two"}, "epochs = 'two': must be a valid number"),
        ({"epochs": float("nan")}, "epochs = nan: must be a finite number"),
        ({"batch_size": True}, "batch_size = True: must be a valid integer"),
        ({"epoch": 0.1}, "epoch = 0.1: no key 'epoch'; did you mean 'epochs'?"),
        ({"method": {"name": "sdg"}}, "method.name = 'sdg': no method 'sdg'; did you mean 'sgd'?"),
        (
            {"method": {"name": "sgd", "moment": 1}},
            "method.moment = 1: no key 'method.moment'; did you mean 'method.momentum'",
        ),
        ({"method": {"name": "sgd", "nesterov": 1}}, "method.nesterov = 1: must be a valid boolean"),
        ({"method": {"name": "vcl", "rank": 0}}, "method.rank = 0: must be greater than or equal to 1"),
        ({"method": {"lr": 1}}, "method.name = ''"),
        ({"method": "sgd"}, "method = 'sgd': must be a table"),
        ({"schedule": {"name": "exponential"}}, "schedule.name = 'exponential': must be 'constant', 'linear'"),
        ({"schedule": {"every": 0}}, "schedule.every = 0: must be greater than 0"),
        ({"schedule": {"gamma": 0}}, "schedule.gamma = 0: no key 'schedule.gamma'"),
        ({"data": {"name": "digits", "validation": 1.5}}, "data.validation = 1.5: must be less than 1"),
        ({"model": {"name": "mlp", "hidden": {}}}, "model.hidden = {}: must be a number, text"),
        ({"model": {"name": "mlp", "hidden": [2**80]}}, "model.hidden is a whole number of 81 bits"),
        ({"seeds": 3}, "seeds = 3: must be a valid tuple"),
        ({"seeds": []}, "seeds = "),
        ({"seeds": [0, 0]}, "a seed occurs twice"),
        ({"seeds": [-1]}, "seeds.0 = -1: must be greater than or equal to 0"),
        ({"seeds": list(range(101)), "sweep": {"data.seed": list(range(100))}}, "make 10,100 runs; at most 10,000"),
        ({"sweep": {"lr": 0.1}}, "sweep.lr = 0.1: must be a list"),
        ({"sweep": {"lr": []}}, "must be a list of values to try"),
        ({"sweep": {"lr": [1, 1.0]}}, "the value 1.0 occurs twice"),
        ({"method": {"name": "sgd", "lr": float("inf")}}, "method.lr = inf: must be a finite number"),
        ({"sweep": {"epochs": [1, 2]}}, "sweep over an option of the method, model or data"),
        ({"sweep": {"lr": [0.1, -1.0]}}, "method.lr = -1.0: must be greater than or equal to 0"),
        ({"sweep": {"method.gamma": [1.0]}}, "no key 'method.gamma'"),
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
        ("data.operation", ["x+y", "x*y", "x/y"], ["x_y-1", "x_y-2", "x_y-3"]),
        ("lr", [0.12345678, 0.12345679], ["0.123457-1", "0.123457-2"]),
        ("lr", [0.5, 1], ["0.5", "1"]),
        ("model.activation", ["a b", "a,b"], ["a_b-1", "a_b-2"]),
        ("data.name", ["one/a.npz", "two/b.npz"], ["a.npz", "b.npz"]),
        ("data.name", ["one/a.npz", "two/a.npz"], ["a.npz-1", "a.npz-2"]),
    ],
)
def test_every_value_has_a_member_with_a_name_of_its_own(key: str, values: list[Any], names: list[str]) -> None:
    config = TrainConfig.from_dict(tree(sweep={key: values}))
    found = config.members()
    assert [name.removesuffix(",seed-0").split("-", 1)[1] for name in found] == names
    table, _, option = key.rpartition(".")
    assert [member.to_dict()[table or "method"][option] for member in found.values()] == values


def test_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.from_dict(
        tree(data={"name": "a/x.npz", "dir": "sets"}, sweep={"data.name": ["y.npz", "digits"]})
    )
    full = config.with_absolute_paths()
    assert (full.data.name, full.data.dir) == (str(tmp_path / "a" / "x.npz"), str(tmp_path / "sets"))
    assert full.sweep["data.name"] == (str(tmp_path / "y.npz"), "digits")
    plain = TrainConfig.from_dict(tree())
    assert plain.with_absolute_paths() == plain


def test_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    config = TrainConfig.from_dict(tree())
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config
    path.write_text("epochs = [")
    assert_refused(r"cannot read .*c.toml", TrainConfig.from_toml, path)
    assert_refused("cannot read", TrainConfig.from_toml, tmp_path / "missing.toml")


# -- schedules ----------------------------------------------------------------------------------------------------
def factors(steps: int = 20, per_epoch: int = 5, **table: object) -> list[float]:
    schedule = ScheduleTable.from_table(table)
    return [schedule_factor(schedule, step, steps, per_epoch) for step in range(steps)]


def test_schedules() -> None:
    assert factors() == [1.0] * 20
    assert factors(warm_up=1)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert factors(name="linear", final=0.5)[-1] == pytest.approx(0.525)
    assert factors(name="step", every=1, factor=0.5)[::5] == [1, 0.5, 0.25, 0.125]
    cosine = factors(name="cosine", warm_up=2)
    assert cosine[10] == 1.0
    assert cosine[15] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert factors(warm_up=100)[-1] == 1.0  # never longer than the run


def test_schedules_agree_with_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name, build in {
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 20),
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1),
    }.items():
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = build(optimizer)
        expected = []
        for _ in range(20):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert factors(name=name, **({"every": 1} if name == "step" else {})) == pytest.approx(expected), name


# -- options of methods -------------------------------------------------------------------------------------------
def test_defaults_of_our_optimizers_are_those_of_their_signatures() -> None:
    signature = inspect.signature(gs.VCL).parameters
    options = TrainConfig.from_dict(tree(method={"name": "vcl"})).method.options
    shared = signature.keys() & options.keys() - {"readout", "layers"}
    assert shared == {"gamma", "alpha", "solver", "rank"}
    defaults = {key: signature[key].default for key in shared}
    assert {key: options[key] for key in shared} == defaults


def other(field: FieldInfo, default: Any) -> Any:
    """An allowed value that is not the default."""
    choices = [value for value in typing.get_args(field.annotation) if isinstance(value, str)]
    if choices:
        return next(choice for choice in choices if choice != default)
    return {bool: not default, int: 2, float: 0.5, str: "2"}.get(type(default), 8)


def built(method: str, options: dict[str, Any]) -> list[Any]:
    """All that an optimizer shows of its options."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    made = build_method(MethodTable(name=method, **options), model, steps_per_epoch=4)
    facts: list[Any] = [vars(made).get("_warm_up_steps")]
    for optimizer in made.optimizers:
        facts += [getattr(optimizer, "summary", str)(), getattr(optimizer, "_method", "")]
        facts += [{key: v for key, v in getattr(optimizer, "_arguments", {}).items() if not callable(v)}]
        facts += [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    return facts


@pytest.mark.parametrize("method", METHODS)
def test_every_option_reaches_an_optimizer(method: str) -> None:
    needed = {"nesterov": {"momentum": 0.9}}
    for key, default in METHODS[method]():
        base = needed.get(key, {})
        changed = {**base, key: other(METHODS[method].model_fields[key], default)}
        assert built(method, base) != built(method, changed), key


def test_a_resumed_optimizer_keeps_its_configured_options() -> None:
    model = nn.Linear(3, 2)
    method = build_method(MethodTable(name="adamw"), model)
    (state,) = method.state_dict()
    state["param_groups"][0] |= {"betas": (-1.0, 0.999), "weight_decay": 7.0}
    method.load_state_dict([state])
    assert method.optimizers[0].param_groups[0]["betas"] == (0.9, 0.999)
    assert method.optimizers[0].param_groups[0]["weight_decay"] == 0.01
