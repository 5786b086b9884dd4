"""Which methods can be stacked, and their rules for a stack."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.layers.hooks import Observer
from gramscope.layers.linear_layer import Layer
from gramscope.optim.vcl_unit import Unit
from gramscope.training.job import Job
from gramscope.training.methods import make_vcl, muon_split, readout_options, split_wrapper, warm_up_steps
from gramscope.training.stacked_gram import GramRule
from gramscope.training.stacked_rules import AdamRule, MuonRule, Rule, SGDRule, Stack
from gramscope.training.stacked_vcl import VCLRule

#: numeric options that may differ between the members of a stack; all others must agree
PER_RUN = {
    "lr", "momentum", "weight_decay", "beta1", "beta2", "eps", "adamw_lr", "gamma", "readout_lr", "readout_momentum",
    "readout_weight_decay",
}  # fmt: skip


def method_obstacle(jobs: Sequence[Job]) -> str:
    """Why the members' methods cannot share a step; empty if they can."""
    names = {job.config.method.name for job in jobs}
    if len(names) > 1:
        return f"the methods differ ({', '.join(sorted(names))})"
    name = names.pop()
    if split_wrapper(name)[1] not in RULES:
        return f"{name} has no stacked form"
    first = jobs[0].config.method.options
    for key, value in first.items():
        shared = key not in PER_RUN or (name == "vcl" and key == "momentum")
        if shared and any(job.config.method.options[key] != value for job in jobs):
            return f"method.{key} differs between them"
    return _vcl_obstacle(jobs[0]) if name == "vcl" else ""


def build_rules(jobs: Sequence[Job], template: nn.Module, params: Stack) -> tuple[list[Rule], list[str]]:
    """The rules that update all stacked parameters, and what there is to say about them."""
    options = [dict(job.config.method.options) for job in jobs]
    kind, name = split_wrapper(jobs[0].config.method.name)
    rules, notes = RULES[name](jobs, template, params, options)
    if kind:
        rules[0] = GramRule(rules[0], template, fixed=kind == "gram-fixed")
    return rules, notes


_Built = tuple[list[Rule], list[str]]
_Builder = Callable[[Sequence[Job], nn.Module, Stack, list[dict[str, Any]]], _Built]


def _sgd(jobs: Sequence[Job], template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> _Built:
    return [SGDRule(params, options)], []


def _adam(jobs: Sequence[Job], template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> _Built:
    return [AdamRule(params, options, decoupled=False)], []


def _adamw(jobs: Sequence[Job], template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> _Built:
    return [AdamRule(params, options, decoupled=True)], []


def _muon(jobs: Sequence[Job], template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> _Built:
    muon, adamw = muon_split(template, options[0]["readout"])
    rules: list[Rule] = [MuonRule({name: params[name] for name in muon}, options)]
    if not adamw:
        return rules, []
    rest = [
        {"lr": run["adamw_lr"], "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": run["weight_decay"]}
        for run in options
    ]
    rules.append(AdamRule({name: params[name] for name in adamw}, rest, decoupled=True))
    return rules, [f"Muon trains {', '.join(muon)}; AdamW trains {', '.join(adamw)}"]


def _vcl(jobs: Sequence[Job], template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> _Built:
    units, warmed = _vcl_parts(jobs[0], template)
    plan, mean = jobs[0].plan, jobs[0].config.reduction == "mean"
    warm_up = warm_up_steps(options[0], plan.steps_per_epoch)
    rates = [{"lr": run["gamma"]} for run in options]
    mine = {id(p) for unit in units for p in unit.target.parameters}
    others = {name: params[name] for name, p in template.named_parameters() if name in params and id(p) not in mine}
    rest = [readout_options(run) for run in options]

    def readout(chosen: Stack) -> list[Rule]:
        if not chosen:
            return []
        adamw = options[0]["readout"] == "adamw"
        return [SGDRule(chosen, rest) if options[0]["readout"] == "sgd" else AdamRule(chosen, rest, decoupled=adamw)]

    always = readout({name: stack for name, stack in others.items() if name in warmed})
    later = readout({name: stack for name, stack in others.items() if name not in warmed})
    rules = [VCLRule(units, template, params, rates, mean=mean, warm_up=warm_up, later=later), *always]
    trained = ", ".join(unit.target.name for unit in units)
    return rules, [f"VCL trains {trained}; {options[0]['readout']} trains the other parameters"]


def _vcl_parts(job: Job, template: nn.Module) -> tuple[list[Unit], set[str]]:
    """The matrices VCL trains in a net, and the names of the parameters of its warm-up; nothing is left on the net."""
    vcl = make_vcl(template, job.config.method.options, job.config.reduction)
    try:
        x, y = job.data.x_train[:2], job.data.y_train[:2]
        job.loss(template(x), y).sum().backward()  # type: ignore[no-untyped-call]
        warmed = {id(p) for p in vcl.warm_up_parameters()}
        return vcl.units, {name for name, p in template.named_parameters() if id(p) in warmed}
    finally:
        vcl.close()
        template.zero_grad()


def _vcl_obstacle(job: Job) -> str:
    """Layers that share a weight, or are applied more than once, have no stacked form of VCL."""
    net = copy.deepcopy(job.model)
    units, _ = _vcl_parts(job, net)
    counts: Counter[str] = Counter()

    def see(layer: Layer, x: Tensor, z: Tensor) -> None:
        counts[layer.name] += 1

    with torch.no_grad(), Observer([layer for unit in units for layer in unit.target.layers], see):
        net(job.data.x_train[:2])
    for unit in units:
        if unit.target.part or len(unit.target.layers) > 1 or counts[unit.target.layers[0].name] != 1:
            return f"VCL of {unit.target.name} has no stacked form (a shared, repeated or packed weight)"
    return ""


RULES: dict[str, _Builder] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw, "muon": _muon, "vcl": _vcl}
