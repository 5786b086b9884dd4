"""Sums over samples that every layer adds up batch by batch: gradients, their covariance, and Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gramscope.errors import LayerError, NumericalError
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.layers.positions import Positions
from gramscope.layers.record import LayerRecord
from gramscope.layers.tape import Tape
from gramscope.linalg.stochastic import FEWEST, gram_times, is_large, onto_columns, probe_count, probes
from gramscope.linalg.symmetric_sum import SymmetricSum, for_products
from gramscope.statistics.collect_options import Options
from gramscope.statistics.layer import add_parts
from gramscope.statistics.memory import trim_malloc

#: samples whose gradients are summed in the model's precision
GRADIENT_SAMPLES = 4096
#: entries of output gradients that are kept until their covariance is added
DELTA_ENTRIES = 2**17
#: the sums that are k×k, which may take much more memory than the weight, and their symbols
SQUARE = {"Sigma": "Σ", "JtJ": "K", "JtJ_centered": "K", "kernel_parts": "K", "centered_parts": "K"}
#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256
#: random combinations of outputs that it takes above; each costs a backward pass
SKETCH = 4
#: independent parts of a sketch that are kept, for the standard error
PARTS = 4


class LayerSums:
    """The fields ``D, Sigma, autograd, JtJ, JtJ_centered`` of :class:`~gramscope.statistics.layer.LayerStatistics`.

    Args:
        options: what to keep.
        generator: source of the signs of sketched Jacobians; by default one with seed 0.
    """

    def __init__(self, options: Options, generator: torch.Generator | None) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(0) if generator is None else generator
        #: by layer; the one who adds a layer's first batch enters its weight
        self.weights: dict[str, Tensor] = {}
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._grams: dict[tuple[str, str], SymmetricSum] = {}
        self._gradients: dict[str, Tensor] = {}
        self._samples: dict[str, int] = {}
        self._deltas: dict[str, list[Tensor]] = {}
        self._thin: dict[tuple[str, str], Tensor] = {}
        #: why a sum of a layer is not kept, by layer and field
        self.too_large: dict[tuple[str, str], str] = {}

    def get(self, name: str, what: str) -> Tensor | None:
        """A finished sum of a layer."""
        found = self._grams.get((name, what))
        return self._sums.get((name, what)) if found is None else found.dense()

    def forget(self, name: str) -> None:
        """Drop the sums of a layer."""
        for sums in (self._sums, self._grams):
            for key in [key for key in sums if key[0] == name]:
                del sums[key]

    def add(self, name: str, what: str, value: Tensor) -> None:
        """Add a tensor to the sum ``what`` of layer ``name``."""
        key = (name, what)
        if key in self._sums:
            self._sums[key].add_(value)
        else:
            dtype = value.dtype if what in ("D", "autograd") and self._one_gradient(name) else self._options.dtype
            self._sums[key] = value.to("cpu" if value.device.type == "mps" else value.device, dtype)

    def add_gradients(self, record: LayerRecord, n: int, positions: Positions | None = None) -> None:
        """Add ``D`` and, if asked for, ``Σ`` of one batch of ``n`` samples; ``positions`` tell its padding.

        D is summed in the model's precision over a limited number of samples, then in the precision of the sums. One
        float32 product over 4,096 samples rounds like several that add up to it, and adding inside the product saves a
        pass over a matrix as large as the weight for every batch.
        """
        name = record.name
        if name not in self._gradients:
            weight = self.weights[name]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._gradients[name] = torch.zeros_like(weight, dtype=dtype)
        record.add_gradient(self._gradients[name])
        self._samples[name] = self._samples.get(name, 0) + n
        if self._samples[name] >= GRADIENT_SAMPLES and not self._one_gradient(name):
            self._flush_gradient(name)
        if self._options.covariance and self._probed(name, "Sigma"):
            thin = self._thin_of(name, "covariance_probes")
            for delta in record.deltas():
                rows = (positions or Positions()).without_padding(delta).flatten(-3, -2)
                self.add(name, "covariance_probes", gram_times(rows, thin))
        elif self._options.covariance and (self._is_at_inputs(name, "covariance") or self._fits(name, "Sigma")):
            waiting = self._deltas.setdefault(name, [])  # one product of many rows costs less than many of few
            deltas = [(positions or Positions()).without_padding(delta) for delta in record.deltas()]
            waiting += [self._rows(name, "covariance", delta.flatten(-3, -2)) for delta in deltas]
            if sum(rows.numel() for rows in waiting) >= DELTA_ENTRIES:
                self._flush_covariance(name)

    def add_jacobians(
        self, tape: Tape, output: Tensor, twin: tuple[Tape, Tensor] | None, positions: Positions | None = None
    ) -> None:
        """Add ``Σ JᵀJ`` of one batch and, with the tape and output of a reference network, ``Σ (J − J⁰)ᵀ(J − J⁰)``."""
        positions = positions or Positions()
        sketch, generator = self.sketch_of(output), self._generator
        memory = self._options.memory if twin is None else max(self._options.memory // 2, 1)  # J and J⁰
        copy = generator.clone_state()  # both networks must see the same random signs
        start = 0
        mine = jacobian_chunks(tape, output, sketch=sketch, memory=memory, generator=generator)
        theirs = None if twin is None else jacobian_chunks(*twin, sketch=sketch, memory=memory, generator=copy)
        for chunk in mine:
            reference = {} if theirs is None else next(theirs, {})
            start += next(iter(chunk.values())).shape[0] if chunk else 0
            while chunk:  # a layer's Jacobians are dropped as soon as they are summed
                name, J = chunk.popitem()
                J0 = reference.pop(name, None)
                if twin is not None and (J0 is None or J0.shape != J.shape):
                    raise LayerError(f"the reference network has no layer {name!r} of the same shape")
                J, J0 = positions.without_padding(J), None if J0 is None else positions.without_padding(J0)
                if self._probed(name, "JtJ", "JtJ_centered", "kernel_parts", "centered_parts"):
                    W0 = None if twin is None else twin[0][name].layer.weight()
                    self._add_probed_kernels(name, J, J0, W0, start, sketch)
                elif self._options.probed or ("jacobians" in self._options.at_inputs and J0 is None):
                    if self._is_at_inputs(name, "jacobians") or self._fits(name, "kernel_parts", "centered_parts"):
                        self._add_parts(J, start, sketch, partial(self._add_kernel, name, "kernel_parts"))
                        if J0 is not None:
                            self._add_parts(J - J0, start, sketch, partial(self._add_kernel, name, "centered_parts"))
                elif self._fits(name, "JtJ", "JtJ_centered"):
                    self._add_gram(name, "JtJ", _rows_of(J))
                    if J0 is not None:
                        self._add_gram(name, "JtJ_centered", _rows_of(J - J0))
                del J, J0
            trim_malloc()

    def sketch_of(self, output: Tensor) -> int | None:
        """How many random combinations of outputs to take, ``None`` for all outputs."""
        large = self._options.jacobians == "auto" and output[0].numel() > OUTPUT_LIMIT
        return SKETCH if large and self._options.sketch is None else self._options.sketch

    def _add_gram(self, name: str, what: str, rows: Tensor) -> None:
        """Add ``rowsᵀrows`` of ``rows [..., m, s]`` to the sum ``what [..., s, s]``."""
        if (name, what) not in self._grams:
            self._grams[name, what] = _zero(rows, rows.shape[:-2], self._options.dtype)
        self._grams[name, what].add_gram(rows)

    def _add_parts(self, J: Tensor, stop: int, sketch: int | None, add: Callable[[Tensor, int, int], None]) -> None:
        """Give ``add`` rows of outputs (or combinations) up to ``stop``, their part and the number of parts.

        Combinations go to parts in turn.
        """
        parts = 1 if sketch is None else min(sketch, PARTS)
        for part in range(parts):
            chosen = J[(part - (stop - J.shape[0])) % parts :: parts]
            if chosen.shape[0] == 0:
                continue
            add(_rows_of(chosen), part, parts)

    def _add_kernel(self, name: str, what: str, rows: Tensor, part: int, parts: int) -> None:
        """Add ``rowsᵀrows`` to one of the parts of a kernel; all outputs, in one part, count as equal shares of several."""
        key, rows = (name, what), for_products(self._rows(name, "jacobians", rows))
        if key not in self._grams:
            self._grams[key] = _zero(rows, (1, *rows.shape[:-2]), rows.dtype if parts > 1 else self._options.dtype)
        kept = self._grams[key].stack[0]
        if kept < parts:
            self._grams[key] = self._grams[key].split(parts)
        if parts == 1 < kept:
            rows = rows / kept**0.5
        for i in [part] if parts > 1 else range(kept):
            self._grams[key].add_gram(rows, i)

    def _add_probed_kernels(
        self, name: str, J: Tensor, J0: Tensor | None, W0: Tensor | None, stop: int, sketch: int | None
    ) -> None:
        """Add products of K and, with a reference, of ``K̄`` with the thin matrices that their alignments need."""
        kernels = {"kernel_probes": J} | ({} if J0 is None else {"centered_probes": J - J0})
        for what, jacobians in kernels.items():
            thin = self._thin_of(name, what, W0)
            self._add_parts(jacobians, stop, sketch, partial(self._add_product, name, what, thin))

    def _add_product(self, name: str, what: str, thin: Tensor, rows: Tensor, part: int, parts: int) -> None:
        """Add ``rowsᵀ(rows X)`` to one of the parts; all outputs, in one part, count as equal shares of several."""
        key, product = (name, what), gram_times(rows, thin)
        if key not in self._sums:
            dtype = product.dtype if parts > 1 else self._options.dtype
            self._sums[key] = product.new_zeros(1, *product.shape, dtype=dtype)
        if self._sums[key].shape[0] < parts:
            self._sums[key] = add_parts(self._sums[key], product.new_zeros(parts, *product.shape))
        if parts > 1:
            self._sums[key][part] += product
        else:
            self._sums[key] += product / self._sums[key].shape[0]

    def _thin_of(self, name: str, what: str, W0: Tensor | None = None) -> Tensor:
        """The thin matrices, side by side, by which a probed sum of a layer is multiplied; made once."""
        if (name, what) not in self._thin:
            W = self.weights[name]
            count = probe_count(W.shape[-1], self._options.memory)
            if what == "covariance_probes":
                thin = _times_probes(W, count)
            elif W0 is None:
                thin = thin_of_kernel(W, count)
            else:
                sides = (W - W0, W0) if what == "centered_probes" else (W, W - W0)
                thin = torch.cat([thin_of_kernel(side, count) for side in sides], -1)
            self._thin[name, what] = thin
        return self._thin[name, what]

    def _large(self, name: str) -> bool:
        """Whether exact measures of a layer do not fit the memory budget, and products with probes take less."""
        weight = self.weights[name]
        return is_large(weight.shape, self._options.memory, self._each(weight))

    def _one_gradient(self, name: str) -> bool:
        """Whether D is kept in the model's precision alone, as a second copy would be larger than all else."""
        return self._options.probed and self._large(name)

    def _each(self, weight: Tensor) -> int:
        """Bytes of an entry of a square sum and of the product that is added to it."""
        return self._options.dtype.itemsize + max(weight.dtype.itemsize, 4)

    def _probed(self, name: str, *fields: str) -> bool:
        """Whether only products of square sums with thin matrices are kept; a note says so."""
        if not (self._options.probed and self._large(name)):
            return False
        for what in fields:
            self.too_large[name, what] = (
                f"no {SQUARE[what]}, but products with random vectors: exact measures of {tuple(self.weights[name].shape)} do "
                f"not fit the {self._options.memory / 2**20:,.0f} MiB of memory="
            )
        return True

    def _is_at_inputs(self, name: str, what: str) -> bool:
        """Whether a sum of layer ``name`` is kept in the basis of its inputs, which are fewer than its outputs."""
        k, d = self.weights[name].shape[-2:]
        return what in self._options.at_inputs and k > d

    def _rows(self, name: str, what: str, rows: Tensor) -> Tensor:
        """Gradients ``[..., m, k]`` at the outputs, or ``[..., m, d]`` at the inputs where those are fewer."""
        return rows @ self.weights[name].to(rows.dtype) if self._is_at_inputs(name, what) else rows

    def finish(self) -> None:
        """Add what still waits; NaN or infinity in any sum is an error that names the layer."""
        for name in list(self._gradients):
            if self._options.snapshot or (name, "D") in self._sums:
                self._flush_gradient(name)
            else:
                self._sums[name, "D"] = self._gradients.pop(name)
        for name in list(self._deltas):
            self._flush_covariance(name)
        for (name, what), value in self._sums.items():
            if not torch.isfinite(value.sum()):
                raise _not_finite(name, what)
        for (name, what), gram in self._grams.items():
            if not gram.is_finite():
                raise _not_finite(name, what)

    def _fits(self, name: str, *fields: str) -> bool:
        """Whether k×k sums of a layer may be kept: they are no larger than its D, or within the memory budget."""
        if (name, fields[0]) in self.too_large:
            return False
        weight = self.weights[name]
        k, d = weight.shape[-2:]
        size = weight[..., 0].numel() * k * self._each(weight)
        if k <= d or size <= self._options.memory:
            return True
        for what in fields:
            self.too_large[name, what] = (
                f"no {SQUARE[what]}: {k} × {k} numbers take {size / 2**20:,.0f} MiB, more than the "
                f"{self._options.memory / 2**20:,.0f} MiB of memory="
            )
        return False

    def _flush_gradient(self, name: str) -> None:
        self.add(name, "D", self._gradients.pop(name))
        self._samples[name] = 0

    def _flush_covariance(self, name: str) -> None:
        waiting = self._deltas.pop(name)
        what = "input_covariance" if self._is_at_inputs(name, "covariance") else "Sigma"
        self._add_gram(name, what, torch.cat(waiting, -2) if len(waiting) > 1 else waiting[0])


def _rows_of(J: Tensor) -> Tensor:
    """Jacobians of outputs, samples and sites as rows: ``[m, …, batch, sites, k] → […, m · batch · sites, k]``."""
    return J.movedim(0, -2).flatten(-4, -2)


def _zero(rows: Tensor, stack: tuple[int, ...], dtype: torch.dtype) -> SymmetricSum:
    device = "cpu" if rows.device.type == "mps" else rows.device
    return SymmetricSum(rows.shape[-1], stack, dtype, device)


def _not_finite(name: str, what: str) -> NumericalError:
    return NumericalError(f"{what} of layer {name!r} is NaN or infinite; look at the inputs and weights there")


def thin_of_kernel(W: Tensor, count: int) -> Tensor:
    """``[WΩ, W1, Ψ]``: what K is multiplied by for its alignment with W (:mod:`gramscope.measures.probed`).

    Ω are ``count`` probes of the inputs and Ψ 64 of the outputs, projected onto the column space of W where k > d.
    """
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    k, d = W.shape[-2:]
    outputs = probes(k, FEWEST, W).expand(*W.shape[:-2], k, FEWEST)
    outputs = onto_columns(W, outputs) if k > d else outputs
    return torch.cat([_times_probes(W, count), W.sum(-1, keepdim=True), outputs], -1)


def _times_probes(W: Tensor, count: int) -> Tensor:
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    return W @ probes(W.shape[-1], count, W)
