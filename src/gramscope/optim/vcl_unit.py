"""One weight matrix under virtual covariance learning: which solver, which kind of step, what is kept in the state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError, RescueWarning
from gramscope.linalg.replay import Replay, Tensors
from gramscope.optim import vcl_exact
from gramscope.optim.vcl_direction import Direction
from gramscope.optim.vcl_exact import Dense
from gramscope.optim.vcl_gather import Gatherer, relative_distance
from gramscope.optim.vcl_recursion import advance
from gramscope.optim.vcl_rules import Batch, Report, Rules
from gramscope.optim.vcl_state import MATRICES, Recursion, rebased, start
from gramscope.optim.vcl_targets import Target

Solver: TypeAlias = Literal["recursive", "exact", "auto"]

#: up to this many inputs ``solver="auto"`` is exact
_SMALL = 64
#: up to this many inputs, or twice as many as outputs, nothing is truncated unless asked for
_UNCUT = 256
#: steps at the beginning that are all full, and full steps after a light one did not settle
FIRST, COOLING = 32, 4
#: light steps whose equation is farther from solved, or that lead farther from the last full one, are replaced by full ones
SETTLED = 0.2
#: up to this many directions all steps are full: they cost little more there
_FEW = 128
#: the matrices of a recursion that a light step changes
_MOVED = ("basis", "shift", "weights", "rotation")


@dataclass(frozen=True)
class Plan:
    """How to work out a step: a full or a light one, from kept rows or from ``.grad``, after a change of the weights."""

    full: bool
    dense: bool
    changed: bool = False


@dataclass(frozen=True)
class Proposal:
    """New weights and state of one matrix, not yet written.

    ``doubts`` ``[5]`` waits on the device: the norm of the new weights; how doubtful a light step is; how far ``.grad`` is
    from what the kept rows give; how far the parameter is from what was last written; eigenvalues cut off.
    """

    weights: Tensor
    state: dict[str, Any]
    report: Report
    doubts: Tensor


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
        self._full = rank is not None and rank >= d  # who asks for all directions wants no approximation
        exact = self.solver == "exact" or (refresh == 1 and self.rank == d)
        self.dtype = precision or _precision(target.parameter, exact)
        few_rows = not direction.active and self.solver == "recursive"
        self.gatherer = Gatherer(target, rows=few_rows, sigma=rules.second_order, dtype=self.dtype)
        self.report: Report | None = None
        self._dense = False
        self._announced = False
        self._versions: list[int] | None = None
        self._light = Replay(self._light_step)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a stored state that is not one of this matrix and solver; an empty one is a beginning.

        Raises:
            InputError: naming the layer and what differs.
        """
        if not state:
            return
        solver = "exact" if "matrix" in state else "recursive"
        if solver != self.solver:
            raise InputError(
                f"the state of layer {self.target.name!r} is one of solver={solver!r}, not {self.solver!r}"
            )
        W = self.target.read()
        stored = state["matrix"] if solver == "exact" else state["basis"]
        outputs = W.shape[-2] if solver == "exact" else state["weights"].shape[-2]
        if (*stored.shape[:-2], outputs, stored.shape[-1]) != W.shape:
            raise InputError(
                f"the state of layer {self.target.name!r} is one of {outputs} × {stored.shape[-1]} weights, not of shape "
                f"{tuple(W.shape)}"
            )

    def plan(self, state: Mapping[str, Any]) -> Plan:
        """How to try the next step at first."""
        changed = "basis" in state and self._versions not in (None, self._current_versions())
        return Plan(full=self.solver == "exact" or changed or self._due(state), dense=self._dense, changed=changed)

    def written(self) -> None:
        """The parameters hold what the last step gave; changes from now on are someone else's."""
        self._versions = self._current_versions()

    def forget(self) -> None:
        """It is not known any more whether the parameters are as the state has them; their values will tell."""
        self._versions = None

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.target.parameters]

    def next_plan(self, plan: Plan, doubts: Sequence[float] | None) -> Plan | None:
        """What to try after an attempt with these doubts (None: it raised); None when it was good.

        Raises:
            NumericalError: there is nothing left to try.
        """
        norm, light, grad, weights, cut = doubts or (math.nan, 0.0, 0.0, 0.0, 0.0)
        if not plan.dense and not grad <= self.gatherer.tolerance:  # what follows from a wrong D need not be looked at
            self._dense = math.isfinite(grad)
            return replace(plan, dense=True)
        if not plan.changed and not weights <= self._rounding:
            return replace(plan, changed=True, full=True)
        finite = math.isfinite(norm)
        if not plan.full and not (finite and light <= SETTLED):
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
        if not plan.full:
            return self._attempt_light(state, gamma, W, batch, mixed)
        batch, kept = self.direction.of(batch, state.get("momentum"))
        new: Dense | Recursion
        changed = None
        if self.solver == "exact":
            before = vcl_exact.start(W, self.rules) if "matrix" not in state else Dense(state["matrix"])
            new, weights, report = vcl_exact.advance(before, W, batch, gamma, self.rules)
        elif "basis" not in state:
            new, weights, report = advance(start(W, self.rules), batch, gamma, self.rules, self.rank)
        else:
            recursion = Recursion(**{f.name: state[f.name] for f in fields(Recursion)})
            if plan.changed:
                recursion = rebased(recursion, W)
            else:
                changed = self._distance(recursion, W)
            new, weights, report = advance(recursion, batch, gamma, self.rules, self.rank)
        values: dict[str, Any] = {f.name: getattr(new, f.name) for f in fields(new)}
        if kept is not None:
            values["momentum"] = kept
        if self.solver != "exact":
            failed = not self._due(state)
            values["wait"] = values["steps"] + COOLING if failed else int(state.get("wait", FIRST))
        return Proposal(weights, values, report, _doubts(weights, None, mixed, changed, report.cut().sum()))

    def _attempt_light(
        self, state: Mapping[str, Any], gamma: float, W: Tensor, batch: Batch, mixed: Tensor | None
    ) -> Proposal:
        given = {name: state[name] for name in MATRICES}
        given |= {"W": W, "rows": batch.rows, "gamma": torch.full((), gamma, dtype=W.dtype, device=W.device)}
        optional = {"left": batch.left, "sigma": batch.sigma, "mixed": mixed, "momentum": state.get("momentum")}
        found = self._light(given | {name: x for name, x in optional.items() if x is not None})
        values = {**state, **{name: found[name] for name in (*_MOVED, "momentum") if name in found}}
        values["steps"], values["since"] = state["steps"] + 1, state["since"] + 1
        report = Report(
            state["eigenvalues"],
            state["singular_values"],
            found["before"],
            found["weights"],
            found["size"],
            found.get("discarded"),
            found["unsettled"],
            found["own"],
            found.get("rest"),
        )
        return Proposal(found["matrix"], values, report, found["doubts"])

    def _light_step(self, given: Tensors) -> dict[str, Tensor]:
        """A light step as a function of tensors alone."""
        batch = Batch(given["rows"], given.get("left"), given.get("sigma"))
        batch, kept = self.direction.of(batch, given.get("momentum"))
        matrices: dict[str, Any] = {name: given[name] for name in MATRICES}
        state = Recursion(**matrices)
        new, matrix, report = advance(state, batch, given["gamma"], self.rules, self.rank, full=False)
        assert report.unsettled is not None
        doubts = _doubts(matrix, report.unsettled.amax(), given.get("mixed"), self._distance(state, given["W"]), None)
        found = {name: getattr(new, name) for name in _MOVED} | {"matrix": matrix, "doubts": doubts}
        found |= {name: getattr(report, name) for name in ("before", "size", "unsettled", "own")}
        optional = {"momentum": kept, "discarded": report.discarded, "rest": report.rest}
        return found | {name: x for name, x in optional.items() if x is not None}

    def _distance(self, state: Recursion, W: Tensor) -> Tensor:
        """How far the parameter is from the weights in the state: it may have been changed by someone else."""
        probe = self.gatherer.probe(W)
        own = state.basis[..., : state.weights.shape[-1], :] @ probe
        return relative_distance((state.weights.to(W.dtype) @ own.unsqueeze(-1)).squeeze(-1), W @ probe)

    @property
    def _rounding(self) -> float:
        """What rounding explains of :meth:`_distance`: many operations here, and one to the parameter's dtype."""
        return max(4 * torch.finfo(self.target.parameter.dtype).eps, 100 * torch.finfo(self.dtype).eps)

    def _due(self, state: Mapping[str, Any]) -> bool:
        """Whether the next step must be a full one."""
        if "basis" not in state or state["basis"].shape[-2] != self.rank:
            return True
        return bool(
            self._full or self.rank <= _FEW or state["since"] + 1 >= self.refresh or state["steps"] < state["wait"]
        )

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
        looks = iter(torch.stack([p.doubts.to(found[0].doubts) for p in found]).tolist() if found else ())
        waiting = []
        for i, proposal in tried.items():
            better = units[i].next_plan(plans[i], None if proposal is None else next(looks))
            if better is not None:
                plans[i] = better
                waiting.append(i)
            elif proposal is not None:
                done[i] = proposal
    return [done[i] for i in range(len(units))]


def _doubts(weights: Tensor, *others: Tensor | None) -> Tensor:
    """See :class:`Proposal`; what does not apply is 0."""
    norm: Tensor = torch.linalg.vector_norm(weights)
    zero = torch.zeros((), dtype=norm.dtype, device=norm.device)
    return torch.stack([norm, *(zero if x is None else x.to(norm.dtype) for x in others)])


def _rank(name: str, k: int, d: int, rank: int | None) -> int:
    p = min(k, d)
    if rank is None:
        rank = d if d <= max(_UNCUT, 2 * p) else p + max(16, p // 16)
    elif rank < p:
        raise InputError(f"rank={rank}: layer {name!r} of shape {k} × {d} needs at least {p} directions")
    return min(rank, d)


def _precision(parameter: Tensor, exact: bool) -> torch.dtype:
    """Float64 where every step is meant to be exact; else what the parameter has, at least float32."""
    if parameter.device.type == "mps":
        return torch.float32
    return torch.float64 if exact else torch.promote_types(parameter.dtype, torch.float32)
