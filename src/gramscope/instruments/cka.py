"""``gs.cka``: how alike the layers of a network are, to each other, to a reference or to another model."""

from __future__ import annotations

import math
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Group, find_exchange, gathered
from gramscope.errors import InputError, checks_names, load_extra
from gramscope.layers.batches import NoBatchError, Unpack, batches, first_tensor
from gramscope.layers.model_call import model_device, model_dtype
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector
from gramscope.measures.similarity import FEWEST, batch_hsic, centred_kernel
from gramscope.measures.table import format_value
from gramscope.statistics.features import Features
from gramscope.statistics.run import run
from gramscope.statistics.structure import Tokens
from gramscope.statistics.sums import Notes, Plan
from gramscope.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        unpack, batch_dim, eval_mode, process_group: as in :func:`gramscope.collect`.

    Returns:
        A :class:`LayerSimilarity`: 1 for features that are equal up to rotation and scale, 0 on average for independent ones.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> found = cka(net, torch.randn(40, 3))
    >>> found.rows, round(found["0", "0"], 6)
    (('0', '2'), 1.0)
    """
    if tokens not in ("mean", "flatten") and not isinstance(tokens, int):
        raise InputError(f"tokens={tokens!r}: CKA needs one row per sample; give 'mean', 'flatten' or a position")
    exchange = find_exchange(process_group, model)
    models = (model,) if other is None or other is model else (model, other)
    plan = Plan(
        (Features,), layers=layers, tokens=tokens, batch_dim=batch_dim, eval_mode=eval_mode,
        snapshot=False, output=first_tensor, targets=lambda inputs, target: None,  # type: ignore[arg-type, return-value]
    )  # fmt: skip

    def read() -> _Sums:
        total = _Sums()
        with suppress(*([] if exchange is None else [NoBatchError])):  # other processes may have batches
            for inputs, _ in batches(loader, unpack, model_dtype(unwrap(model))):
                rows = [_rows(m, inputs, plan) for m in models]
                total = total.merge(_Sums.of(rows[0], rows[-1]))
        return total

    with ExitStack() as whole:
        for network in models:
            whole.enter_context(gathered(unwrap(network), exchange))
        if exchange is None:
            return read().result()
        return exchange.merged(exchange.read_together(read, model_device(model)), _Sums.merge).result()


def _rows(model: nn.Module, inputs: Any, plan: Plan) -> dict[str, Tensor]:
    """Rows ``[n, d]`` of the layers' inputs in one batch; layers whose rows are not samples are left out."""
    with closing(run(model, [(inputs, None)], None, replace(plan, notes=Notes()))) as stream:
        found = {seen.layer: seen.rows for seen in stream if seen.rows is not None}
    if not found:
        raise InputError(f"no layer of {type(model).__name__} has one row of inputs per sample; look at layers=")
    return found


@dataclass(frozen=True)
class _Sums:
    """``Σ n HSIC₁`` over batches of n samples: of pairs of layers, and of the layers of either side with themselves."""

    names: tuple[tuple[str, ...], ...] = ()
    sums: tuple[Tensor, ...] = ()
    samples: int = 0

    @classmethod
    def of(cls, left: dict[str, Tensor], right: dict[str, Tensor]) -> _Sums:
        """Those of a batch: rows ``[n, d]`` by layer."""
        n = next(iter(left.values())).shape[0]
        total = cls((tuple(left), tuple(right)))
        for part in torch.arange(n, dtype=torch.int64, device="cpu").tensor_split(math.ceil(n / PART)):
            if part.numel() >= FEWEST:
                a, b = (torch.stack([centred_kernel(h[part]) for h in rows.values()]) for rows in (left, right))
                sums = (batch_hsic(a, b.to(a.device)), _own(a), _own(b))
                total = total.merge(cls(total.names, tuple(part.numel() * value.cpu() for value in sums), part.numel()))
        return total

    def merge(self, other: _Sums) -> _Sums:
        """The sums over both, of the same layers; those of no batch have no names."""
        if self.names and other.names and self.names != other.names:
            changed = {name for a, b in zip(self.names, other.names, strict=True) for name in set(a) ^ set(b)}
            raise InputError(
                f"different layers: {sorted(changed)} ran in one batch and not in another; choose others with layers="
            )
        sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)) if self.sums and other.sums else ()
        return _Sums(self.names or other.names, sums or self.sums or other.sums, self.samples + other.samples)

    def result(self) -> LayerSimilarity:
        if not self.names:
            raise NoBatchError("the loaders of all processes yielded no batch")
        if not self.sums:
            raise InputError(f"debiased CKA needs batches of at least {FEWEST} samples, and every batch had fewer")
        cross, first, second = self.sums
        rows, columns = self.names
        return LayerSimilarity(rows, columns, cross / torch.outer(first.sqrt(), second.sqrt()), self.samples)


def _own(kernels: Tensor) -> Tensor:
    """``HSIC₁`` of every kernel with itself, ``[l]``."""
    return torch.stack([batch_hsic(kernel[None], kernel[None])[0, 0] for kernel in kernels])
