"""Adding one batch to the statistics, in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import LayerError, NumericalError
from gramscope.layers.checks import shares_parameter
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.layers.record import LayerRecord
from gramscope.layers.tape import Tape
from gramscope.linalg.rows import gram_of_rows
from gramscope.statistics.features import Unpaired, rows_and_targets
from gramscope.statistics.layer import (
    FeatureStatistics,
    LayerStatistics,
    NetworkStatistics,
    merge_networks,
)
from gramscope.statistics.layouts import output_rows
from gramscope.statistics.result import Statistics
from gramscope.statistics.rows import FeatureAccumulator
from gramscope.statistics.step import Options, Step

#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256
#: entries of output gradients that are kept until their covariance is added
DELTA_ENTRIES = 2**17


class Accumulator:
    """Running sums of one collection; :meth:`result` freezes them."""

    def __init__(self, options: Options, generator: torch.Generator | None) -> None:
        self._options = options
        self._generator = generator
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self._waiting: dict[str, int] = {}
        self._deltas: dict[str, list[Tensor]] = {}
        self._features: dict[str, FeatureAccumulator] = {}
        self._outputs: dict[str, FeatureAccumulator] = {}
        self._final: dict[str, FeatureAccumulator] = {}
        self._weights: dict[str, Tensor] = {}
        self._shared: set[str] = set()
        self._network: NetworkStatistics | None = None
        self._n = 0
        self._notes: dict[str, str] = {}

    def add(self, tape: Tape, step: Step, twin: tuple[Tape, Tensor] | None) -> None:
        """Add one batch that ``tape`` has seen; ``twin`` is the reference network's tape and output."""
        self._n += step.n
        target = step.target if isinstance(step.target, Tensor) else None
        for record in tape:
            if record.name not in self._weights:
                self._weights[record.name] = record.layer.weight().clone()
                if self._options.autograd and shares_parameter(record.layer, tape.model):
                    self._shared.add(record.name)
            if self._options.gradients and all(a.dz is not None for a in record.applications):
                self._add_gradient(record, step.n)
                if record.name in step.autograd:
                    self._add_sum(record.name, "autograd", record.layer.matrix(step.autograd[record.name]))
                for delta in record.deltas():
                    self._add_covariance(record.name, delta.flatten(-3, -2))
            if self._options.features:
                self._add_layer_features(record, step, target)
        for name, value in tape.outputs.items():
            if self._options.features:
                self._add_rows(self._outputs, name, output_rows(value, self._options.layouts[name], name), step, target)
            if tape.output_counts[name] > 1:
                count = tape.output_counts[name]
                self._notes[name] = f"it ran {count} times in a forward; its output is the one of the last time"
        if self._wants_jacobians(step.output):
            self._add_jacobians(tape, step.output, twin)
        self._add_network(step, target)

    def _wants_jacobians(self, output: Tensor) -> bool:
        if self._options.jacobians != "auto":
            return bool(self._options.jacobians)
        count = output[0].numel()
        if count <= OUTPUT_LIMIT or self._options.sketch is not None:
            return True
        self._notes["(output)"] = (
            f"no Jacobians: a sample has {count} outputs, more than {OUTPUT_LIMIT}; pass sketch=64 and a generator"
        )
        return False

    def _add_sum(self, name: str, what: str, value: Tensor) -> None:
        key = (name, what)
        if key in self._sums:
            self._sums[key].add_(value)
        else:
            self._sums[key] = value.to("cpu" if value.device.type == "mps" else value.device, self._options.dtype)

    def _add_gradient(self, record: LayerRecord, n: int) -> None:
        """Sum D in the model's precision over a limited number of samples, then in the precision of the sums.

        One float32 product over 4,096 samples and several that add up to it round alike, and adding inside the product
        saves a pass over a matrix as large as the weight for every batch.
        """
        partial = self._partial.get(record.name)
        if partial is None:
            weight = self._weights[record.name]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            partial = self._partial[record.name] = torch.zeros_like(weight, dtype=dtype)
        record.add_gradient(partial)
        self._waiting[record.name] = self._waiting.get(record.name, 0) + n
        if self._waiting[record.name] >= 4096:
            self._flush(record.name)

    def _add_covariance(self, name: str, delta: Tensor) -> None:
        """Add ``δᵀδ`` of rows ``[…, m, k]``: few rows wait for others, as one product of many costs less than many of few."""
        waiting = self._deltas.setdefault(name, [])
        waiting.append(delta)
        if sum(rows.numel() for rows in waiting) >= DELTA_ENTRIES:
            self._flush_covariance(name)

    def _flush_covariance(self, name: str) -> None:
        waiting = self._deltas.pop(name)
        self._add_sum(name, "Sigma", gram_of_rows(torch.cat(waiting, -2) if len(waiting) > 1 else waiting[0]))

    def _flush(self, name: str) -> None:
        self._add_sum(name, "D", self._partial[name])
        self._partial[name] = torch.zeros_like(self._partial[name])
        self._waiting[name] = 0

    def _add_jacobians(self, tape: Tape, output: Tensor, twin: tuple[Tape, Tensor] | None) -> None:
        memory = self._options.memory if twin is None else max(self._options.memory // 2, 1)  # J and J⁰
        options = {"sketch": self._options.sketch, "memory": memory}
        if twin is None:
            for chunk in jacobian_chunks(tape, output, generator=self._generator, **options):  # type: ignore[arg-type]
                while chunk:  # a layer's Jacobians are dropped as soon as they are summed
                    name, J = chunk.popitem()
                    self._add_sum(name, "JtJ", _gram(J))
                    del J
            return
        # Both networks must see the same random signs.
        copy = None if self._generator is None else self._generator.clone_state()
        mine = jacobian_chunks(tape, output, generator=self._generator, **options)  # type: ignore[arg-type]
        theirs = jacobian_chunks(twin[0], twin[1], generator=copy, **options)  # type: ignore[arg-type]
        for chunk, reference in zip(mine, theirs, strict=True):
            while chunk:
                name, J = chunk.popitem()
                if name not in reference or reference[name].shape != J.shape:
                    raise LayerError(f"the reference network has no layer {name!r} of the same shape")
                self._add_sum(name, "JtJ", _gram(J))
                self._add_sum(name, "JtJ_centered", _gram(J - reference.pop(name)))
                del J

    def _add_layer_features(self, record: LayerRecord, step: Step, target: Tensor | None) -> None:
        labelled = target is not None and target.dim() == 2 and not target.is_floating_point()
        averaged = self._options.tokens in ("auto", "mean") and not labelled
        h = record.mean_h.unsqueeze(-2) if averaged else record.h
        single = step.residual is not None and step.residual.dim() == 2 and record.sites == 1
        self._add_rows(self._features, record.name, h, step, target, step.residual if single else None)

    def _add_rows(
        self,
        known: dict[str, FeatureAccumulator],
        name: str,
        h: Tensor,
        step: Step,
        target: Tensor | None,
        residual: Tensor | None = None,
    ) -> None:
        """Add rows in normal form to the accumulator of ``name``, or note why they cannot be paired with targets."""
        batch = h.shape[-3]
        if batch != step.n:
            self._notes[name] = (
                f"no features: its inputs have {batch} rows for {step.n} samples, so rows and targets cannot be paired"
            )
            return
        options = self._options
        try:
            rows, y = rows_and_targets(h, target, options.tokens, step.inputs, name, options.ignore_index)
            rows_of = known.setdefault(name, FeatureAccumulator(name, options.gram, options.ignore_index))
            rows_of.add(rows, y, residual)
        except Unpaired as reason:
            self._notes[name] = f"no features: {reason}"

    def _add_network(self, step: Step, target: Tensor | None) -> None:
        correct, counted = _count_correct(step.output, target, self._options.ignore_index)
        if self._options.features and target is not None and step.output.dim() == 2:
            self._add_rows(self._final, "(output)", step.output.detach().unsqueeze(1), step, target)
        new = NetworkStatistics(step.n, step.loss, correct, counted)
        self._network = new if self._network is None else merge_networks(self._network, new)

    def result(self, unsupported: dict[str, str]) -> Statistics:
        """The finished statistics; NaN or infinity in any of them is an error that names the layer."""
        for name in self._partial:
            self._flush(name)
        for name in list(self._deltas):
            self._flush_covariance(name)
        for (name, what), value in self._sums.items():
            if not torch.isfinite(value.sum()):
                raise NumericalError(
                    f"{what} of layer {name!r} is NaN or infinite; look at the inputs and weights there"
                )
        features = _finished(self._features)
        layers = {
            name: LayerStatistics(
                name,
                weight,
                self._n,
                self._sums.get((name, "D")),
                self._sums.get((name, "Sigma")),
                self._sums.get((name, "autograd")),
                self._sums.get((name, "JtJ")),
                self._sums.get((name, "JtJ_centered")),
                features.get(name),
                name in self._shared,
            )
            for name, weight in self._weights.items()
        }
        network = self._network if self._network is not None else NetworkStatistics()
        network = replace(network, output=_finished(self._final).get("(output)"))
        return Statistics(layers, _finished(self._outputs), network, {**unsupported, **self._notes})


def _finished(accumulators: dict[str, FeatureAccumulator]) -> dict[str, FeatureStatistics]:
    found = {name: accumulator.result() for name, accumulator in accumulators.items()}
    return {name: part for name, part in found.items() if part is not None}


def _gram(J: Tensor) -> Tensor:
    """``Σ JᵀJ`` over outputs, samples and sites: ``[m, …, batch, sites, k] → […, k, k]``, whatever their scale."""
    return gram_of_rows(J.movedim(0, -2).flatten(-4, -2))


def _count_correct(output: Tensor, target: Tensor | None, ignore_index: int) -> tuple[int | None, int]:
    if not isinstance(target, Tensor) or target.is_floating_point() or output.dim() < 2:
        return None, 0
    last = output.shape[:-1] == target.shape
    second = output.dim() > 2 and output.shape[0] == target.shape[0] and output.shape[2:] == target.shape[1:]
    if last == second:  # neither, or both: which axis holds the classes cannot be told
        return None, 0
    axis = -1 if last else 1
    if output.shape[axis] < 2:
        return None, 0
    counts = (target >= 0) & (target != ignore_index)
    return int(((output.argmax(axis) == target) & counts).sum()), int(counts.sum())
