"""Adding one batch to the statistics, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.layers.jacobians import jacobian_chunks
from gramscope.layers.record import LayerRecord
from gramscope.layers.tape import Tape
from gramscope.linalg.moments import block_class_moments, block_moments
from gramscope.linalg.rows import to_double
from gramscope.statistics.features import output_rows, rows_and_targets
from gramscope.statistics.layer import (
    FeatureStatistics,
    LayerStatistics,
    NetworkStatistics,
    merge_features,
    merge_networks,
)
from gramscope.statistics.result import Statistics
from gramscope.statistics.step import Options, Step

#: largest d for which HᵀH is kept unless asked for
GRAM_LIMIT = 512
#: largest number of real target columns whose c×c moments are kept
TARGET_LIMIT = 4096


#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256


class Accumulator:
    """Running sums of one collection; :meth:`result` freezes them."""

    def __init__(self, options: Options, generator: torch.Generator | None) -> None:
        self._options = options
        self._generator = generator
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self._waiting: dict[str, int] = {}
        self._features: dict[str, FeatureStatistics] = {}
        self._outputs: dict[str, FeatureStatistics] = {}
        self._weights: dict[str, Tensor] = {}
        self._network: NetworkStatistics | None = None
        self._n = 0
        self._notes: dict[str, str] = {}

    def add(self, tape: Tape, step: Step, twin: tuple[Tape, Tensor] | None) -> None:
        """Add one batch that ``tape`` has seen; ``twin`` is the reference network's tape and output."""
        self._n += step.n
        target = step.target if isinstance(step.target, Tensor) else None
        for record in tape:
            self._weights.setdefault(record.name, record.layer.weight().clone())
            if self._options.gradients:
                self._add_gradient(record, step.n)
                if record.name in step.autograd:
                    self._add_sum(record.name, "autograd", record.layer.matrix(step.autograd[record.name]))
                self._add_sum(record.name, "Sigma", record.Sigma)
            if self._options.features:
                self._add_layer_features(record, step, target)
        for name, value in tape.outputs.items():
            if self._options.features:
                part = self._rows(name, output_rows(value), step, target)
                if part is not None:
                    self._outputs[name] = merge_features(self._outputs[name], part) if name in self._outputs else part
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

    def _flush(self, name: str) -> None:
        self._add_sum(name, "D", self._partial[name])
        self._partial[name] = torch.zeros_like(self._partial[name])
        self._waiting[name] = 0

    def _add_jacobians(self, tape: Tape, output: Tensor, twin: tuple[Tape, Tensor] | None) -> None:
        options = {"sketch": self._options.sketch, "memory": self._options.memory}
        if twin is None:
            for chunk in jacobian_chunks(tape, output, generator=self._generator, **options):  # type: ignore[arg-type]
                for name, J in chunk.items():
                    self._add_sum(name, "JtJ", _gram(J))
            return
        # Both networks must see the same random signs.
        copy = None if self._generator is None else self._generator.clone_state()
        mine = jacobian_chunks(tape, output, generator=self._generator, **options)  # type: ignore[arg-type]
        theirs = jacobian_chunks(twin[0], twin[1], generator=copy, **options)  # type: ignore[arg-type]
        for chunk, reference in zip(mine, theirs, strict=True):
            for name, J in chunk.items():
                if name not in reference or reference[name].shape != J.shape:
                    raise LayerError(f"the reference network has no layer {name!r} of the same shape")
                self._add_sum(name, "JtJ", _gram(J))
                self._add_sum(name, "JtJ_centered", _gram(J - reference[name]))

    def _add_layer_features(self, record: LayerRecord, step: Step, target: Tensor | None) -> None:
        labelled = isinstance(target, Tensor) and target.dim() == 2 and not target.is_floating_point()
        averaged = self._options.tokens in ("auto", "mean") and not labelled
        h = record.mean_h.unsqueeze(-2) if averaged else record.h
        single = self._options.gradients and record.sites == 1
        part = self._rows(record.name, h, step, target, step.residual if single else None)
        if part is None:
            return
        known = self._features.get(record.name)
        self._features[record.name] = part if known is None else merge_features(known, part)

    def _rows(
        self, name: str, h: Tensor, step: Step, target: Tensor | None, residual: Tensor | None = None
    ) -> FeatureStatistics | None:
        """Moments of one batch of rows in normal form, or a note why there are none."""
        batch = h.shape[-3]
        if batch != step.n:
            self._notes[name] = (
                f"no features: its inputs have {batch} rows for {step.n} samples, so rows and targets cannot be paired"
            )
            return None
        rows, y = rows_and_targets(h, target, self._options.tokens, step.inputs, name)
        if rows.shape[0] == 0:
            return None
        rows = to_double(rows)
        d = rows.shape[-1]
        gram = d <= GRAM_LIMIT if self._options.gram == "auto" else bool(self._options.gram)
        HtE = None
        if residual is not None and residual.dim() == 2 and rows.shape[0] == step.n:
            HtE = rows.mT @ to_double(residual)
        if y is None:
            return FeatureStatistics(name, block_moments(rows, rows.new_zeros(rows.shape[0], 0), gram), None, HtE)
        if y.is_floating_point():
            matrix = to_double(y.reshape(y.shape[0], -1))
            if matrix.shape[1] > TARGET_LIMIT:
                raise InputError(
                    f"the target has {matrix.shape[1]} columns, more than {TARGET_LIMIT}; choose some with targets=, or "
                    "collect with features=False"
                )
            return FeatureStatistics(name, block_moments(rows, matrix, gram), None, HtE)
        labels = y.to(rows.device)
        if labels.dim() == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dim() != 1:
            raise InputError(
                f"integer targets of shape {tuple(y.shape)} do not give one label per row at {name!r} ({rows.shape[0]} "
                "rows); pass targets= or tokens=, or collect with features=False"
            )
        if int(labels.min()) < 0:
            raise InputError(
                f"labels must not be negative, found {int(labels.min())}; mask ignored positions with -100"
            )
        classes = block_class_moments(rows, labels.long(), int(labels.max()) + 1, gram)
        return FeatureStatistics(name, None, classes, HtE)

    def _add_network(self, step: Step, target: Tensor | None) -> None:
        correct, counted = _count_correct(step.output, target)
        output = None
        if self._options.features and isinstance(target, Tensor) and step.output.dim() == 2:
            output = self._rows("(output)", step.output.detach().unsqueeze(1), step, target)
        new = NetworkStatistics(step.n, step.loss, correct, counted, output)
        self._network = new if self._network is None else merge_networks(self._network, new)

    def result(self, unsupported: dict[str, str]) -> Statistics:
        """The finished statistics; NaN or infinity in any of them is an error that names the layer."""
        for name in self._partial:
            self._flush(name)
        for (name, what), value in self._sums.items():
            if not torch.isfinite(value).all():
                raise NumericalError(
                    f"{what} of layer {name!r} is NaN or infinite; look at the inputs and weights there"
                )
        for part in (*self._features.values(), *self._outputs.values()):
            mean = part.moments.mean_h if part.moments is not None else part.classes.means  # type: ignore[union-attr]
            if not torch.isfinite(mean).all():
                raise NumericalError(f"the features at {part.name!r} are NaN or infinite; look at the inputs")
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
                self._features.get(name),
            )
            for name, weight in self._weights.items()
        }
        network = self._network if self._network is not None else NetworkStatistics()
        return Statistics(layers, dict(self._outputs), network, {**unsupported, **self._notes})


def _gram(J: Tensor) -> Tensor:
    """``Σ JᵀJ`` over outputs, samples and sites: ``[m, …, batch, sites, k] → […, k, k]``."""
    if J.dtype in (torch.bfloat16, torch.float16):
        J = J.float()
    rows = J.movedim(0, -2).flatten(-4, -2)
    return rows.mT @ rows


def _count_correct(output: Tensor, target: Tensor | None) -> tuple[int | None, int]:
    if not isinstance(target, Tensor) or target.is_floating_point() or output.dim() < 2:
        return None, 0
    if output.shape[:-1] != target.shape or output.shape[-1] < 2:
        return None, 0
    counts = target >= 0
    return int(((output.argmax(-1) == target) & counts).sum()), int(counts.sum())
