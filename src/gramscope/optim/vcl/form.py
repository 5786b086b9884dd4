"""The two forms of VCL's steps have this interface: averaged steps, here, and :mod:`gramscope.optim.vcl.algorithm_1`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import override

from gramscope.errors import NumericalError
from gramscope.optim.vcl.averaged import AveragedStep, AveragedTrainer, propose_averaged
from gramscope.optim.vcl.execution_order import Trained
from gramscope.optim.vcl.matrix_step import Proposal
from gramscope.optim.vcl.matrix_trainer import MatrixTrainer
from gramscope.optim.weight_matrix import WeightMatrix

#: one matrix and how it is trained
Unit: TypeAlias = MatrixTrainer | AveragedTrainer
#: the state of a unit, empty before its first step
StateOf: TypeAlias = Callable[[Any], Mapping[str, Any]]


class Form(ABC):
    """The matrices that take steps of one form.

    Attributes:
        head: the layer that is left to the readout optimizer, if any.
        complete: whether the state of every layer is in this process.
    """

    def __init__(self) -> None:
        self.head: Trained | None = None
        self.complete = True

    @property
    @abstractmethod
    def all_units(self) -> Sequence[Unit]:
        """All matrices that can be trained, also the head's."""

    @property
    def units(self) -> Sequence[Unit]:
        """The matrices that are trained."""
        return [unit for unit in self.all_units if unit.weight is not self.head]

    @abstractmethod
    def propose(
        self, state_of: StateOf, group: Mapping[str, Any], problem: NumericalError | None
    ) -> Iterable[tuple[Unit, Proposal | AveragedStep]]:
        """The steps that this process computes, not yet written.

        Args:
            state_of: the state of each unit.
            group: VCL's parameter group.
            problem: why no step can be taken in this process. It is raised where the steps themselves raise nothing, by
                all processes that would wait for this one.
        """

    def finish(self, state: MutableMapping[Tensor, Any]) -> None:  # noqa: B027
        """Do what remains after the steps were written; ``state`` is that of the optimizer."""

    def clear(self) -> None:  # noqa: B027
        """Forget gathered gradients."""

    def close(self) -> None:  # noqa: B027
        """Remove all hooks."""

    def owners(self) -> Mapping[WeightMatrix, int]:
        """The process that computes the steps of each matrix, where there are several processes."""
        return {}

    def consolidate(self, state: MutableMapping[Tensor, Any]) -> None:  # noqa: B027
        """Give every process the state of all layers."""


class Averaged(Form):
    """Averaged steps. They need ``.grad`` alone, which is the same in all processes, so that each takes all of them."""

    def __init__(self, units: Sequence[AveragedTrainer]) -> None:
        super().__init__()
        self._units = units

    @property
    @override
    def all_units(self) -> Sequence[AveragedTrainer]:
        return self._units

    @override
    def propose(
        self, state_of: StateOf, group: Mapping[str, Any], problem: NumericalError | None
    ) -> Iterable[tuple[AveragedTrainer, AveragedStep]]:
        units = [unit for unit in self._units if unit.weight is not self.head]
        factor = _factor(float(group["lr"]), float(group["gamma"]), float(group["alpha"]))
        steps = propose_averaged(units, [state_of(unit) for unit in units], factor)
        if problem is not None:
            raise problem
        return steps.items()


def _factor(gamma: float, start: float, alpha: float) -> float:
    """What multiplies averaged steps, ``γ γ₀^(2α−1)``; γ₀ is the γ given at the start and γ the scheduled one.

    To first order Algorithm 1 depends on them in this way: its step is ``−γ Λ^(2α−1) D``, and Λ grows with γ₀.
    """
    return gamma * (start or gamma) ** (2 * alpha - 1) if gamma else 0.0
