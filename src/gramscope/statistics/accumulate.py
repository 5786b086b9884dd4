"""Adding one batch to the statistics, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError
from gramscope.layers.kinds import EmbeddingKind, LinearKind
from gramscope.layers.losses import class_axis
from gramscope.layers.positions import flattened
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.tape import Tape
from gramscope.layers.validity import COUPLED, shares_parameter
from gramscope.notes import Note
from gramscope.statistics.collect_options import Options
from gramscope.statistics.feature_moments import FeatureAccumulator
from gramscope.statistics.feature_statistics import FeatureStatistics
from gramscope.statistics.features import NoSuchSites, Tokens, Unpaired, inputs_of, rows_and_targets
from gramscope.statistics.layer import PARTED, SUMS, LayerStatistics, NetworkStatistics, merge_networks
from gramscope.statistics.layer_sums import LayerSums
from gramscope.statistics.layouts import SampleAxes, output_rows
from gramscope.statistics.memory import trim_malloc
from gramscope.statistics.one_batch import Step
from gramscope.statistics.result import (
    EVERY,
    MadeWhenAsked,
    Statistics,
    drop_refuted,
    layer_with_totals,
    merge_orders,
    output_of,
)

#: sums of products of gradients that belong to single samples
OF_JACOBIANS = ("JtJ", "JtJ_centered", *PARTED)
OF_SINGLE_SAMPLES = ("Sigma", "input_covariance", "covariance_probes", *OF_JACOBIANS)
#: why a layer whose inputs serve several samples has none of them
SHARED = (
    "no Σ, no K and no features: a row of its inputs serves several samples, so none has a gradient of its own there; batches "
    "of one sample give Σ and K"
)


class Accumulator:
    """Running sums of one collection; :meth:`result` freezes them.

    Args:
        options: what to keep.
        generator: source of the signs of sketched Jacobians.
        axes: where the samples are in inputs and outputs.
        modules: those whose outputs are kept, by name.
    """

    def __init__(
        self,
        options: Options,
        generator: torch.Generator | None,
        axes: SampleAxes,
        modules: dict[str, nn.Module],
    ) -> None:
        self._options = options
        self._axes = axes
        self._modules = modules
        self._sums = LayerSums(options, generator)
        self._features: dict[str, FeatureAccumulator] = {}  # by layer, or by output_of(module)
        self._order: list[str] = []
        self._shared: set[str] = set()
        self._looked_up: set[str] = set()  # embeddings, whose features are their outputs
        self._network = NetworkStatistics()
        self._left_out: dict[tuple[str, str], str] = {}
        self._no_such_sites: dict[str, str] = {}
        self._notes: dict[str, Note] = {}

    def add(self, tape: Tape, step: Step, twin: tuple[Tape, Tensor] | None) -> None:
        """Add one batch that ``tape`` has seen; ``twin`` is the reference network's tape and output."""
        target = step.target if isinstance(step.target, Tensor) else None
        for record in tape:
            trim_malloc()
            self._add_layer(tape, record, step, target)
        for record in tape:
            record.forget_gradients()  # Jacobians take as much memory
        for name, value in tape.outputs.items():
            if self._options.features:
                self._add_output(name, value, step, target)
            if tape.output_counts[name] > 1:
                count = tape.output_counts[name]
                text = f"it ran {count} times in a forward; its output is the one of the last time"
                self._notes[name] = Note("remark", text)
        if step.structure.coupled:
            self._note_coupled()
        output = step.positions.tokens_first(step.output) if self._options.jacobians else step.output
        if self._wants_jacobians(output):
            if twin is not None:
                twin = (twin[0], step.positions.tokens_first(twin[1]))
            self._sums.add_jacobians(tape, output, twin, step.positions)
        self._add_network(step, target)

    def _add_layer(self, tape: Tape, record: LayerRecord, step: Step, target: Tensor | None) -> None:
        name = record.name
        if name not in self._sums.weights:
            weight = record.layer.weight()
            self._sums.weights[name] = weight.clone() if self._options.snapshot else weight
            self._order = merge_orders(self._order, tape.order)
            if isinstance(record.layer.kind, EmbeddingKind):
                self._looked_up.add(name)
            if self._options.autograd and shares_parameter(record.layer, tape.model):
                self._shared.add(name)
        if name in step.structure.serves_many:
            self._left_out |= {(name, what): SHARED for what in (*OF_SINGLE_SAMPLES, "features")}
        if self._options.gradients and any(a.dz is not None for a in record.applications):
            self._sums.add_gradients(record, step.n, step.positions)
            if name in step.autograd:
                gradient = record.layer.matrix(step.autograd[name])  # one tensor for all layers with this parameter
                self._sums.add(name, "autograd", gradient.clone() if name in self._shared else gradient)
        if self._options.features and (name, "features") not in self._left_out:
            self._add_layer_features(record, step, target)

    def _note_coupled(self) -> None:
        """Leave Jacobians out where samples influence each other, or raise if they were asked for."""
        if self._options.jacobians is True:
            raise LayerError(COUPLED)
        if self._options.gradients and self._options.covariance:
            text = "samples influence each other: Σ has gradients of the loss of the whole batch, not of single samples"
            self._notes["(samples)"] = Note("remark", text)
        if not self._options.jacobians:
            return
        self._notes[output_of()] = Note("left out", f"no Jacobians: {COUPLED}")
        self._left_out |= {(EVERY, what): "" for what in OF_JACOBIANS}

    def _wants_jacobians(self, output: Tensor) -> bool:
        if not self._options.jacobians or (EVERY, "JtJ") in self._left_out:
            return False
        sketch = self._sums.sketch_of(output)
        if sketch is not None and self._options.sketch is None:
            text = (
                f"K is estimated from {sketch} random combinations of the {output[0].numel():,} outputs of a sample, with a "
                f"fixed seed; sketch={4 * sketch} halves the error, jacobians=True takes every output"
            )
            self._notes[output_of()] = Note("remark", text)
        return True

    def _add_layer_features(self, record: LayerRecord, step: Step, target: Tensor | None) -> None:
        layer = record.layer
        probed = record.name in step.structure.axes
        axis = step.structure.axes[record.name] if probed else self._axes.of(layer.module)
        labelled = target is not None and target.dim() == 2 and not target.is_floating_point()
        averaged = self._options.tokens in ("auto", "mean") and not labelled and not step.positions.lengths
        single = step.residual is not None and step.residual.dim() == 2 and len(record.applications) == 1
        residual = step.residual if single and _sites(record.applications[0], axis) == 1 else None
        with self._unpaired(record.name, record.name):
            for a in record.applications:
                if isinstance(layer.kind, LinearKind) and not probed and self._axes.is_doubtful(layer.module, a.x):
                    raise Unpaired(_doubt(a.x))
            h = inputs_of(record, axis, step.n, averaged, step.positions.lengths, probed)
            h = _cut_sites(layer.module, h, step.positions.lengths)
            valid = step.positions.of(h.shape[-2], len(record.applications))
            self._add_rows(record.name, record.name, h, step, target, self._options.tokens, residual, valid)

    def _add_output(self, name: str, value: Tensor, step: Step, target: Tensor | None) -> None:
        module, layout = self._modules[name], self._options.layouts[name]
        with self._unpaired(name, output_of(name)):
            rows = output_rows(value, layout, name, self._axes.of(module))
            if layout != "first" and (layout == "last" or value.dim() == 3) and self._axes.is_doubtful(module, value):
                raise Unpaired(_doubt(value))
            rows = flattened(rows, step.n, step.positions.lengths)
            valid = step.positions.of(rows.shape[-2])
            self._add_rows(output_of(name), name, rows, step, target, self._options.tokens, valid=valid)

    def _add_rows(
        self,
        key: str,
        name: str,
        h: Tensor,
        step: Step,
        target: Tensor | None,
        tokens: Tokens,
        residual: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Add rows in normal form to the moments kept under ``key``; messages call them ``name``."""
        if h.shape[-3] != step.n:
            raise Unpaired(f"it has {h.shape[-3]} rows for {step.n} samples, so rows and targets cannot be paired")
        ignored = self._options.ignore_index
        rows, y = rows_and_targets(h, target, tokens, step.inputs, name, ignored, valid)
        if self._options.visit is not None:
            kept = None if y is None or y.is_floating_point() else y.reshape(rows.shape[0], -1)[:, 0] != ignored
            self._options.visit(key, rows.detach() if kept is None else rows.detach()[kept.to(rows.device)])
            return
        if key not in self._features:
            self._features[key] = FeatureAccumulator(name, self._options.gram, ignored, self._options.memory)
        self._features[key].add(rows, y, residual)

    @contextmanager
    def _unpaired(self, name: str, key: str) -> Iterator[None]:
        """Leave the features of ``key`` out if rows and targets cannot be paired inside this block.

        A statistic missing in one batch is dropped for all: a part of the data would pass for the whole.
        """
        try:
            yield
        except Unpaired as reason:
            self._left_out.setdefault((key, "features"), f"no features: {reason}")
            if isinstance(reason, NoSuchSites):
                self._no_such_sites[name] = str(reason)

    def _add_network(self, step: Step, target: Tensor | None) -> None:
        correct, counted = _count_correct(step, target, self._options.ignore_index)
        if self._options.features and target is not None and step.output.dim() == 2:
            with self._unpaired(output_of(), output_of()):  # its rows are samples, whatever the tokens
                rows = step.output.detach().unsqueeze(1)
                self._add_rows(output_of(), output_of(), rows, step, target, "mean")
        new = NetworkStatistics(step.n, step.loss, correct, counted, terms=step.terms)
        self._network = new if self._network.n == 0 else merge_networks(self._network, new)

    def result(self, unsupported: dict[str, Note], asked: dict[str, Any]) -> Statistics:
        """The finished statistics; NaN or infinity in any of them is an error that names the layer."""
        self._sums.finish()
        if self._no_such_sites and not set(self._sums.weights) - set(self._no_such_sites):
            raise InputError(next(iter(self._no_such_sites.values())))
        self._left_out |= self._sums.too_large
        for key in [key for key in self._features if (key, "features") in self._left_out]:
            del self._features[key]
        for rows in self._features.values():
            rows.finish()
        layers: Mapping[str, LayerStatistics] = MadeWhenAsked(
            {name: partial(self._layer, name) for name in self._order}
        )
        if self._options.snapshot:
            layers = {name: self._taken(name) for name in self._order}
        found = {name: self._features_of(output_of(name)) for name in self._modules}
        outputs = {name: part for name, part in found.items() if part is not None}
        network = replace(self._network, output=self._features_of(output_of()))
        notes = drop_refuted(self._all_notes(unsupported), layers)
        return Statistics(layers, outputs, network, notes, frozenset(self._left_out), asked)

    def _layer(self, name: str) -> LayerStatistics:
        """The finished statistics of one layer."""
        layer = LayerStatistics(
            name,
            self._sums.weights[name],
            self._network.n,
            features=self._features_of(name),
            shared=name in self._shared,
            terms=self._network.terms,
            **{what: self._sums.get(name, what) for what in SUMS},
        )
        return layer_with_totals(layer, self._network, self._left_out)

    def _taken(self, name: str) -> LayerStatistics:
        """The same, of which nothing is kept here, so that sums are not held twice."""
        layer = self._layer(name)
        self._sums.forget(name)
        self._features.pop(name, None)
        return layer

    def _features_of(self, key: str) -> FeatureStatistics | None:
        part = self._features[key].result() if key in self._features else None
        return replace(part, of_outputs=True) if part is not None and key in self._looked_up else part

    def _all_notes(self, unsupported: dict[str, Note]) -> dict[str, tuple[Note, ...]]:
        """The capture's notes and those of this collection, by layer or module."""
        notes: dict[str, list[Note]] = {}
        for name, note in (*unsupported.items(), *self._notes.items()):
            notes.setdefault(name, []).append(note)
        for (name, _), reason in self._left_out.items():
            name = name.removesuffix(output_of()).strip() or output_of()
            if reason and Note("left out", reason) not in notes.setdefault(name, []):
                notes[name].append(Note("left out", reason))
        return {name: tuple(found) for name, found in notes.items() if found}


def _sites(a: Application, axis: int) -> int:
    """Sites of a sample in an application that the loss reaches, 0 in others."""
    return 0 if a.dz is None else a.layer.kind.outputs(a.layer.module, a.dz, axis).shape[-2]


def _cut_sites(module: nn.Module, h: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The sites of a causal convolution that belong to tokens: padded on both sides, its last outputs are cut off."""
    extra = module.kernel_size[0] - 1 if isinstance(module, nn.Conv1d) else 0
    length = h.shape[-2] - extra
    causal = extra and getattr(module, "padding", None) == (extra,) and length in lengths and h.shape[-2] not in lengths
    return h[..., :length, :] if causal else h


def _doubt(value: Tensor) -> str:
    return (
        f"in shape {tuple(value.shape)}, beside sequence-first modules, either of the first axes could be the samples, so rows "
        "and targets cannot be paired; take another batch size"
    )


def _count_correct(step: Step, target: Tensor | None, ignore_index: int) -> tuple[int | None, int]:
    output, axis = step.output, class_axis(step.output, target, step.positions.lengths)
    if target is None or axis is None or output.shape[axis] < 2:
        return None, 0
    counts = (target >= 0) & (target != ignore_index)
    return int(((output.argmax(axis) == target) & counts).sum()), int(counts.sum())
