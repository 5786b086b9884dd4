"""``gs.cka``: how alike the layers of a network are, to each other, to a reference or to another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange, gathered
from gramscope.errors import InputError, checks_names, load_extra
from gramscope.layers.batches import NoBatchError, Unpack, batches, to_device
from gramscope.layers.capture import capture
from gramscope.layers.labels import LabelReader
from gramscope.layers.model_call import evaluating, model_device, model_dtype, run_captured
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector
from gramscope.layers.tape import Tape
from gramscope.measures.similarity import FEWEST, batch_hsic, centred_kernel
from gramscope.measures.table import format_value
from gramscope.statistics.structure import Structure, Tokens, find_structure, inputs_of, rows_and_targets
from gramscope.statistics.sums import LeftOut
from gramscope.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed.device_mesh import DeviceMesh

#: samples whose n×n kernels are formed at once; larger batches are taken in parts
PART = 512


@dataclass(frozen=True)
class LayerSimilarity:
    """Debiased linear CKA between layers.

    Args:
        rows: layers of the model, in order of execution.
        columns: layers of the other model, or of the same.
        values: ``[rows, columns]``, float64.
        samples: how many were compared.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Tensor
    samples: int

    def __getitem__(self, pair: tuple[str, str]) -> float:
        row, column = pair
        for name, names in ((row, self.rows), (column, self.columns)):
            if name not in names:
                raise InputError(f"no layer {name!r}; there are: {', '.join(names)}")
        return float(self.values[self.rows.index(row), self.columns.index(column)])

    def diagonal(self) -> dict[str, float]:
        """Layers that both models have, each against its namesake: what training has changed since a reference."""
        return {name: self[name, name] for name in self.rows if name in self.columns}

    def plot(self) -> Figure:
        """A map of rows by columns, as a matplotlib figure."""
        size = [2.5 + 0.28 * len(names) for names in (self.columns, self.rows)]
        make_figure = load_extra("matplotlib.figure", "lab").Figure
        figure: Figure = make_figure(figsize=(size[0] + 0.8, size[1]), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(self.values.numpy(), vmin=0.0, vmax=1.0, cmap="viridis")
        axes.set_xticks(range(len(self.columns)), self.columns, rotation=90)
        axes.set_yticks(range(len(self.rows)), self.rows)
        figure.colorbar(image, label="debiased linear CKA")
        return figure

    def __str__(self) -> str:
        cells = [["CKA", *self.columns]]
        cells += [[name, *map(format_value, row)] for name, row in zip(self.rows, self.values.tolist(), strict=True)]
        return "\n".join(text_table(cells))

    __repr__ = __str__


@checks_names
@torch.no_grad()
def cka(
    model: nn.Module,
    loader: Any,
    other: nn.Module | None = None,
    *,
    layers: LayerSelector = None,
    tokens: Tokens = "mean",
    unpack: Unpack | None = None,
    batch_dim: int = 0,
    eval_mode: bool = True,
    process_group: Group = None,
    mesh: DeviceMesh | None = None,
) -> LayerSimilarity:
    """Debiased linear CKA between the inputs of all layers, in one pass (Nguyen, Raghu and Kornblith 2021).

    The three HSIC of every pair are unbiased in each batch and are averaged over batches, each weighted by its samples. Only
    these averages are kept: exact sums would need a d×e matrix for each pair. The result therefore depends slightly on the
    batches; larger ones give less noise, up to 512 samples, above which a batch is taken in parts. Fewer than 4 samples are
    left out. ``gs.linear_cka(X, Y, debiased=True)`` is exact for two arrays.

    In several processes of ``torch.distributed`` each reads its own batches, of which there may be none, and all return the
    result of all batches.

    Args:
        model: any module; it is left as it was.
        loader: a DataLoader, an iterable of batches, a data set, or tensors or NumPy arrays ``(x, y)``; targets are not used.
        other: the network at initialisation or any other model that takes the same inputs; ``None`` compares the layers of
            ``model`` with each other.
        layers: names, globs or types of linear-like layers, in both models; ``None`` for all.
        tokens: how sites become one row per sample: ``"mean"`` over them, ``"flatten"``, or a position.
        unpack, batch_dim, eval_mode, process_group, mesh: as in :func:`gramscope.collect`.

    Returns:
        A :class:`LayerSimilarity`: 1 for features that are equal up to rotation and scale, 0 on average for independent ones.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> found = cka(net, torch.randn(40, 3))
    >>> found.rows, round(found["0", "0"], 6)
    (('0', '2'), 1.0)
    """
    if tokens not in ("mean", "flatten") and not isinstance(tokens, int):
        raise InputError(f"tokens={tokens!r}: CKA needs one row per sample; give 'mean', 'flatten' or a position")
    exchange = find_exchange(process_group, mesh, model)
    models = (model,) if other is None or other is model else (model, other)

    def read() -> _Sums:
        total = _Sums()
        with (
            suppress(*([] if exchange is None else [NoBatchError])),
            ExitStack() as stack,
        ):  # other processes may have batches
            sides = [_Side(m, stack, layers, tokens, batch_dim, eval_mode) for m in models]
            for inputs, target in batches(loader, unpack, model_dtype(unwrap(model))):
                rows = [side.rows(inputs, target, sides) for side in sides]
                total.add(rows[0], rows[-1])
        return total

    with ExitStack() as whole:
        for network in models:
            whole.enter_context(gathered(unwrap(network), exchange))
        if exchange is None:
            return read().result()
        device = model_device(model)
        return exchange.read_together(read, device).over_processes(exchange, device).result()


class _Sums:
    """``Σ n HSIC₁`` over batches of n samples: of pairs, and of the layers of either side with themselves."""

    def __init__(self) -> None:
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        self._samples = 0

    def add(self, left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """Add a batch: rows ``[n, d]`` by layer."""
        names = (tuple(left), tuple(right))
        if self._names != ((), ()) and names != self._names:
            changed = {name for a, b in zip(names, self._names, strict=True) for name in set(a) ^ set(b)}
            raise InputError(
                f"layers {sorted(changed)} ran in one batch and not in another; choose others with layers="
            )
        self._names = names
        n = next(iter(left.values())).shape[0]
        for part in torch.arange(n, dtype=torch.int64, device="cpu").tensor_split(math.ceil(n / PART)):
            if part.numel() >= FEWEST:
                self._add_part(
                    *(torch.stack([centred_kernel(h[part]) for h in rows.values()]) for rows in (left, right))
                )

    def _add_part(self, left: Tensor, right: Tensor) -> None:
        n, right = left.shape[-1], right.to(left.device)
        cross, first, second = n * batch_hsic(left, right), n * _own(left), n * _own(right)
        if self._sums is not None:
            cross, first, second = cross + self._sums[0], first + self._sums[1], second + self._sums[2]
        self._sums = (cross, first, second)
        self._samples += n

    def over_processes(self, exchange: Exchange, device: torch.device) -> _Sums:
        """The sums of all processes, the same in each."""
        found = exchange.gather_objects((self._names, self._samples))
        names = {of_process for of_process, _ in found if of_process != ((), ())}
        if not names:
            raise NoBatchError("the loaders of all processes yielded no batch")
        if len(names) > 1:
            raise InputError("the processes saw different layers; choose those that run everywhere with layers=")
        total = _Sums()
        total._names = names.pop()
        total._samples = sum(samples for _, samples in found)
        if not total._samples:
            return total
        rows, columns = map(len, total._names)
        shapes = ((rows, columns), (rows,), (columns,))
        own = self._sums or tuple(torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes)
        sums = [part.to(device, copy=True) for part in own]
        for part in sums:
            exchange.add(part)
        total._sums = (sums[0], sums[1], sums[2])
        return total

    def result(self) -> LayerSimilarity:
        if self._sums is None:
            raise InputError(f"debiased CKA needs batches of at least {FEWEST} samples, and every batch had fewer")
        cross, first, second = self._sums
        return LayerSimilarity(*self._names, (cross / torch.outer(first.sqrt(), second.sqrt())).cpu(), self._samples)


def _own(kernels: Tensor) -> Tensor:
    """``HSIC₁`` of every kernel with itself, ``[l]``."""
    return torch.stack([batch_hsic(kernel[None], kernel[None])[0, 0] for kernel in kernels])


class _Side:
    """One of the compared models, captured: the rows of its layers' inputs on a batch."""

    def __init__(
        self, model: nn.Module, stack: ExitStack, layers: LayerSelector, tokens: Tokens, batch_dim: int, eval_mode: bool
    ) -> None:
        self._model, self._tokens = model, tokens
        root = unwrap(model)
        stack.enter_context(evaluating(root, eval_mode))
        self._tape: Tape = stack.enter_context(
            capture(model, layers, gradients=False, batch_dim=batch_dim, copy_weights=False)
        )
        self._batch_dim = batch_dim
        self._structure = Structure()
        self._reader = LabelReader(model)
        self.device = model_device(model)

    def rows(self, inputs: Any, target: Any, sides: Sequence[_Side]) -> dict[str, Tensor]:
        """Rows ``[n, d]`` by layer, in order of execution; the other side, which may share modules, does not look."""
        with self._tape.ignoring_calls():
            read = self._reader.read(*(to_device(part, self.device) for part in (inputs, target)))
        with ExitStack() as stack:
            for side in sides:
                if side is not self:
                    stack.enter_context(side._tape.ignoring_calls())
            run_captured(self._model, self._tape, read.inputs)
            if not self._structure.axes:
                nothing = torch.empty(0, dtype=torch.float32, device=self.device)
                self._structure = find_structure(self._model, self._tape, read.inputs, nothing, None)
        n, lengths = self._tape.calls[-1].samples, read.positions.lengths
        found: dict[str, Tensor] = {}
        for record in self._tape:
            try:
                x, averaged = record.applications[0].x, self._tokens == "mean" and not lengths
                axis = self._structure.axis(record.name, x, self._batch_dim)
                h = inputs_of(record, axis, n, averaged, lengths)
                valid = read.positions.of(h.shape[-2], len(record.applications))
                rows, _ = rows_and_targets(h, None, self._tokens, read.inputs, record.name, valid=valid)
            except LeftOut:
                continue  # its rows are not samples: experts, folded batches
            found[record.name] = rows
        self._tape.clear()
        if not found:
            raise InputError(
                f"no layer of {type(self._model).__name__} has one row of inputs per sample; look at layers="
            )
        return found
