"""One weight matrix under virtual covariance learning: which solver, which kind of step, what is kept in the state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError, RescueWarning
from gramscope.optim import vcl_exact
from gramscope.optim.vcl_direction import Direction
from gramscope.optim.vcl_exact import Dense
from gramscope.optim.vcl_gather import Gatherer
from gramscope.optim.vcl_recursion import advance
from gramscope.optim.vcl_rules import Report, Rules
from gramscope.optim.vcl_state import Recursion, rebased, start
from gramscope.optim.vcl_targets import Target

Solver: TypeAlias = Literal["recursive", "exact", "auto"]

#: up to this many inputs ``solver="auto"`` is exact
_SMALL = 64
#: up to this many inputs, or twice as many as outputs, nothing is truncated unless asked for
_UNCUT = 256
#: steps at the beginning that are all full, and full steps after a light one did not settle
_FIRST, _COOLING = 32, 4
#: light steps whose equation is farther from solved, or that lead farther from the last full one, are replaced by full ones
_SETTLED = 0.2


@dataclass(frozen=True)
class Plan:
    """How to work out a step: a full or a light one, from kept rows or from ``.grad``, after a change of the weights."""

    full: bool
    dense: bool
    changed: bool = False


@dataclass(frozen=True)
class Proposal:
    """New weights and state of one matrix, not yet written.

    ``flags`` are booleans on the device: the result is finite; the light step is doubtful; ``.grad`` is not what the kept
    rows give; the weights were changed from outside; positive eigenvalues were cut off.
    """

    weights: Tensor
    state: dict[str, Any]
    report: Report
    flags: Tensor


class Unit:
    """One target with its gatherer and its rules; holds no tensors of the algorithm's state itself."""

    def __init__(
        self,
        target: Target,
        rules: Rules,
        direction: Direction,
        *,
        solver: Solver,
        rank: int | None,
        refresh: int,
        precision: torch.dtype | None,
    ) -> None:
        k, d = target.read().shape[-2:]
        self.target = target
        self.rules = rules
        self.direction = direction
        self.refresh = refresh
        self.solver = ("exact" if d <= _SMALL else "recursive") if solver == "auto" else solver
        self.rank = _rank(target.name, k, d, rank)
        self.dtype = precision or _precision(target.parameter.dtype, self.solver, target.parameter.device)
        few_rows = not direction.active and self.solver == "recursive"
        self.gatherer = Gatherer(target, rows=few_rows, sigma=rules.second_order, dtype=self.dtype)
        self.report: Report | None = None
        self._dense = False
        self._announced = False

    def plan(self, state: Mapping[str, Any]) -> Plan:
        """How to try the next step at first."""
        return Plan(full=self.solver == "exact" or self._due(state), dense=self._dense)

    def next_plan(self, plan: Plan, flags: Sequence[bool] | None) -> Plan | None:
        """What to try after an attempt with these flags (None: it raised); None when it was good.

        Raises:
            NumericalError: there is nothing left to try.
        """
        finite, doubtful, mixed, moved, cut = (False,) * 5 if flags is None else flags
        if mixed and not plan.dense:  # what follows from a wrong D need not be looked at
            self._dense = True
            return replace(plan, dense=True)
        if moved and not plan.changed:
            return replace(plan, changed=True, full=True)
        if (doubtful or not finite) and not plan.full:
            return replace(plan, full=True)
        if not finite:
            raise NumericalError(self._trouble())
        if cut and not self._announced:
            self._announced = True
            warnings.warn(
                f"VCL layer {self.target.name!r}: positive eigenvalues at rounding level (up to {self.cutoff:.1e} of the "
                "largest) are taken as zero, so W loses rank. cutoff= sets the limit, floor= keeps the rank",
                RescueWarning,
                stacklevel=4,
            )
        return None

    @torch.no_grad()
    def attempt(self, state: Mapping[str, Any], gamma: float, plan: Plan) -> Proposal:
        """Work out one step as planned; nothing is written."""
        W = self.target.read().to(self.dtype)
        batch, mixed = self.gatherer.batch(plan.dense)
        batch, kept = self.direction.of(batch, state.get("momentum"))
        new: Dense | Recursion
        if self.solver == "exact":
            before = vcl_exact.start(W, self.rules) if "matrix" not in state else Dense(state["matrix"])
            new, weights, report = vcl_exact.advance(before, W, batch, gamma, self.rules)
            moved = torch.zeros_like(mixed)
        else:
            recursion, moved = self._recursion(state, W, plan.changed)
            new, weights, report = advance(
                recursion, batch, gamma, self.rules, self.rank, plan.full, precise=self.refresh == 1
            )
        finite = (torch.linalg.vector_norm(weights) + report.moved.sum()).isfinite()
        doubtful = (report.unsettled > _SETTLED).any()
        values: dict[str, Any] = {f.name: getattr(new, f.name) for f in fields(new)}
        if kept is not None:
            values["momentum"] = kept
        if self.solver != "exact":
            wait = int(state.get("wait", _FIRST))
            failed = plan.full and not self._due(state)
            values["wait"] = values["steps"] + _COOLING if failed else wait
        flags = torch.stack([finite, doubtful, mixed, moved, (report.cut > 0).any()])
        return Proposal(weights, values, report, flags)

    def _recursion(self, state: Mapping[str, Any], W: Tensor, changed: bool) -> tuple[Recursion, Tensor]:
        """The state as stored, and whether the parameter has been changed by someone else since."""
        if "basis" not in state:
            return start(W, self.rules), torch.zeros((), dtype=torch.bool, device=W.device)
        recursion = Recursion(**{f.name: state[f.name] for f in fields(Recursion)})
        if changed:
            return rebased(recursion, W), torch.zeros((), dtype=torch.bool, device=W.device)
        probe = self.gatherer._vector(W)
        p = recursion.weights.shape[-1]
        here = W @ probe
        kept = (recursion.weights.to(W.dtype) @ (recursion.basis[..., :p, :] @ probe).unsqueeze(-1)).squeeze(-1)
        tolerance = 100 * max(torch.finfo(self.target.parameter.dtype).eps, torch.finfo(W.dtype).eps)
        return recursion, ~((here - kept).norm() <= tolerance * here.norm())

    def _due(self, state: Mapping[str, Any]) -> bool:
        """Whether the next step must be a full one."""
        if "basis" not in state or state["basis"].shape[-2] != self.rank:
            return True
        return bool(state["since"] + 1 >= self.refresh or state["steps"] < state["wait"])

    @property
    def cutoff(self) -> float:
        """Eigenvalues up to this times the largest count as zero."""
        size = self.target.read().shape[-1] if self.solver == "exact" else self.rank
        return self.rules.spectrum.relative_cutoff(self.dtype, size)

    def _trouble(self) -> str:
        grad = self.target.gradient()
        name = self.target.name
        if grad is not None and not bool(grad.isfinite().all()):
            what = f"the gradient of VCL layer {name!r} has NaN or infinite values"
        elif not bool(self.target.read().isfinite().all()):
            what = f"the weights of VCL layer {name!r} have NaN or infinite values"
        else:
            what = f"the VCL step of layer {name!r} overflowed or its decomposition failed"
        return (
            f"{what}; weights and state are as before this step. Lower gamma, clip the gradients, or use "
            "anchor='initial' with second_order=False where alpha is large"
        )


def propose_all(units: Sequence[Unit], states: Sequence[Mapping[str, Any]], gamma: float) -> list[Proposal]:
    """One step of every unit, worked out but not written; as a rule with one look at the device.

    Raises:
        NumericalError: some unit's step failed; nothing has been changed.
    """
    plans = [unit.plan(state) for unit, state in zip(units, states, strict=True)]
    done: dict[int, Proposal] = {}
    waiting = list(range(len(units)))
    while waiting:
        tried: dict[int, Proposal | None] = {}
        for i in waiting:
            try:
                tried[i] = units[i].attempt(states[i], gamma, plans[i])
            except NumericalError:
                tried[i] = None
        found = [proposal for proposal in tried.values() if proposal is not None]
        looks = iter(torch.stack([p.flags.to(found[0].flags.device) for p in found]).tolist() if found else ())
        waiting = []
        for i, proposal in tried.items():
            better = units[i].next_plan(plans[i], None if proposal is None else next(looks))
            if better is not None:
                plans[i] = better
                waiting.append(i)
            elif proposal is not None:
                done[i] = proposal
    return [done[i] for i in range(len(units))]


def _rank(name: str, k: int, d: int, rank: int | None) -> int:
    p = min(k, d)
    if rank is None:
        rank = d if d <= max(_UNCUT, 2 * p) else p + max(16, p // 16)
    elif rank < p:
        raise InputError(f"rank={rank}: layer {name!r} of shape {k} × {d} needs at least {p} directions")
    return min(rank, d)


def _precision(dtype: torch.dtype, solver: str, device: torch.device) -> torch.dtype:
    if device.type == "mps":
        return torch.float32
    return torch.float64 if solver == "exact" else torch.promote_types(dtype, torch.float32)
