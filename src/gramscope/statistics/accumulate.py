"""Adding one batch to the statistics, in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.layers.kinds import LinearKind
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.tape import Tape
from gramscope.layers.validity import shares_parameter
from gramscope.linalg.arrays import gram_of_rows
from gramscope.statistics.feature_moments import FeatureAccumulator
from gramscope.statistics.features import NoSuchSites, Tokens, Unpaired, inputs_of, rows_and_targets
from gramscope.statistics.layer import SUMS, LayerStatistics, NetworkStatistics, merge_networks
from gramscope.statistics.layouts import SampleAxes, output_rows
from gramscope.statistics.one_batch import Options, Step
from gramscope.statistics.result import EVERY, Statistics, output_of, true_notes, woven

#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256
#: entries of output gradients that are kept until their covariance is added
DELTA_ENTRIES = 2**17


class Accumulator:
    """Running sums of one collection; :meth:`result` freezes them.

    Args:
        options: what to keep.
        generator: of the signs of sketched Jacobians.
        covariance: keep ``Σ`` beside ``D``.
        axes: where the samples are in inputs and outputs.
        modules: those whose outputs are kept, by name.
    """

    def __init__(
        self,
        options: Options,
        generator: torch.Generator | None,
        covariance: bool,
        axes: SampleAxes,
        modules: dict[str, nn.Module],
    ) -> None:
        self._options = options
        self._generator = generator
        self._covariance = covariance
        self._axes = axes
        self._modules = modules
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self._waiting: dict[str, int] = {}
        self._deltas: dict[str, list[Tensor]] = {}
        self._features: dict[str, FeatureAccumulator] = {}
        self._outputs: dict[str, FeatureAccumulator] = {}
        self._final: dict[str, FeatureAccumulator] = {}
        self._weights: dict[str, Tensor] = {}
        self._order: list[str] = []
        self._shared: set[str] = set()
        self._network: NetworkStatistics | None = None
        self._left_out: dict[tuple[str, str], str] = {}
        self._no_such_sites: dict[str, str] = {}
        self._notes: dict[str, str] = {}

    def add(self, tape: Tape, step: Step, twin: tuple[Tape, Tensor] | None) -> None:
        """Add one batch that ``tape`` has seen; ``twin`` is the reference network's tape and output."""
        target = step.target if isinstance(step.target, Tensor) else None
        for record in tape:
            if record.name not in self._weights:
                self._weights[record.name] = record.layer.weight().clone()
                self._order = woven(self._order, tape.order)
                if self._options.autograd and shares_parameter(record.layer, tape.model):
                    self._shared.add(record.name)
            if self._options.gradients and any(a.dz is not None for a in record.applications):
                self._add_gradient(record, step.n)
                if record.name in step.autograd:
                    self._add_sum(record.name, "autograd", record.layer.matrix(step.autograd[record.name]))
                if self._covariance and self._fits(record.name, "Σ", "Sigma"):
                    for delta in record.deltas():
                        self._add_covariance(record.name, delta.flatten(-3, -2))
            if self._options.features and (record.name, "features") not in self._left_out:
                self._add_layer_features(record, step, target)
        for name, value in tape.outputs.items():
            if self._options.features:
                self._add_output(name, value, step, target)
            if tape.output_counts[name] > 1:
                count = tape.output_counts[name]
                self._notes[name] = f"it ran {count} times in a forward; its output is the one of the last time"
        if self._wants_jacobians(step.output):
            self._add_jacobians(tape, step.output, twin)
        self._add_network(step, target)

    def _leave_out(self, name: str, what: str, reason: str) -> None:
        """What one batch cannot have, no batch has: a part of the data would pass for all of them."""
        self._left_out.setdefault((name, what), reason)

    def _fits(self, name: str, symbol: str, *sums: str) -> bool:
        """Whether k×k sums of a layer may be kept: no larger than its D, or within the budget of memory."""
        if (name, sums[0]) in self._left_out:
            return False
        weight, options = self._weights[name], self._options
        k, d = weight.shape[-2:]
        each = options.dtype.itemsize + max(weight.dtype.itemsize, 4)  # of the sum, and of the product added to it
        size = weight[..., 0].numel() * k * each
        if k <= d or size <= options.memory:
            return True
        for what in sums:
            self._leave_out(
                name,
                what,
                f"no {symbol}: {k} × {k} numbers take {size / 2**20:,.0f} MiB, more than the "
                f"{options.memory / 2**20:,.0f} MiB of memory=",
            )
        return False

    def _wants_jacobians(self, output: Tensor) -> bool:
        if self._options.jacobians != "auto":
            return bool(self._options.jacobians)
        count = output[0].numel()
        if count > OUTPUT_LIMIT and self._options.sketch is None:
            self._notes[output_of()] = (
                f"no Jacobians: a sample has {count} outputs, more than {OUTPUT_LIMIT}; pass sketch=64 and a generator"
            )
            self._leave_out(EVERY, "JtJ", "")
            self._leave_out(EVERY, "JtJ_centered", "")
        return (EVERY, "JtJ") not in self._left_out

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
                    if self._fits(name, "K", "JtJ", "JtJ_centered"):
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
                if self._fits(name, "K", "JtJ", "JtJ_centered"):
                    self._add_sum(name, "JtJ", _gram(J))
                    self._add_sum(name, "JtJ_centered", _gram(J - reference.pop(name)))
                del J

    def _add_layer_features(self, record: LayerRecord, step: Step, target: Tensor | None) -> None:
        layer = record.layer
        axis = self._axes.of(layer.module)
        labelled = target is not None and target.dim() == 2 and not target.is_floating_point()
        averaged = self._options.tokens in ("auto", "mean") and not labelled
        single = step.residual is not None and step.residual.dim() == 2 and len(record.applications) == 1
        residual = step.residual if single and _sites(record.applications[0], axis) == 1 else None
        with self._unpaired(record.name, record.name):
            for a in record.applications:
                if isinstance(layer.kind, LinearKind) and self._axes.is_doubtful(layer.module, a.x):
                    raise Unpaired(_doubt(a.x))
            h = inputs_of(record, axis, step.n, averaged)
            self._add_rows(self._features, record.name, h, step, target, self._options.tokens, residual)

    def _add_output(self, name: str, value: Tensor, step: Step, target: Tensor | None) -> None:
        module, layout = self._modules[name], self._options.layouts[name]
        with self._unpaired(name, output_of(name)):
            rows = output_rows(value, layout, name, self._axes.of(module))
            if layout != "first" and (layout == "last" or value.dim() == 3) and self._axes.is_doubtful(module, value):
                raise Unpaired(_doubt(value))
            self._add_rows(self._outputs, name, rows, step, target, self._options.tokens)

    def _add_rows(
        self,
        known: dict[str, FeatureAccumulator],
        name: str,
        h: Tensor,
        step: Step,
        target: Tensor | None,
        tokens: Tokens,
        residual: Tensor | None = None,
    ) -> None:
        """Add rows in normal form to the accumulator of ``name``."""
        if h.shape[-3] != step.n:
            raise Unpaired(f"it has {h.shape[-3]} rows for {step.n} samples, so rows and targets cannot be paired")
        ignored = self._options.ignore_index
        rows, y = rows_and_targets(h, target, tokens, step.inputs, name, ignored)
        known.setdefault(name, FeatureAccumulator(name, self._options.gram, ignored)).add(rows, y, residual)

    @contextmanager
    def _unpaired(self, name: str, key: str) -> Iterator[None]:
        """Leave the features of ``key`` out if rows and targets cannot be paired inside this block."""
        try:
            yield
        except Unpaired as reason:
            self._leave_out(key, "features", f"no features: {reason}")
            if isinstance(reason, NoSuchSites):
                self._no_such_sites[name] = str(reason)

    def _add_network(self, step: Step, target: Tensor | None) -> None:
        correct, counted = _count_correct(step.output, target, self._options.ignore_index)
        if self._options.features and target is not None and step.output.dim() == 2:
            with self._unpaired(output_of(), output_of()):  # its rows are samples, whatever the tokens
                self._add_rows(self._final, output_of(), step.output.detach().unsqueeze(1), step, target, "mean")
        new = NetworkStatistics(step.n, step.loss, correct, counted)
        self._network = new if self._network is None else merge_networks(self._network, new)

    def result(self, unsupported: dict[str, str], options: dict[str, Any]) -> Statistics:
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
        if self._no_such_sites and not set(self._weights) - set(self._no_such_sites):
            raise InputError(next(iter(self._no_such_sites.values())))
        left_out = frozenset(self._left_out)
        network = self._network if self._network is not None else NetworkStatistics()
        features, outputs, final = (
            {name: rows.result() for name, rows in known.items() if (key(name), "features") not in left_out}
            for known, key in ((self._features, str), (self._outputs, output_of), (self._final, str))
        )
        layers = {
            name: LayerStatistics(
                name,
                self._weights[name],
                network.n,
                **{what: self._sums.get((name, what)) for what in SUMS},
                features=features.get(name),
                shared=name in self._shared,
            )
            for name in self._order
        }
        kept_outputs = {name: part for name, part in outputs.items() if part is not None}
        network = replace(network, output=final.get(output_of()))
        notes: dict[str, list[str]] = {}
        for name, reason in (*unsupported.items(), *self._notes.items()):
            notes.setdefault(name, []).append(reason)
        for (name, _), reason in self._left_out.items():
            name = name.removesuffix(output_of()).strip() or output_of()
            if reason and reason not in notes.setdefault(name, []):
                notes[name].append(reason)
        joined = true_notes({name: "; ".join(reasons) for name, reasons in notes.items() if reasons}, layers)
        return Statistics(layers, kept_outputs, network, joined, left_out, options).settled()


def _sites(a: Application, axis: int) -> int:
    """Sites of a sample in an application that the loss reaches, 0 in others."""
    return 0 if a.dz is None else a.layer.kind.outputs(a.layer.module, a.dz, axis).shape[-2]


def _doubt(value: Tensor) -> str:
    return (
        f"in shape {tuple(value.shape)}, beside sequence-first modules, either of the first axes could be the samples, so rows "
        "and targets cannot be paired; take another batch size"
    )


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
