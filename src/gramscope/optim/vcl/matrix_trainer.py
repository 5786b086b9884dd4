"""Which step a matrix takes: full or light, from kept rows or from ``.grad``, and what to try when one fails."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError, RescueWarning, ResultWarning
from gramscope.optim.vcl.checks import check_representable
from gramscope.optim.vcl.direction import Direction
from gramscope.optim.vcl.gradients import Gatherer
from gramscope.optim.vcl.matrix_step import Doubts, MatrixStep, Proposal
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Rules, Solver
from gramscope.optim.weight_matrix import WeightMatrix

#: up to this many inputs ``solver="auto"`` is exact
_SMALL = 64
#: by default nothing is truncated up to this many inputs, or twice as many as outputs
_UNTRUNCATED = 256
#: the first steps are full, and so are this many after a light step failed
_FIRST, _AFTER_FAILURE = 32, 4
#: a light step with a larger error estimate is replaced by a full one
_SETTLED = 0.2
#: up to this many directions all steps are full, as they cost little more than light ones
_FULL_ONLY = 128


@dataclass(frozen=True)
class Plan:
    """How to compute a step.

    Attributes:
        full: a full step, not a light one.
        dense: from ``.grad``, not from the kept rows.
        changed: the weights were changed since the last step.
    """

    full: bool
    dense: bool
    changed: bool = False


class MatrixTrainer:
    """One weight matrix with its gatherer and its rules. The optimizer holds the algorithm's state."""

    def __init__(
        self,
        weight: WeightMatrix,
        rules: Rules,
        direction: Direction,
        *,
        second_order: bool,
        solver: Solver,
        rank: int | None,
        refresh: int,
        precision: torch.dtype | None,
    ) -> None:
        k, d = weight.shape[-2:]
        self.weight = weight
        self.rules = rules
        self.solver = ("exact" if d <= _SMALL else "recursive") if solver == "auto" else solver
        self.rank = _rank(weight.name, k, d, rank)
        self.report: Report | None = None
        self._refresh = refresh
        self._always_full = (rank is not None and rank >= d) or self.rank <= _FULL_ONLY
        precise = self.solver == "exact" or (refresh == 1 and self.rank == d)
        self.dtype = precision or _precision(weight.parameter, precise)
        keep_rows = not direction.active and self.solver == "recursive"
        self.gatherer = Gatherer(weight, rows=keep_rows, sigma=second_order, dtype=self.dtype)
        self._step = MatrixStep(
            rules, direction, None if self.solver == "exact" else self.rank, probe=self.gatherer.probe
        )
        self._dense = False
        self._warned = False
        self._versions: list[int] | None = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an InputError unless a stored state is empty or fits this matrix and solver."""
        if not state:
            return
        name, shape = self.weight.name, self.weight.shape
        solver = "exact" if "matrix" in state else "averaged" if "mean" in state else "recursive"
        if solver != self.solver:
            raise InputError(f"the state of layer {name!r} is one of solver={solver!r}, not {self.solver!r}")
        stored = state["matrix"] if solver == "exact" else state["basis"]
        outputs = shape[-2] if solver == "exact" else state["weights"].shape[-2]
        if (*stored.shape[:-2], outputs, stored.shape[-1]) != shape:
            raise InputError(
                f"the state of layer {name!r} is one of {outputs} × {stored.shape[-1]} weights, not of shape {tuple(shape)}"
            )

    def written(self) -> None:
        """Remember that the parameters hold the last step's weights; later changes come from outside."""
        self._versions = self._current_versions()

    def forget(self) -> None:
        """Forget whether the parameters hold the weights in the state; the next step compares their values."""
        self._versions = None

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.weight.parameters]

    def plan(self, state: Mapping[str, Any]) -> Plan:
        """What to try first."""
        changed = "basis" in state and self._versions not in (None, self._current_versions())
        return Plan(full=self.solver == "exact" or changed or self._due(state), dense=self._dense, changed=changed)

    def _due(self, state: Mapping[str, Any]) -> bool:
        """Whether the next step of the recursion must be a full one."""
        if self._always_full or "basis" not in state or state["basis"].shape[-2] != self.rank:
            return True
        return bool(state["since"] + 1 >= self._refresh or state["steps"] < state["wait"])

    @torch.no_grad()
    def attempt(self, state: Mapping[str, Any], gamma: float, plan: Plan) -> Proposal:
        """Compute one step as planned; nothing is written."""
        W = self.weight.read().to(self.dtype)
        gradients = self.gatherer.gradients(plan.dense)
        if not plan.full:
            return self._step.light(state, W, gradients, gamma)
        proposal = self._step.full(state, W, gradients, gamma, changed=plan.changed)
        if self.solver != "exact":
            failed = not self._due(state)
            wait = proposal.state["steps"] + _AFTER_FAILURE if failed else int(state.get("wait", _FIRST))
            proposal.state["wait"] = wait
        return proposal

    def next_plan(self, plan: Plan, doubts: Doubts | None) -> Plan | None:
        """What to try after an attempt with these doubts, or with None where it raised; None when it was good.

        Raises:
            NumericalError: there is nothing left to try.
        """
        doubts = doubts or Doubts(math.nan, 0.0, 0.0, 0.0, 0.0)
        if not plan.dense and not doubts.gradient <= self.gatherer.tolerance:  # the other doubts follow from a wrong D
            self._dense = math.isfinite(doubts.gradient)
            return replace(plan, dense=True)
        if not plan.changed and not doubts.weights <= self._rounding:
            return replace(plan, changed=True, full=True)
        finite = math.isfinite(doubts.norm)
        if not plan.full and not (finite and doubts.unsettled <= _SETTLED):
            return replace(plan, full=True)
        if not finite:
            raise NumericalError(self._trouble())
        name = self.weight.name
        if doubts.norm == 0 and self.report is None and not bool(self.weight.read().any()):  # they began at zero
            self._warn(
                ResultWarning,
                f"all weights of VCL layer {name!r} are zero and stay so: Algorithm 1 changes weights by products with them. "
                "Start from other weights, leave the layer to readout= with layers=, or use solver='averaged' or floor=",
            )
        elif doubts.cut:
            size = self.weight.shape[-1] if self.solver == "exact" else self.rank
            cutoff = self.rules.spectrum.relative_cutoff(self.dtype, size)
            self._warn(
                RescueWarning,
                f"VCL layer {name!r}: positive eigenvalues at rounding level (up to {cutoff:.1e} of the "
                "largest) are taken as zero, so W loses rank. cutoff= sets the limit, floor= keeps the rank",
            )
        return None

    def _warn(self, kind: type[Warning], text: str) -> None:
        """Warn once for each matrix."""
        if not self._warned:
            self._warned = True
            warnings.warn(text, kind, stacklevel=5)

    @property
    def _rounding(self) -> float:
        """The part of ``Doubts.weights`` that rounding explains: many operations here, and one to the parameter's dtype."""
        return max(4 * torch.finfo(self.weight.parameter.dtype).eps, 100 * torch.finfo(self.dtype).eps)

    def _trouble(self) -> str:
        grad = self.weight.gradient()
        name = self.weight.name
        if grad is not None and not bool(grad.isfinite().all()):
            what = f"the gradient of VCL layer {name!r} has NaN or infinite values"
        elif not bool(self.weight.read().isfinite().all()):
            what = f"the weights of VCL layer {name!r} have NaN or infinite values"
        else:
            what = f"the VCL step of layer {name!r} overflowed or its decomposition failed"
        return (
            f"{what}; weights and state are as before this step. Lower gamma, clip the gradients, or use "
            "anchor='initial' with second_order=False where alpha is large"
        )


def propose_all(units: Sequence[MatrixTrainer], states: Sequence[Mapping[str, Any]], gamma: float) -> list[Proposal]:
    """One step of every matrix, computed but not written. The doubts of all matrices are read from the device together.

    Raises:
        NumericalError: the step of some matrix failed; nothing has been changed.
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
        rows = iter(torch.stack([p.doubts.to(found[0].doubts) for p in found]).tolist() if found else ())
        waiting = []
        for i, proposal in tried.items():
            better = units[i].next_plan(plans[i], None if proposal is None else Doubts(*next(rows)))
            if better is not None:
                plans[i] = better
                waiting.append(i)
            elif proposal is not None:
                done[i] = proposal
    for i, unit in enumerate(units):
        check_representable(unit.weight, done[i].weights)
    return [done[i] for i in range(len(units))]


def _rank(name: str, k: int, d: int, rank: int | None) -> int:
    """How many directions the recursion keeps."""
    p = min(k, d)
    if rank is None:
        rank = d if d <= max(_UNTRUNCATED, 2 * p) else p + max(16, p // 16)
    elif rank < p:
        raise InputError(f"rank={rank}: layer {name!r} of shape {k} × {d} needs at least {p} directions")
    return min(rank, d)


def _precision(parameter: Tensor, precise: bool) -> torch.dtype:
    """Float64 where every step is meant to be exact; else the parameter's dtype, at least float32."""
    if parameter.device.type == "mps":
        return torch.float32
    return torch.float64 if precise else torch.promote_types(parameter.dtype, torch.float32)
