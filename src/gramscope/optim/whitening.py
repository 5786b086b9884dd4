"""Gram-whitened updates: any optimizer's step without the part that leaves the weights' Gram unchanged."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from gramscope.distributed.exchange import Group, find_exchange, is_sharded
from gramscope.errors import InputError, NumericalError
from gramscope.layers.modules import outside_graphs
from gramscope.layers.select import LayerSelector
from gramscope.linalg.arrays import without_autocast
from gramscope.optim.choose_matrices import choose_matrices
from gramscope.optim.polar import PolarMethod
from gramscope.optim.processes import check_together, divided, sharded, shards
from gramscope.optim.procrustes import nearest_with_gram
from gramscope.optim.weight_matrix import WeightMatrix
from gramscope.optim.wrapper import OptimizerWrapper

#: equal-shaped matrices are worked on together up to this many entries
_STACK_ENTRIES = 1 << 22


class _GramUpdate(OptimizerWrapper):
    """What :class:`GramWhitened` and :class:`GramFixed` share: snapshot, wrapped step, correction, equal shapes stacked."""

    #: what is done to a matrix, for the summary
    verb: str

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        layers: LayerSelector = None,
        readout: bool | str = "auto",
        method: PolarMethod = "auto",
        process_group: Group = None,
    ) -> None:
        if method not in get_args(PolarMethod):
            raise InputError(f"method={method!r}; choose one of {', '.join(map(repr, get_args(PolarMethod)))}")
        self._method: PolarMethod = method
        super().__init__(optimizer)
        # without a sign that processes hold the same weights, each corrects its own
        known = process_group is not None or isinstance(model, DistributedDataParallel)
        self._exchange = find_exchange(process_group, model) if known else None
        self._model = model
        self._layers, self._readout = layers, readout
        self._choose()

    def _choose(self) -> None:
        self._snapshots: dict[Tensor, Tensor] = {}
        self._choice = choose_matrices(self.param_groups, self._model, self._layers, self._readout)
        self._shards = [matrix for matrix in self._choice.matrices if is_sharded(matrix.parameter)]
        self._count = self._parameter_count()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _parameter_count(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @abstractmethod
    def corrected(self, before: Tensor, proposed: Tensor) -> Tensor:
        """The weights ``[count, k, d]`` that replace the proposal of the wrapped optimizer."""

    def summary(self) -> str:
        """A table of all parameters: which are corrected, as which matrices, and why the others are not."""
        self._follow_groups()
        return f"{type(self).__name__} around {type(self.optimizer).__name__}\n{self._choice.table(self.verb)}"

    @override
    @outside_graphs
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the wrapped optimizer, then the correction of every chosen matrix.

        A parameter the wrapped optimizer did not touch (no gradient) is left as it is.

        Raises:
            NumericalError: a gradient or a proposal is not finite. Gradients are checked before anything changes, those of a
                closure when it returns. A proposal can be checked only afterwards: then all parameters get their old values
                back, as after any other error; the wrapped optimizer's own state (momentum) has then taken in the gradient.
        """
        self._follow_groups()
        if closure is None:
            self._check_gradients()
        before = {matrix.parameter: self._snapshot(matrix.parameter) for matrix in self._choice.matrices}
        for parameter in self._parameters():
            if parameter not in before and (closure is not None or parameter.grad is not None):
                before[parameter] = self._snapshot(parameter)
        versions = {parameter: parameter._version for parameter in before}
        try:
            loss = self.optimizer.step() if closure is None else self.optimizer.step(self._checked(closure))
            touched = [
                matrix
                for matrix in self._choice.matrices
                if matrix.parameter.grad is not None or matrix.parameter._version != versions[matrix.parameter]
            ]
            corrections = self._all_corrections(touched, before)
        except BaseException:
            with torch.no_grad():
                for parameter, old in before.items():
                    parameter.copy_(old)
            raise
        with torch.no_grad():
            for write in corrections:
                write()
        return loss

    @torch.no_grad()
    def _all_corrections(
        self, matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor]
    ) -> list[Callable[[], object]]:
        """Functions that write the corrections of whole matrices, perhaps divided among processes, and of sharded ones."""
        others = [matrix for matrix in matrices if matrix in self._shards]
        whole = [matrix for matrix in matrices if matrix not in self._shards]
        found: list[Callable[[], object]]
        if whole and self._exchange is not None:
            found = divided(whole, partial(self._corrections, before=before), self._exchange)
        else:
            found = [partial(matrix.assign, weights) for matrix, weights in self._corrections(whole, before)]
        if not others:
            return found
        with without_autocast(others[0].parameter.device):
            return found + sharded(others, before, self.corrected)

    def _checked(self, closure: Callable[[], float]) -> Callable[[], float]:
        """The closure, and a check of the gradients it leaves, before the wrapped optimizer uses them."""

        def call() -> float:
            loss = closure()
            self._check_gradients()
            return loss

        return call

    @torch.no_grad()
    def _check_gradients(self) -> None:
        """Raise if a gradient is not finite; nothing has been changed yet."""
        dense = [p for p in self._parameters() if p.grad is not None and not p.grad.is_sparse]
        groups = {} if self._exchange is None else {self._exchange.group.group_name: self._exchange}
        if self._shards:
            groups |= {e.group.group_name: e for p in dense if is_sharded(p) and (e := shards(p)[0])}
        device = self._choice.matrices[0].parameter.device
        check_together({p: self._choice.names[p] for p in dense}, list(groups.values()), device)

    def _snapshot(self, parameter: Tensor) -> Tensor:
        """A copy of the parameter; on the CPU in memory kept from the last step, as new memory costs more than the copy."""
        if parameter.device.type != "cpu":
            return parameter.detach().clone()
        kept = self._snapshots.get(parameter)
        if kept is None or kept.shape != parameter.shape or kept.dtype != parameter.dtype:
            kept = self._snapshots[parameter] = torch.empty_like(parameter)
        return kept.copy_(parameter.detach())

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_snapshots": {}}

    def _follow_groups(self) -> None:
        """Parameter groups may have been added, here or to the wrapped optimizer."""
        if self._parameter_count() != self._count:
            self._choose()

    @torch.no_grad()
    def _corrections(
        self, matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor]
    ) -> list[tuple[WeightMatrix, Tensor]]:
        """The new weights of each matrix."""
        stacks: dict[tuple[Any, ...], list[WeightMatrix]] = defaultdict(list)
        for matrix in matrices:
            k, d = matrix.shape[-2:]
            stacks[k, d, matrix.parameter.dtype, matrix.parameter.device].append(matrix)
        corrections = []
        for (k, d, _, device), alike in stacks.items():
            size = max(1, _STACK_ENTRIES // (k * d))
            with without_autocast(device):
                for start in range(0, len(alike), size):
                    corrections += self._correct_stack(alike[start : start + size], before)
        return corrections

    def _correct_stack(
        self, matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor]
    ) -> list[tuple[WeightMatrix, Tensor]]:
        old = _stacked([matrix.view(before[matrix.parameter]) for matrix in matrices])
        new = _stacked([matrix.view(matrix.parameter) for matrix in matrices])
        try:
            found = self.corrected(old, new)
        except NumericalError as error:
            name = type(self.optimizer).__name__
            broken = [matrix.name for matrix in matrices if not bool(matrix.parameter.isfinite().all())]
            problem = f"the step of {name} left NaN or infinite values in {', '.join(broken)}"
            if not broken:
                problem = f"the step of {name} in {', '.join(matrix.name for matrix in matrices)}: {error}"
            raise NumericalError(
                f"{problem}; all parameters have their old values again. Lower the learning rate"
            ) from None
        parts = torch.split(found, [matrix.shape[:-2].numel() for matrix in matrices])
        return [(matrix, part.reshape(matrix.shape)) for matrix, part in zip(matrices, parts, strict=True)]


class GramWhitened(_GramUpdate):
    """Wraps any torch optimizer so that only the part of its step that changes the Gram WᵀW is taken.

    The wrapped optimizer proposes ``W₂`` from ``W₁``; the weights become ``W⁺ = polar(W₁W₂ᵀ) W₂``. ``W⁺`` has exactly the
    Gram of ``W₂``, and its distance from ``W₁`` is within 2 % of the least one possible ([Gram] §2, B.1). Biases
    and everything that is not chosen move as the wrapped optimizer moves them. Momentum and other state are its own.

    Args:
        optimizer: a constructed torch optimizer (SGD, AdamW, Muon, …); kept as ``.optimizer``.
        model: the model it trains. Every linear-like layer's weight is whitened in its matrix form: convolutions as
            ``[out, in·kh·kw]``, grouped ones per group, the projections inside ``nn.MultiheadAttention`` one by one. Without a
            model every tensor of two or more dimensions is taken as ``[shape[0], -1]``; groups of convolutions cannot be known
            then.
        layers: names, globs or module types of the layers to whiten, in place of all.
        readout: ``False`` leaves the model's last linear-like layer (as registered) to the wrapped optimizer. ``"auto"``, the
            default, does so where it is the head of a language model: tied to an embedding, or with one output per word of
            a vocabulary (as many as an embedding has rows, or eight times its inputs). :meth:`summary` says which and why.
        method: ``"auto"`` gives the Gram to rounding and nearly the closest such matrix, by conjugate gradients where the step
            is small (:func:`~gramscope.optim.procrustes.nearest_with_gram`). ``"svd"`` computes the polar factor itself.
        process_group: processes that hold the same weights and divide the corrections among them, by default those of a
            ``DistributedDataParallel`` model; ``False``: every process corrects all. Parameters sharded by ``fully_shard`` or
            as other DTensors are corrected by the processes that hold them (:mod:`gramscope.optim.processes`).

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
        >>> optimizer = gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        >>> print(optimizer.summary())
        GramWhitened around SGD
        parameter  matrix
        0.weight   16 × 8  whitened
        2.weight   3 × 16  whitened
        0.bias             not whitened: 1-dimensional, not a matrix
        2.bias             not whitened: 1-dimensional, not a matrix
    """

    verb = "whitened"

    @override
    def corrected(self, before: Tensor, proposed: Tensor) -> Tensor:
        return nearest_with_gram(before, proposed, self._method)


class GramFixed(_GramUpdate):
    """The complementary control: takes only the part of the step that :class:`GramWhitened` removes.

    ``W⁺ = polar(W₂W₁ᵀ) W₁``, the matrix nearest to the proposal whose Gram is that of ``W₁``: the Gram WᵀW never changes,
    the layer only rotates its outputs. Arguments as for :class:`GramWhitened`.
    """

    verb = "kept at its Gram"

    @override
    def corrected(self, before: Tensor, proposed: Tensor) -> Tensor:
        return nearest_with_gram(proposed, before, self._method)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices and stacks of matrices of one shape as ``[count, k, d]``; a single one is not copied."""
    parts = [matrix.unsqueeze(0) if matrix.ndim == 2 else matrix for matrix in matrices]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
