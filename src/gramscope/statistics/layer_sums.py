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
from gramscope.linalg.arrays import gram_of_rows
from gramscope.linalg.stochastic import gram_times_probes, probe_count, probes
from gramscope.statistics.collect_options import Options
from gramscope.statistics.layer import add_parts

#: samples whose gradients are summed in the model's precision
GRADIENT_SAMPLES = 4096
#: entries of output gradients that are kept until their covariance is added
DELTA_ENTRIES = 2**17
#: the sums that are k×k, which may take much more memory than the weight, and their symbols
SQUARE = {"Sigma": "Σ", "JtJ": "K", "JtJ_centered": "K", "kernel_parts": "K"}
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
        self._gradients: dict[str, Tensor] = {}
        self._samples: dict[str, int] = {}
        self._deltas: dict[str, list[Tensor]] = {}
        self._omega: dict[tuple[int, torch.dtype], Tensor] = {}
        #: why a sum of a layer is not kept, by layer and field
        self.too_large: dict[tuple[str, str], str] = {}

    def get(self, name: str, what: str) -> Tensor | None:
        """A finished sum of a layer."""
        return self._sums.get((name, what))

    def add(self, name: str, what: str, value: Tensor) -> None:
        """Add a tensor to the sum ``what`` of layer ``name``."""
        key = (name, what)
        if key in self._sums:
            self._sums[key].add_(value)
        else:
            keeps = what == "kernel_parts" or (what == "D" and self._one_gradient(name))
            dtype = value.dtype if keeps else self._options.dtype
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
        if self._options.covariance and self._probed(name, "covariance"):
            for delta in record.deltas():
                rows = delta.flatten(-3, -2)
                rows = rows @ self.weights[name].to(rows.dtype)
                self.add(name, "covariance_probes", gram_times_probes(rows, self._probes(rows)))
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
                if "jacobians" in self._options.at_inputs and J0 is None:
                    self._add_kernel_parts(name, J, start, sketch)
                elif self._fits(name, "JtJ", "JtJ_centered"):
                    self.add(name, "JtJ", _sum_of_grams(J))
                    if J0 is not None:
                        self.add(name, "JtJ_centered", _sum_of_grams(J - J0))
                del J, J0

    def sketch_of(self, output: Tensor) -> int | None:
        """How many random combinations of outputs to take, ``None`` for all outputs."""
        large = self._options.jacobians == "auto" and output[0].numel() > OUTPUT_LIMIT
        return SKETCH if large and self._options.sketch is None else self._options.sketch

    def _add_kernel_parts(self, name: str, J: Tensor, stop: int, sketch: int | None) -> None:
        """Add ``JᵀJ``, or ``WᵀJᵀJW``, of outputs (or combinations) up to ``stop``; combinations go to parts in turn."""
        probed = self._probed(name, "jacobians")
        if not (probed or self._is_at_inputs(name, "jacobians") or self._fits(name, "kernel_parts")):
            return
        parts, key = 1 if sketch is None else min(sketch, PARTS), (name, "kernel_probes" if probed else "kernel_parts")
        for part in range(parts):
            chosen = J[(part - (stop - J.shape[0])) % parts :: parts]
            if chosen.shape[0] == 0:
                continue
            gram = self._kernel_times_probes(name, chosen) if probed else self._kernel(name, chosen)
            if key not in self._sums:
                self._sums[key] = gram.new_zeros(1, *gram.shape, dtype=gram.dtype if parts > 1 else self._options.dtype)
            if self._sums[key].shape[0] < parts:
                self._sums[key] = add_parts(self._sums[key], gram.new_zeros(parts, *gram.shape))
            if parts > 1:
                self._sums[key][part] += gram
            else:
                self._sums[key] += gram / self._sums[key].shape[0]

    def _kernel(self, name: str, J: Tensor) -> Tensor:
        return _sum_of_grams(J, partial(self._rows, name, "jacobians"))

    def _kernel_times_probes(self, name: str, J: Tensor) -> Tensor:
        rows = J.movedim(0, -2).flatten(-4, -2)
        rows = rows @ self.weights[name].to(rows.dtype)
        return gram_times_probes(rows, self._probes(rows))

    def _large(self, name: str) -> bool:
        """Whether neither k×k nor d×d numbers of a layer fit the memory budget, and products with probes take less."""
        weight, memory = self.weights[name], self._options.memory
        side, d = min(weight.shape[-2:]), weight.shape[-1]
        size = weight[..., 0, 0].numel() * side**2 * self._each(weight)
        return size > memory and d * probe_count(d, memory) < side**2

    def _one_gradient(self, name: str) -> bool:
        """Whether D is kept in the model's precision alone, as a second copy would be larger than all else."""
        return bool(self._options.at_inputs) and self._large(name)

    def _each(self, weight: Tensor) -> int:
        """Bytes of an entry of a square sum and of the product that is added to it."""
        return self._options.dtype.itemsize + max(weight.dtype.itemsize, 4)

    def _probed(self, name: str, what: str) -> bool:
        """Whether only products of a sum with random probes are kept."""
        return what in self._options.at_inputs and self._large(name)

    def _probes(self, rows: Tensor) -> Tensor:
        d = rows.shape[-1]
        if (d, rows.dtype) not in self._omega:
            self._omega[d, rows.dtype] = probes(d, probe_count(d, self._options.memory), rows)
        return self._omega[d, rows.dtype]

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
                raise NumericalError(
                    f"{what} of layer {name!r} is NaN or infinite; look at the inputs and weights there"
                )

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
        self.add(name, what, gram_of_rows(torch.cat(waiting, -2) if len(waiting) > 1 else waiting[0]))


def _sum_of_grams(J: Tensor, mapped: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
    """``Σ JᵀJ`` over outputs, samples and sites: ``[m, …, batch, sites, k] → […, k, k]``, at any scale; of mapped rows."""
    return gram_of_rows(mapped(J.movedim(0, -2).flatten(-4, -2)))
