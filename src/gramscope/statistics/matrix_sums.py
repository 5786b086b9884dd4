"""Sums of matrices at a layer: ``D = Σ δhᵀ``, Σ of the gradients at its outputs, and the tangent kernel K of its Jacobians."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.linalg.budget import FEWEST, Budget
from gramscope.linalg.gram import Dense, Estimated, Factor, Factored, Gram
from gramscope.linalg.psd import SymmetricSum
from gramscope.linalg.stochastic import gram_times, onto_columns, probes
from gramscope.statistics.sums import LeftOut, NotCollected, Plan, Seen, Sum, added, finite

#: samples whose gradients are summed in the model's precision
SAMPLES = 4096


class Gradient(Sum):
    """``D [..., k, d]``.

    It is summed in the model's precision over a limited number of samples, then in the precision of the sums: one float32
    product over 4,096 samples rounds like several that add up to it, and adding inside the product saves a pass over a matrix
    as large as the weight for every batch. Of a large layer it stays in the model's precision.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"delta"})
    symbol: ClassVar[str] = "D"
    ask: ClassVar[str] = "a loss"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._dtype, self._copied = plan.dtype, plan.snapshot
        self._one_precision = plan.is_estimated(weight)
        self._samples = 0
        self._recent: Tensor | None = None
        self._total: Tensor | None = None

    @override
    def add(self, seen: Seen) -> None:
        assert seen.record is not None
        if self._recent is None:
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self._recent = torch.zeros_like(self.weight, dtype=dtype)
        seen.record.add_gradient(self._recent)
        self._samples += seen.batch.n
        if self._samples >= SAMPLES and not self._one_precision:
            self._flush()

    def _add(self, value: Tensor) -> None:
        if self._total is None:
            dtype = value.dtype if self._one_precision else self._dtype
            self._total = value.to("cpu" if value.device.type == "mps" else value.device, dtype)
        else:
            self._total.add_(value)

    def _flush(self) -> None:
        if self._recent is not None:
            self._add(self._recent)
        self._recent, self._samples = None, 0

    @override
    def finish(self) -> None:
        if self._copied or self._total is not None:
            self._flush()
        elif self._recent is not None:  # read before the next step, so it need not be copied
            self._total, self._recent = self._recent, None
        if self._total is not None:
            finite(self.symbol, self.layer, self._total)

    @property
    def total(self) -> Tensor:
        """The sum, ``[..., k, d]``."""
        assert self._total is not None
        return self._total

    @override
    def merge(self, other: Self) -> Self:
        return self._with(added(self.total, other.total))

    def _with(self, total: Tensor) -> Self:
        whole = copy.copy(self)
        whole._total = total
        return whole

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        return 8 * math.prod(shape)


class ParameterGradient(Gradient):
    """The parameter's own gradient of the summed loss, to check ``D`` against.

    ``tied`` says whether another module uses the parameter, whose part of the gradient it has too.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"parameter_gradient"})
    symbol: ClassVar[str] = "the parameter's gradient"
    ask: ClassVar[str] = "a loss and autograd=True"
    tied = False

    @override
    def add(self, seen: Seen) -> None:
        assert seen.parameter_gradient is not None
        self.tied = seen.tied
        self._add(seen.parameter_gradient.clone() if seen.tied else seen.parameter_gradient)


#: entries of output gradients that are kept until they are added: one product of many rows costs less than many of few
WAITING = 2**17
#: independent parts of a sketch that are kept, for the standard error
PARTS = 4


class SquareSum(Sum):
    """A sum of ``xxᵀ`` in parts that add up to it: one, or several independent random sketches.

    It has one of three forms: the matrix itself ``[parts, ..., k, k]``; where measures look at it from the layer's fewer
    inputs alone, ``WᵀAW [parts, ..., d, d]``; where neither fits, products ``[parts, ..., k, r]`` with a thin matrix.
    """

    of_single_samples: ClassVar[bool] = True
    #: how it is called in notes
    symbol: ClassVar[str]

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._dtype, self.budget = plan.dtype, plan.budget
        self.estimated = plan.is_estimated(weight)
        k, d = weight.shape[-2:]
        self.at_inputs = not self.estimated and type(self) in plan.at_inputs and k > d
        self.sum: SymmetricSum | None = None
        self.products: Tensor | None = None
        self._thin: Tensor | None = None
        self.missing = ""
        if self.estimated:
            self.missing = (
                f"no {self.symbol}, but products with random vectors: exact measures of {tuple(weight.shape)} do not fit the "
                f"{self.budget}"
            )
            plan.notes.left_out(layer, self.missing)
        each = plan.entry_bytes(weight)
        if not (self.estimated or self.at_inputs or self.budget.keeps_square(weight.shape, each)):
            size = weight[..., 0].numel() * k * each
            raise LeftOut(
                f"no {self.symbol}: {k} × {k} numbers take {size / 2**20:,.0f} MiB, more than the {self.budget}"
            )

    @abstractmethod
    def thin(self, seen: Seen) -> Tensor:
        """What the sum is multiplied by where only products are kept, ``[..., k, r]``."""

    def add_rows(self, seen: Seen, rows: Tensor, part: int = 0, parts: int = 1) -> None:
        """Add ``rowsᵀrows`` of ``rows [..., m, k]`` to one of the parts; one part of all counts as equal shares of several."""
        if self.estimated:
            self._add_products(seen, rows, part, parts)
        else:
            self.add_gram(self.in_basis(rows), part, parts)

    def in_basis(self, rows: Tensor) -> Tensor:
        """Gradients ``[..., m, k]`` at the outputs, or ``[..., m, d]`` at the inputs where those are fewer."""
        return rows @ self.weight.to(rows.dtype) if self.at_inputs else rows

    def add_gram(self, rows: Tensor, part: int = 0, parts: int = 1) -> None:
        """Add the Gram matrix of rows in the sum's own basis."""
        if self.sum is None:
            device = "cpu" if rows.device.type == "mps" else rows.device
            self.sum = SymmetricSum(rows.shape[-1], (1, *rows.shape[:-2]), self._dtype, device)
        kept = self.sum.stack[0]
        if kept < parts:
            self.sum = self.sum.split(parts)
        if parts == 1 < kept:
            rows = rows / kept**0.5
        for i in [part] if parts > 1 else range(kept):
            self.sum.add_gram(rows, i)

    def _add_products(self, seen: Seen, rows: Tensor, part: int, parts: int) -> None:
        if self._thin is None:
            self._thin = self.thin(seen)
        product = gram_times(rows, self._thin)
        if self.products is None:
            device = "cpu" if product.device.type == "mps" else product.device
            self.products = product.new_zeros(1, *product.shape, dtype=self._dtype, device=device)
        if self.products.shape[0] < parts:
            self.products = _split(self.products, parts)
        if parts > 1:
            self.products[part] += product
        else:
            self.products += product / self.products.shape[0]

    @override
    def finish(self) -> None:
        self._thin = None
        for tensor in self._tensors():
            finite(self.symbol, self.layer, tensor)

    @property
    def parts(self) -> Tensor:
        """``[parts, ..., s, s]`` that add up to it: s = k, or d with :attr:`at_inputs`."""
        if self.sum is None:
            raise NotCollected(f"layer {self.layer!r}: {self.missing}")
        return self.sum.dense()

    def whole(self) -> Tensor | None:
        """The matrix ``[..., k, k]``, ``None`` where it is kept in another form."""
        return None if self.sum is None or self.at_inputs else self.parts.sum(0)

    @property
    def numbers(self) -> Tensor:
        """The parts, or the products ``[parts, ..., k, r]`` where only those are kept."""
        return self.parts if self.products is None else self.products

    def any(self) -> bool:
        """Whether it is not zero."""
        return any(bool(tensor.any()) for tensor in self._tensors())

    def gram(self, W: Factor) -> Gram:
        """The matrix at the layer's inputs, ``WᵀAW``, in the representation that is kept."""
        if self.products is not None:
            thin = torch.stack([W.transposed_times(part) for part in self.products])
            return Estimated(thin[..., :-1], probes(thin.shape[-2], thin.shape[-1] - 1, W.rows), thin[..., -1:])
        return Dense(self.parts) if self.at_inputs else Factored.of(W, W, self.parts)

    def _tensors(self) -> list[Tensor]:
        if self.products is not None:
            return [self.products]
        return [] if self.sum is None else self.sum.strips

    @override
    def merge(self, other: Self) -> Self:
        whole = copy.copy(self)
        if self.products is not None and other.products is not None:
            parts = max(self.products.shape[0], other.products.shape[0])
            whole.products = _split(self.products, parts) + _split(other.products.to(self.products), parts)
        elif self.sum is not None and other.sum is not None:
            whole.sum = self.sum.merge(other.sum)
        return whole

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        *stack, k, d = shape
        budget = Budget(memory)
        if budget.is_large(shape):
            return math.prod(stack) * 8 * k * (budget.probes(d) + 1 + FEWEST)
        return math.prod(stack) * 8 * min(k, d) ** 2


class Covariance(SquareSum):
    """``Σ [k, k]`` over all samples and sites."""

    needs: ClassVar[frozenset[str]] = frozenset({"delta"})
    symbol: ClassVar[str] = "Σ"
    ask: ClassVar[str] = "a loss and covariance=True"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._waiting: list[Tensor] = []

    @override
    def add(self, seen: Seen) -> None:
        assert seen.record is not None
        for delta in seen.record.deltas():
            rows = seen.positions.without_padding(delta).flatten(-3, -2)
            if self.estimated:
                self.add_rows(seen, rows)
            else:
                self._waiting.append(self.in_basis(rows))
        if sum(rows.numel() for rows in self._waiting) >= WAITING:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self.add_gram(torch.cat(self._waiting, -2) if len(self._waiting) > 1 else self._waiting[0])
            self._waiting = []

    @override
    def finish(self) -> None:
        self._flush()
        super().finish()

    @override
    def thin(self, seen: Seen) -> Tensor:
        W = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return torch.cat([times_probes(W, self.budget.probes(W.shape[-1])), W.sum(-1, keepdim=True)], -1)  # WΩ, W1


class Kernel(SquareSum):
    """``Σ_i J_iᵀJ_i [k, k]`` with ``J_i = ∂f(x_i)/∂z_i`` at every site."""

    needs: ClassVar[frozenset[str]] = frozenset({"J"})
    symbol: ClassVar[str] = "K"
    ask: ClassVar[str] = "jacobians=True"

    @override
    def add(self, seen: Seen) -> None:
        J = self.jacobians(seen)
        parts = 1 if seen.sketch is None else min(seen.sketch, PARTS)
        for part in range(parts):  # combinations go to parts in turn
            chosen = J[(part - seen.first) % parts :: parts]
            rows = chosen.movedim(0, -2).flatten(-4, -2)  # outputs, samples and sites
            if chosen.shape[0] and seen.at_inputs:
                self.add_gram(rows, part, parts)
            elif chosen.shape[0]:
                self.add_rows(seen, rows, part, parts)

    def jacobians(self, seen: Seen) -> Tensor:
        """What is summed, ``[m, ..., batch, sites, k]``."""
        assert seen.J is not None
        return seen.J

    @override
    def thin(self, seen: Seen) -> Tensor:
        W, W0 = self.weight, seen.reference_weight
        return self._sides(W) if W0 is None else self._sides(W, W - W0)

    def _sides(self, *weights: Tensor) -> Tensor:
        count = self.budget.probes(self.weight.shape[-1])
        return torch.cat([thin_of_kernel(W, count) for W in weights], -1)


class CenteredKernel(Kernel):
    """``Σ_i (J_i − J_i⁰)ᵀ(J_i − J_i⁰)`` against a reference network."""

    needs: ClassVar[frozenset[str]] = frozenset({"J", "J_reference"})
    ask: ClassVar[str] = "reference=<the network at initialisation>"

    @override
    def jacobians(self, seen: Seen) -> Tensor:
        assert seen.J is not None
        assert seen.J_reference is not None
        return seen.J - seen.J_reference

    @override
    def thin(self, seen: Seen) -> Tensor:
        assert seen.reference_weight is not None
        return self._sides(self.weight - seen.reference_weight, seen.reference_weight)


def times_probes(W: Tensor, count: int) -> Tensor:
    """``WΩ [..., k, count]`` with random signs Ω of a fixed seed."""
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    return W @ probes(W.shape[-1], count, W)


def thin_of_kernel(W: Tensor, count: int) -> Tensor:
    """``[WΩ, W1, Ψ]``: what K is multiplied by for its alignment with W.

    Ω are ``count`` probes of the inputs and Ψ 64 of the outputs, projected onto the column space of W where k > d.
    """
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    k, d = W.shape[-2:]
    outputs = probes(k, FEWEST, W).expand(*W.shape[:-2], k, FEWEST)
    outputs = onto_columns(W, outputs) if k > d else outputs
    return torch.cat([times_probes(W, count), W.sum(-1, keepdim=True), outputs], -1)


def _split(parts: Tensor, count: int) -> Tensor:
    """A single part, which is exact, as equal shares of several; several as they are."""
    if parts.shape[0] == count:
        return parts
    return (parts / count).expand(count, *parts.shape[1:]).clone()
