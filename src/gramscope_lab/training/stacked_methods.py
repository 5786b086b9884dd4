"""Which methods can be stacked, and their rules for a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from gramscope_lab.training.job import Job
from gramscope_lab.training.methods import beside_muon, muon_split
from gramscope_lab.training.options import METHODS, split_wrapper
from gramscope_lab.training.stacked_gram import GramRule
from gramscope_lab.training.stacked_rules import AdamRule, MuonRule, Rule, SGDRule, Stack


def method_obstacle(jobs: Sequence[Job]) -> str:
    """Why the members' methods cannot share a step; empty if they can."""
    names = {job.config.method.name for job in jobs}
    if len(names) > 1:
        return f"the methods differ ({', '.join(sorted(names))})"
    name = names.pop()
    if split_wrapper(name)[1] not in (*_RULES, "muon"):
        return f"{name} has no vectorised form"
    first = jobs[0].config.method.options
    for key, value in first.items():
        if not METHODS[name][key].per_run and any(job.config.method.options[key] != value for job in jobs):
            return f"method.{key} differs between them"
    return ""


def build_rules(jobs: Sequence[Job], template: nn.Module, params: Stack) -> tuple[list[Rule], list[str]]:
    """The rules that update all stacked parameters, and notes for the user."""
    options = [dict(job.config.method.options) for job in jobs]
    kind, name = split_wrapper(jobs[0].config.method.name)
    rules, notes = _muon(template, params, options) if name == "muon" else ([_RULES[name](params, options)], [])
    if kind:
        rules[0] = GramRule(rules[0], template, fixed=kind == "gram-fixed")
    return rules, notes


def _muon(template: nn.Module, params: Stack, options: list[dict[str, Any]]) -> tuple[list[Rule], list[str]]:
    muon, adamw = muon_split(template, options[0]["readout"])
    rules: list[Rule] = [MuonRule({name: params[name] for name in muon}, options)]
    if not adamw:
        return rules, []
    rest = [beside_muon(run) for run in options]
    rules.append(AdamRule({name: params[name] for name in adamw}, rest, decoupled=True))
    return rules, [f"Muon trains {', '.join(muon)}; AdamW trains {', '.join(adamw)}"]


#: rules that train all parameters alike
_RULES: dict[str, Callable[[Stack, list[dict[str, Any]]], Rule]] = {
    "sgd": SGDRule,
    "adam": partial(AdamRule, decoupled=False),
    "adamw": partial(AdamRule, decoupled=True),
}
