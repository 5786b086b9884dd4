"""The steps of [VCL] Algorithm 1: gradients that hooks gather, and the work divided among processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from gramscope.distributed.exchange import Exchange
from gramscope.errors import NumericalError
from gramscope.layers.linear_layer import Layer
from gramscope.optim.vcl.form import Form, StateOf
from gramscope.optim.vcl.matrix_step import Proposal
from gramscope.optim.vcl.matrix_trainer import MatrixTrainer, propose_all
from gramscope.optim.vcl.model_hooks import ModelHooks, Reduction
from gramscope.optim.vcl.processes import active_units, owners, propose_own, send_weights
from gramscope.optim.weight_matrix import WeightMatrix


class Algorithm1(Form):
    """Steps of Algorithm 1.

    Args:
        model: its layers get hooks.
        units: the matrices.
        untrained: layers without a matrix.
        reduction: how the loss is reduced over the batch.
        exchange: the processes that average their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[MatrixTrainer],
        untrained: Sequence[Layer],
        reduction: Reduction,
        exchange: Exchange | None,
    ) -> None:
        super().__init__()
        self._units = units
        self._exchange = exchange
        self._stepping: Sequence[MatrixTrainer] = []
        for unit in units:
            unit.gatherer.averaged = exchange is not None
        self._hooks = ModelHooks(model, [unit.gatherer for unit in units], reduction, untrained)

    @property
    @override
    def all_units(self) -> Sequence[MatrixTrainer]:
        return self._units

    @property
    @override
    def units(self) -> Sequence[MatrixTrainer]:
        return [unit for unit in self._units if unit.weight is not self.head]

    @override
    def propose(
        self, state_of: StateOf, group: Mapping[str, Any], problem: NumericalError | None
    ) -> Iterable[tuple[MatrixTrainer, Proposal]]:
        gamma, own = float(group["lr"]), self.units
        if self._exchange is None:
            units = self._stepping = [unit for unit in own if not unit.gatherer.idle] or own
            proposals = propose_all(units, [state_of(unit) for unit in units], gamma)
            if problem is not None:
                raise problem
            return zip(units, proposals, strict=True)
        units = self._stepping = active_units(own, self._exchange)
        states, owner = [state_of(unit) for unit in units], self.owners()
        return propose_own(
            units, [owner[unit.weight] for unit in units], states, gamma, self._exchange, problem
        ).items()

    @override
    def finish(self, state: MutableMapping[Tensor, Any]) -> None:
        """Send the new weights to all processes, and drop the states, now out of date, that other processes own."""
        units, owner = self._stepping, self.owners()
        if self._exchange is not None:
            send_weights(units, [owner[unit.weight] for unit in units], self._exchange)
            self.complete = False
            for unit in units:
                if owner[unit.weight] != self._exchange.rank:
                    state.pop(unit.weight.parameter, None)
                    unit.report = None
        for unit in units:
            unit.written()
        self.clear()

    @override
    def clear(self) -> None:
        self._hooks.clear()

    @override
    def close(self) -> None:
        self._hooks.close()

    @override
    def owners(self) -> Mapping[WeightMatrix, int]:
        if self._exchange is None:
            return {}
        return dict(zip((unit.weight for unit in self.units), owners(self.units, self._exchange.size), strict=True))

    @override
    def consolidate(self, state: MutableMapping[Tensor, Any]) -> None:
        if self._exchange is None or self.complete:
            return
        for parameter, rank in {weight.parameter: rank for weight, rank in self.owners().items()}.items():
            own = rank == self._exchange.rank
            sent = tree_map_only(Tensor, partial(torch.Tensor.to, device="cpu"), dict(state.get(parameter, {})))
            received = self._exchange.object_from(rank, sent if own else {})
            if received and not own:
                state[parameter] = tree_map_only(Tensor, partial(torch.Tensor.to, device=parameter.device), received)
        self.complete = True
