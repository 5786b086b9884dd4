"""VCL runs asked for as vectorised: how they run, and how checkpoints of versions that could stack them continue."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gramscope.optim.vcl import VCL
from gramscope_lab.data import DataSet
from gramscope_lab.training.engine import SingleEngine
from gramscope_lab.training.execution import choose_execution
from gramscope_lab.training.job import prepare
from gramscope_lab.training.methods import VCLMethod
from lab.training.helpers import Config
from refusals import assert_refused


@pytest.mark.parametrize("asked", ["vectorised", "auto"])
def test_vcl_runs_in_processes_and_a_note_says_so(config: Config, blobs: DataSet, asked: str) -> None:
    settings = config("vcl", seeds=[0, 1], epochs=1e6)
    jobs = [prepare(member, name, data=blobs) for name, member in settings.members().items()]
    way, note = choose_execution(jobs, asked, portable=True)
    assert (way, note.lower()) == ("processes", "2 runs in processes, because vcl has no vectorised form")
    assert choose_execution(jobs, "vectorised", portable=False)[0] == "one-by-one"


def as_stacked(vcl: VCL, done: int) -> list[dict[str, Any]]:
    """The state as a stack of runs stored it: its own form for VCL's matrices and for the readout's two parts."""
    names = {p: name for name, p in vcl.model.named_parameters()}
    warmed = {names[p] for p in vcl.warm_up_parameters()}
    units, rules = [], {True: {}, False: {}}
    for unit in vcl.units:
        state = dict(vcl.state[unit.weight.parameter])
        counts = {key: state.pop(key, 0) for key in ("steps", "since", "wait")}
        units.append({"momentum": state.pop("momentum", None), "matrices": state, **counts})
    for p in (p for group in vcl.param_groups[1:] for p in group["params"]):
        rule: dict[str, Any] = rules[names[p] in warmed]
        for theirs, ours in (("momentum_buffer", "momentum"), ("exp_avg", "mean"), ("exp_avg_sq", "square")):
            if theirs in vcl.state[p]:
                rule.setdefault(ours, {})[names[p]] = vcl.state[p][theirs]
        if "step" in vcl.state[p]:
            rule["step"] = {"": vcl.state[p]["step"].double()}
    return [{"done": done, "units": units, "later": [rules[False]]}, rules[True]]


@pytest.mark.parametrize(
    "method",
    [
        {"readout_momentum": 0.9},
        {"readout": "adamw", "readout_lr": 0.01, "warm_up_epochs": 1.0, "bias": True},
        {"solver": "exact", "second_order": False, "momentum": 0.9, "orthogonalise": True},
    ],
)
@pytest.mark.parametrize("steps", [3, 8])
def test_a_run_continues_from_the_checkpoint_of_a_stack(
    config: Config, blobs: DataSet, method: dict[str, Any], steps: int
) -> None:
    engine, resumed = (SingleEngine(prepare(config({"name": "vcl", **method}), data=blobs)) for _ in range(2))
    for step in range(steps):
        engine.advance(step)
    assert isinstance(engine.method, VCLMethod)
    ((weights, training),) = engine.states()
    loss = {key: training[key] for key in ("loss_sum", "loss_count")}
    stored = {"stacked": as_stacked(engine.method.vcl, steps), **loss}
    resumed.load_states([(weights, copy.deepcopy(stored))])
    for step in range(steps, steps + 4):
        engine.advance(step)
        resumed.advance(step)
    assert engine.mean_losses() == resumed.mean_losses()
    for (name, p), q in zip(engine.job.model.named_parameters(), resumed.job.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_other_stacked_checkpoints_are_refused(config: Config, blobs: DataSet) -> None:
    engine = SingleEngine(prepare(config("sgd"), data=blobs))
    stored = [(engine.job.model.state_dict(), {"stacked": [{}]})]
    assert_refused("written by vectorised runs", engine.load_states, stored)
