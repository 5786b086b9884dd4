"""Gram-whitened updates: any optimizer's step without the part that leaves the weights' Gram unchanged."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gramscope.errors import InputError, NumericalError
from gramscope.linalg.autocast import without_autocast
from gramscope.linalg.kept_basis import KeptBasis
from gramscope.linalg.polar import PolarMethod
from gramscope.linalg.procrustes import Replays, nearest_with_gram
from gramscope.optim.choose_matrices import Parameters, choose_matrices
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
        params: Parameters | None = None,
        readout: bool = True,
        method: PolarMethod = "auto",
    ) -> None:
        if method not in get_args(PolarMethod):
            raise InputError(f"method={method!r}; choose one of {', '.join(map(repr, get_args(PolarMethod)))}")
        super().__init__(optimizer)
        self.method: PolarMethod = method
        self._replays = Replays()
        self._model = model
        several = isinstance(params, Iterable) and not isinstance(params, str | Tensor)
        self._params = list(params) if several else params  # type: ignore[arg-type]
        self._readout = readout
        self._bases: dict[str, list[KeptBasis]] = {}
        self._choose()

    def _choose(self) -> None:
        self._snapshots: dict[Tensor, Tensor] = {}
        self._choice = choose_matrices(self.param_groups, self._model, self._params, self._readout)
        self._count = self._parameter_count()

    def _parameter_count(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @abstractmethod
    def corrected(self, before: Tensor, proposed: Tensor, kept: Sequence[KeptBasis]) -> Tensor:
        """The weights ``[count, k, d]`` that replace the proposal of the wrapped optimizer."""

    def summary(self) -> str:
        """A table of all parameters: which are worked on, as which matrices, and why the others are not."""
        self._follow_groups()
        return f"{type(self).__name__} around {type(self.optimizer).__name__}\n{self._choice.table(self.verb)}"

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the wrapped optimizer, then the correction of every chosen matrix.

        A parameter the wrapped optimizer did not touch (no gradient) is left as it is.
        """
        self._follow_groups()
        before = {matrix.parameter: self._snapshot(matrix.parameter) for matrix in self._choice.matrices}
        versions = {parameter: parameter._version for parameter in before}
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        touched = [
            matrix
            for matrix in self._choice.matrices
            if matrix.parameter.grad is not None or matrix.parameter._version != versions[matrix.parameter]
        ]
        self._correct(touched, before)
        return loss

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

    def _kept(self, matrix: WeightMatrix) -> list[KeptBasis]:
        if matrix.name not in self._bases:
            self._bases[matrix.name] = [KeptBasis() for _ in range(matrix.shape[:-2].numel())]
        return self._bases[matrix.name]

    @override
    def own_state(self) -> dict[str, Any]:
        bases = {
            name: [vars(basis).copy() for basis in kept]
            for name, kept in self._bases.items()
            if any(basis.used for basis in kept)
        }
        return {"gram_bases": bases} if bases else {}

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        saved = state.get("gram_bases", {})
        self._bases = {}
        for matrix in self._choice.matrices:
            stored = [KeptBasis(**values) for values in saved.get(matrix.name, [])]
            if len(stored) == len(self._kept(matrix)) and all(basis.fits(matrix.shape[-2]) for basis in stored):
                self._bases[matrix.name] = [basis.to(matrix.parameter.device) for basis in stored]

    def _follow_groups(self) -> None:
        """Parameter groups may have been added, here or to the wrapped optimizer."""
        if self._parameter_count() != self._count:
            self._choose()

    @torch.no_grad()
    def _correct(self, matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor]) -> None:
        stacks: dict[tuple[Any, ...], list[WeightMatrix]] = defaultdict(list)
        for matrix in matrices:
            k, d = matrix.shape[-2:]
            stacks[k, d, matrix.parameter.dtype, matrix.parameter.device].append(matrix)
        for (k, d, _, device), alike in stacks.items():
            with without_autocast(device):
                for some in _portions(alike, max(1, _STACK_ENTRIES // (k * d))):
                    self._correct_stack(some, before)

    def _correct_stack(self, matrices: Sequence[WeightMatrix], before: dict[Tensor, Tensor]) -> None:
        old = _stacked([matrix.view(before[matrix.parameter]) for matrix in matrices])
        new = _stacked([matrix.view(matrix.parameter) for matrix in matrices])
        try:
            corrected = self.corrected(old, new, [basis for matrix in matrices for basis in self._kept(matrix)])
        except NumericalError:
            broken = [matrix.name for matrix in matrices if not bool(matrix.parameter.isfinite().all())]
            if not broken:
                raise
            raise NumericalError(
                f"the step of {type(self.optimizer).__name__} left NaN or infinite values in {', '.join(broken)}; lower the "
                "learning rate, clip the gradients, or skip such steps (torch.amp.GradScaler does)"
            ) from None
        if len(matrices) == 1:  # a slice and its new shape take a twentieth of the time that the host spends on a step
            matrices[0].assign(corrected[0] if len(matrices[0].shape) == 2 else corrected)
            return
        start = 0
        for matrix in matrices:
            count = matrix.shape[:-2].numel()
            matrix.assign(corrected[start : start + count].reshape(matrix.shape))
            start += count


class GramWhitened(_GramUpdate):
    """Wraps any torch optimizer so that only the part of its step that changes the Gram WᵀW is taken.

    The wrapped optimizer proposes ``W₂`` from ``W₁``; the weights become ``W⁺ = polar(W₁W₂ᵀ) W₂``. ``W⁺`` has exactly the
    Gram of ``W₂`` and is the closest such matrix to ``W₁`` ([Gram] §2, B.1). Biases and everything that is not chosen move
    as the wrapped optimizer moves them. Momentum and other state are the wrapped optimizer's own.

    Args:
        optimizer: a constructed torch optimizer (SGD, AdamW, Muon, …); kept as ``.optimizer``.
        model: the model it trains. Every linear-like layer's weight is whitened in its matrix form: convolutions as
            ``[out, in·kh·kw]``, grouped ones per group, the projections inside ``nn.MultiheadAttention`` one by one.
        params: the tensors to whiten (or ``(name, tensor)`` pairs, or names of the model's layers or weights). With neither
            ``model`` nor ``params`` every tensor of two or more dimensions is taken as ``[shape[0], -1]``; groups of
            convolutions cannot be known then.
        readout: ``False`` leaves the model's last linear-like layer (as registered) to the wrapped optimizer.
        method: how the polar factor is computed, see :func:`gramscope.polar`. ``"auto"`` is the fastest that is exact,
            ``"svd"`` the reference, ``"newton-schulz"`` products only, with a convergence test.

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
    def corrected(self, before: Tensor, proposed: Tensor, kept: Sequence[KeptBasis]) -> Tensor:
        return nearest_with_gram(before, proposed, self.method, self._replays, kept)


class GramFixed(_GramUpdate):
    """The complementary control: takes only the part of the step that :class:`GramWhitened` removes.

    ``W⁺ = polar(W₂W₁ᵀ) W₁``, the matrix nearest to the proposal whose Gram is that of ``W₁``: the Gram WᵀW never changes,
    the layer only rotates its outputs. Arguments as for :class:`GramWhitened`.
    """

    verb = "kept at its Gram"

    @override
    def corrected(self, before: Tensor, proposed: Tensor, kept: Sequence[KeptBasis]) -> Tensor:
        return nearest_with_gram(proposed, before, self.method, self._replays, kept)


def _portions(matrices: Sequence[WeightMatrix], size: int) -> Iterator[Sequence[WeightMatrix]]:
    for start in range(0, len(matrices), size):
        yield matrices[start : start + size]


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices and stacks of matrices of one shape as ``[count, k, d]``; a single one is not copied."""
    parts = [matrix.unsqueeze(0) if matrix.ndim == 2 else matrix for matrix in matrices]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
