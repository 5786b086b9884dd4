"""One step of one matrix, from its state and gradients to a proposal; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramscope.linalg.cuda_graph import Replay, Tensors
from gramscope.optim.vcl import exact
from gramscope.optim.vcl.direction import Direction
from gramscope.optim.vcl.gradients import Gradients, relative_distance
from gramscope.optim.vcl.recursion import advance
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Batch, Rules
from gramscope.optim.vcl.state import MATRICES, Recursion, rebased, start

#: the tensors of a recursion that a light step changes
_MOVED = ("basis", "shift", "weights", "rotation")
#: the tensors that a light step computes for its report
_REPORTED = ("before", "size", "discarded", "unsettled", "own", "rest")


class Doubts(NamedTuple):
    """Numbers that decide whether a proposal is taken; 0 where one does not apply.

    Attributes:
        norm: of the new weights; not finite where something overflowed.
        unsettled: error estimate of a light step.
        gradient: relative distance of ``.grad`` from the sum over the kept rows.
        weights: relative distance of the parameter from the weights in the state.
        cut: number of positive eigenvalues taken as zero.
    """

    norm: float
    unsettled: float
    gradient: float
    weights: float
    cut: float


@dataclass(frozen=True)
class Proposal:
    """New weights and state of one matrix, with its :class:`Doubts` as a tensor ``[5]`` that is still on the device."""

    weights: Tensor
    state: dict[str, Any]
    report: Report
    doubts: Tensor


class MatrixStep:
    """Computes full and light steps by given rules.

    Args:
        rules: the form of the algorithm.
        direction: what replaces the gradient.
        rank: directions that the recursion keeps; None selects the exact solver.
        probe: gives a fixed random vector ``[d]`` on the device of a tensor.
    """

    def __init__(self, rules: Rules, direction: Direction, rank: int | None, probe: Callable[[Tensor], Tensor]) -> None:
        self._rules = rules
        self._direction = direction
        self._rank = rank
        self._probe = probe
        self._light = Replay(self._light_tensors)

    def full(
        self, state: Mapping[str, Any], W: Tensor, given: Gradients, gamma: float, *, changed: bool = False
    ) -> Proposal:
        """A step with a decomposition.

        Args:
            state: of the matrix; empty before the first step.
            W: its weights ``[…, k, d]`` in the precision to compute in.
            given: its gradients.
            gamma: step γ of the virtual update.
            changed: whether W was changed since the last step, so that the state must be brought to it.
        """
        batch, mean = self._direction.of(given.batch, state.get("momentum"))
        distance = None
        if self._rank is None:
            before = exact.Dense(state["matrix"]) if "matrix" in state else exact.start(W, self._rules)
            dense, weights, report = exact.advance(before, W, batch, gamma, self._rules)
            values: dict[str, Any] = {"matrix": dense.matrix}
        else:
            if "basis" not in state:
                recursion = start(W, self._rules)
            else:
                recursion = Recursion(**{f.name: state[f.name] for f in fields(Recursion)})
                if changed:
                    recursion = rebased(recursion, W)
                else:
                    distance = self._distance(recursion, W)
            recursion, weights, report = advance(recursion, batch, gamma, self._rules, self._rank)
            values = {f.name: getattr(recursion, f.name) for f in fields(Recursion)}
        if mean is not None:
            values["momentum"] = mean
        doubts = _doubts(weights, gradient=given.distance, weights=distance, cut=report.cut().sum())
        return Proposal(weights, values, report, doubts)

    def light(self, state: Mapping[str, Any], W: Tensor, given: Gradients, gamma: float) -> Proposal:
        """A step of products only, replayed as a CUDA graph; arguments as for :meth:`full`."""
        batch = given.batch
        tensors = {name: state[name] for name in MATRICES}
        tensors |= {"W": W, "rows": batch.rows, "gamma": torch.full((), gamma, dtype=W.dtype, device=W.device)}
        optional = {"left": batch.left, "sigma": batch.sigma, "distance": given.distance}
        optional["momentum"] = state.get("momentum")
        found = self._light(tensors | {name: x for name, x in optional.items() if x is not None})
        values = {**state, **{name: found[name] for name in (*_MOVED, "momentum") if name in found}}
        values["steps"], values["since"] = state["steps"] + 1, state["since"] + 1
        told = {name: found.get(name) for name in _REPORTED}
        report = Report(state["eigenvalues"], state["singular_values"], after=found["weights"], **told)  # type: ignore[arg-type]
        return Proposal(found["matrix"], values, report, found["doubts"])

    def _light_tensors(self, given: Tensors) -> dict[str, Tensor]:
        """A light step as a function of tensors alone."""
        batch = Batch(given["rows"], given.get("left"), given.get("sigma"))
        batch, mean = self._direction.of(batch, given.get("momentum"))
        matrices: dict[str, Any] = {name: given[name] for name in MATRICES}
        state = Recursion(**matrices)
        assert self._rank is not None
        new, matrix, report = advance(state, batch, given["gamma"], self._rules, self._rank, full=False)
        assert report.unsettled is not None
        doubts = _doubts(
            matrix,
            unsettled=report.unsettled.amax(),
            gradient=given.get("distance"),
            weights=self._distance(state, given["W"]),
        )
        found = {name: getattr(new, name) for name in _MOVED} | {"matrix": matrix, "doubts": doubts}
        optional = {"momentum": mean, **{name: getattr(report, name) for name in _REPORTED}}
        return found | {name: x for name, x in optional.items() if x is not None}

    def _distance(self, state: Recursion, W: Tensor) -> Tensor:
        """Relative distance of W from the weights in the state, seen through the probe."""
        probe = self._probe(W)
        own = state.basis[..., : state.weights.shape[-1], :] @ probe
        return relative_distance((state.weights.to(W.dtype) @ own.unsqueeze(-1)).squeeze(-1), W @ probe)


def _doubts(new: Tensor, **found: Tensor | None) -> Tensor:
    """:class:`Doubts` as one tensor; those not given are 0."""
    norm: Tensor = torch.linalg.vector_norm(new)
    zero = torch.zeros((), dtype=norm.dtype, device=norm.device)
    others = (found.get(name) for name in Doubts._fields[1:])
    return torch.stack([norm, *(zero if x is None else x.to(norm.dtype) for x in others)])
