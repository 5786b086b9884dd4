"""Virtual covariance learning on stacks: the solvers of :mod:`gramscope.optim` with a leading axis of runs.

The decompositions are batched. Each run takes full and light steps when it would take them alone; where some runs need a
full step and others a light one, both are worked out and each run takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn, vmap
from typing_extensions import override

from gramscope.layers.linear_layer import Layer
from gramscope.optim import vcl_exact
from gramscope.optim.vcl_exact import Dense
from gramscope.optim.vcl_recursion import advance
from gramscope.optim.vcl_rules import Batch, Report
from gramscope.optim.vcl_state import MATRICES, Recursion, start
from gramscope.optim.vcl_unit import COOLING, FIRST, SETTLED, Unit
from gramscope.training.stacked_rules import Applications, Rule, Stack


class VCLRule(Rule):
    """VCL on the stacks of its layers.

    Args:
        units: the matrices as :class:`gramscope.VCL` made for one net of the stack trains them.
        template: that net, to know its parameters' names.
        params: all stacks.
        options: each run's options, γ under ``lr``.
        mean: whether losses are averaged over the batch.
        warm_up: steps at the start that leave these layers as they are.
        later: rules of other parameters that the warm-up leaves as they are too.
    """

    capturable = False  # full steps are decompositions, and which step is taken depends on numbers

    def __init__(
        self,
        units: Sequence[Unit],
        template: nn.Module,
        params: Stack,
        options: Sequence[Mapping[str, Any]],
        *,
        mean: bool,
        warm_up: int,
        later: Sequence[Rule] = (),
    ) -> None:
        names = {id(p): name for name, p in template.named_parameters()}
        mine = [names[id(p)] for unit in units for p in unit.target.parameters]
        super().__init__({name: params[name] for name in mine}, options)
        self.observed = tuple(unit.target.layers[0] for unit in units)
        self._mean = mean
        self._warm_up = warm_up
        self._later = later
        self._done = 0
        self._stacks = [_UnitStack(unit, names, len(options)) for unit in units]

    @override
    def update(self, grads: Stack, factor: Tensor, layers: Applications) -> None:
        self._done += 1
        if self._done <= self._warm_up:
            return
        gamma = self._numbers["lr"] * factor
        for stack in self._stacks:
            x, dz = layers[stack.layer.name]
            if self._mean:
                dz = dz * dz.shape[1]
            stack.step(self.params, x, dz, gamma)
        for rule in self._later:
            rule.update(grads, factor, layers)

    @override
    def export(self, run: int) -> Any:
        later = [rule.export(run) for rule in self._later]
        return {"done": self._done, "units": [stack.export(run) for stack in self._stacks], "later": later}

    @override
    def restore(self, states: Sequence[Any]) -> None:
        self._done = states[0]["done"]
        for number, stack in enumerate(self._stacks):
            stack.restore([state["units"][number] for state in states], self._device)
        for number, rule in enumerate(self._later):
            rule.restore([state["later"][number] for state in states])

    @override
    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(tensor for rule in self._later for tensor in rule.tensors())]


class _UnitStack:
    """One weight matrix of every run, with its state."""

    def __init__(self, unit: Unit, names: Mapping[int, str], runs: int) -> None:
        self.unit = unit
        self.layer: Layer = unit.target.layers[0]
        self._weight = names[id(unit.target.parameter)]
        self._bias = None if unit.target.bias is None else names[id(unit.target.bias)]
        self._few = not unit.direction.active and unit.solver == "recursive"
        self._state: Recursion | Dense | None = None
        self._momentum: Tensor | None = None
        self._steps, self._since, self._wait = [0] * runs, [0] * runs, [FIRST] * runs

    # -- one step -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, params: Stack, x: Tensor, dz: Tensor, gamma: Tensor) -> None:
        """Update the stacked weights from native inputs and output gradients of the summed loss, ``[runs, batch, …]``."""
        W = self._read(params)
        batch, sound = self._batch(x, dz)
        sound &= _per_run(W.isfinite(), torch.all)
        W = torch.where(_shaped(sound, W.dim()), W, 0.0)
        batch, self._momentum = self.unit.direction.of(batch, self._momentum)
        if self._state is None:
            begin = vcl_exact.start if self.unit.solver == "exact" else start
            self._state = begin(W, self.unit.rules)
        if isinstance(self._state, Dense):
            rate = _shaped(gamma, W.dim()).to(W.dtype)
            self._state, new, _ = vcl_exact.advance(self._state, W, batch, rate, self.unit.rules)
        else:
            new = self._recursive(self._state, batch, gamma)
        self._write(params, torch.where(_shaped(sound, new.dim()), new, torch.nan))

    def _recursive(self, state: Recursion, batch: Batch, gamma: Tensor) -> Tensor:
        due = [self._due(state, run) for run in range(len(self._steps))]
        need = due
        light = full = None
        if not all(due):
            light = self._advance(state, batch, gamma, full=False)
            broken = ~_per_run(light[1].isfinite(), torch.all)
            unsettled = light[2].unsettled
            doubtful = broken if unsettled is None else broken | ~_per_run(unsettled <= SETTLED, torch.all)
            need = [d or bool(b) for d, b in zip(due, doubtful.tolist(), strict=True)]
        if any(need):
            chosen = torch.tensor([run for run, takes_full in enumerate(need) if takes_full], device=gamma.device)
            full = self._advance(_of(state, chosen), _some(batch, chosen), gamma[chosen], full=True)
        for run, (was_due, takes_full) in enumerate(zip(due, need, strict=True)):
            self._steps[run] += 1
            self._since[run] = 0 if takes_full else self._since[run] + 1
            if takes_full and not was_due:
                self._wait[run] = self._steps[run] + COOLING
        if light is None or full is None:
            new, weights, _ = cast(tuple[Recursion, Tensor, Report], full or light)
        else:
            new = _put(light[0], chosen, full[0])
            weights = light[1].index_copy(0, chosen, full[1].to(light[1].dtype))
        self._state = new
        return weights

    def _advance(
        self, state: Recursion, batch: Batch, gamma: Tensor, *, full: bool
    ) -> tuple[Recursion, Tensor, Report]:
        rate = _shaped(gamma, state.basis.dim())  # one number a run
        return advance(state, batch, rate, self.unit.rules, self.unit.rank, full)

    def _due(self, state: Recursion, run: int) -> bool:
        facts = {"basis": state.basis, "since": self._since[run], "steps": self._steps[run], "wait": self._wait[run]}
        return self._steps[run] == 0 or self.unit.plan(facts).full

    # -- between stacks and normal form ---------------------------------------------------------------------------
    def _batch(self, x: Tensor, dz: Tensor) -> tuple[Batch, Tensor]:
        """What a batch brings, and which runs' part of it is finite; the others' is replaced by nothing."""
        layer, target, dtype = self.layer, self.unit.target, self.unit.dtype
        rows = vmap(lambda one: target.rows(layer, one))(x).to(dtype)
        delta = vmap(lambda one: layer.kind.outputs(layer.module, one).flatten(-3, -2))(dz).to(dtype)
        sound = _per_run(rows.isfinite(), torch.all) & _per_run(delta.isfinite(), torch.all)
        rows, delta = (torch.where(_shaped(sound, t.dim()), t, 0.0) for t in (rows, delta))
        sigma = delta.mT @ delta if self.unit.rules.second_order else None
        if self._few and delta.shape[-2] <= delta.shape[-1]:
            return Batch(rows, delta, sigma), sound
        return Batch(delta.mT @ rows, None, sigma), sound

    def _read(self, params: Stack) -> Tensor:
        matrix = vmap(self.layer.matrix)(params[self._weight])
        if self._bias is not None:
            matrix = torch.cat([matrix, params[self._bias].reshape(*matrix.shape[:-1], 1)], -1)
        return matrix.to(self.unit.dtype)

    def _write(self, params: Stack, matrix: Tensor) -> None:
        if self._bias is not None:
            params[self._bias].copy_(matrix[..., -1].reshape(params[self._bias].shape))
            matrix = matrix[..., :-1]
        vmap(self.layer.matrix)(params[self._weight]).copy_(matrix)  # a view: this writes the parameter

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def export(self, run: int) -> dict[str, Any]:
        """One run's state."""
        names = ("matrix",) if isinstance(self._state, Dense) else MATRICES
        matrices = {} if self._state is None else {name: getattr(self._state, name)[run] for name in names}
        momentum = None if self._momentum is None else self._momentum[run]
        counts = {"steps": self._steps[run], "since": self._since[run], "wait": self._wait[run]}
        return {"matrices": matrices, "momentum": momentum, **counts}

    def restore(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Continue from every run's state."""
        self._steps, self._since, self._wait = ([state[key] for state in states] for key in ("steps", "since", "wait"))
        if states[0]["momentum"] is not None:
            self._momentum = torch.stack([state["momentum"] for state in states]).to(device)
        if states[0]["matrices"]:
            found = {
                name: torch.stack([state["matrices"][name] for state in states]).to(device)
                for name in states[0]["matrices"]
            }
            if self.unit.solver == "exact":
                self._state = Dense(**found)
            else:
                self._state = Recursion(**found, steps=self._steps[0], since=self._since[0])


def _shaped(values: Tensor, dim: int) -> Tensor:
    """``[runs]`` shaped to go with a tensor of ``dim`` axes, the first of which is the runs'."""
    return values.reshape(-1, *([1] * (dim - 1)))


def _per_run(values: Tensor, how: Any) -> Tensor:
    """``all`` or ``any`` over everything but the runs."""
    return cast(Tensor, how(values.reshape(len(values), -1), dim=1))


def _of(state: Recursion, runs: Tensor) -> Recursion:
    """The state of some runs."""
    matrices = {name: getattr(state, name)[runs] for name in MATRICES}
    return Recursion(**matrices, steps=state.steps, since=state.since)


def _some(batch: Batch, runs: Tensor) -> Batch:
    """The batch of some runs."""
    left, sigma = (None if tensor is None else tensor[runs] for tensor in (batch.left, batch.sigma))
    return Batch(batch.rows[runs], left, sigma)


def _put(state: Recursion, runs: Tensor, new: Recursion) -> Recursion:
    """The state with that of some runs replaced."""
    pairs = {name: (getattr(state, name), getattr(new, name)) for name in MATRICES}
    chosen = {name: old.index_copy(0, runs, value.to(old.dtype)) for name, (old, value) in pairs.items()}
    return Recursion(**chosen, steps=new.steps, since=min(new.since, state.since))
