"""``gs.measure``: a table of measures of every layer of a model, in one run over a loader."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange, gathered
from gramscope.errors import GramscopeWarning, InputError, Note, NumericalError, checks_names, joined
from gramscope.instruments.readout import nearest_mean_agreement
from gramscope.layers.batches import Unpack
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import OutputSelector, may_compute_loss
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, matched_layers
from gramscope.linalg.budget import MEMORY, trim_malloc
from gramscope.linalg.measured import Measured
from gramscope.measures.column import Column, Context, LayerView, Missing
from gramscope.measures.columns import columns_of
from gramscope.measures.table import Table
from gramscope.statistics.collect import check_reference, collect_planned, progress_bar
from gramscope.statistics.features import Features
from gramscope.statistics.matrix_sums import CenteredKernel, Covariance, Gradient, Kernel, ParameterGradient
from gramscope.statistics.result import LayerStatistics, Statistics
from gramscope.statistics.structure import Tokens
from gramscope.statistics.sums import OUTPUT, NotCollected, Notes, Plan, Sum

#: what only a loss gives
OF_LOSS = frozenset({"loss", "covariance", "autograd", "residuals"})
#: the sums behind what columns need
SUMS: dict[str, type[Sum]] = {
    "loss": Gradient,
    "covariance": Covariance,
    "autograd": ParameterGradient,
    "jacobians": Kernel,
    "reference_jacobians": CenteredKernel,
    "features": Features,
}


@checks_names
def measure(
    model: nn.Module,
    loader: Any,
    loss: Loss | None = None,
    *,
    measures: str | Column | Iterable[str | Column] | None = None,
    layers: LayerSelector = None,
    outputs: str | Sequence[str] = (),
    reference: nn.Module | None = None,
    held_out: Any = None,
    gamma: float = 0.05,
    ridge: float = 0.0,
    intercept: bool = False,
    center: bool = False,
    weight_decay: float | None = None,
    reduction: str | float | None = None,
    output: OutputSelector = None,
    unpack: Unpack | None = None,
    targets: Callable[[Any, Any], Tensor] | None = None,
    tokens: Tokens = "auto",
    ignore_index: int | None = None,
    channels: str = "auto",
    batch_dim: int = 0,
    eval_mode: bool = True,
    gram: bool | str = "auto",
    jacobians: bool | str = "auto",
    sketch: int | None = None,
    generator: torch.Generator | None = None,
    memory: int = MEMORY,
    dtype: torch.dtype = torch.float64,
    progress: bool = True,
    process_group: Group = None,
) -> Table:
    """Measure every layer of ``model`` on the data of ``loader``.

    In several processes of ``torch.distributed`` each reads its own part of the data, which may be empty, and all return
    the table of all data.

    Args:
        model: any module; it is left as it was.
        loader: a DataLoader, an iterable of batches, a data set, or tensors or NumPy arrays ``(x, y)``.
        loss: criterion or function of ``(output, target)``; without one, the model's own ``.loss`` is taken where it
            returns one, and else measures of gradients are left out.
        measures: names or groups of columns (``gs.measures()`` lists them), or columns of your own; ``None`` for the usual ones
            and ``"all"`` for all that the given data allow. ``"nc4"`` reads the data a second time.
        layers: names, globs or types of linear-like layers; ``None`` for all.
        outputs: names or globs of modules whose outputs get a row of the measures of features too.
        reference: the network at initialisation, for centred alignments and the change of weights.
        held_out: further data for target linearity on samples that were not fitted.
        gamma: learning rate of a step on the mean loss, for the measures of a step.
        ridge: λ of target linearity.
        intercept: fit target linearity with an intercept.
        center: Pearson instead of cosine in the correlations of the NFA and of the canonical representation.
        weight_decay: λ of the training, for ``fact_residual``; that of ``torch.optim.SGD``.
        reduction, output, unpack, targets, tokens, ignore_index, channels, batch_dim, eval_mode, gram, generator, dtype: how
            data are read and sums are kept, as in :func:`gramscope.collect`.
        jacobians: ``"auto"`` takes all outputs of a sample up to 256 and a sketch above, ``True`` takes all.
        sketch: number of random output combinations instead of all outputs (large vocabularies).
        memory: bytes that the matrices of one layer, and a chunk of Jacobians, may take; where exact measures of a layer do
            not fit, products with random vectors give estimates with standard errors.
        progress: show a bar with the time left, on terminals.
        process_group: the processes whose data are one sample, by default all; ``process_group=False`` for this process
            alone (:func:`gramscope.collect`).

    Returns:
        A :class:`~gramscope.measures.table.Table` of layers by measures. What could not be measured is ``None`` with a note.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = (torch.rand(20, 3), torch.arange(20) % 2)
    >>> table = gs.measure(net, data, torch.nn.CrossEntropyLoss(), measures=["nfa", "target_linearity"])
    >>> list(table), table.columns
    (['0', '2'], ['nfa', 'target_linearity'])
    """
    arguments = locals()
    if jacobians is False:
        raise InputError("jacobians=False: give True or 'auto'; measures that need no Jacobians take none")
    given = given_by(model, loss) | OF_LOSS  # a model may return a loss whatever the names of its inputs
    given |= {name for name in ("reference", "held_out") if arguments[name] is not None}
    columns = columns_of(measures, given)
    if measures is not None:
        check_used(columns, reference=reference, held_out=held_out, weight_decay=weight_decay, sketch=sketch)
    plan = plan_of(columns).with_arguments(arguments, loss)
    other = reference if CenteredKernel in plan.sums else None
    exchange = find_exchange(process_group, model)
    with ExitStack() as whole:
        for network in (model, *([] if reference is None else [reference])):
            whole.enter_context(gathered(unwrap(network), exchange))
        statistics = collect_planned(model, loader, loss, plan, other, exchange, progress)
        trim_malloc()  # activations and gradients, before evaluation takes its own
        if loss is None and not statistics.network.has_loss:  # the model returned none
            columns = columns_of(measures, given - OF_LOSS)
        context = _context(arguments, plan, statistics, columns, exchange)
        return table_of(statistics, columns, context, progress)


def _context(
    arguments: Mapping[str, Any], plan: Plan, statistics: Statistics, columns: list[Column], exchange: Exchange | None
) -> Context:
    """What the columns share, from the arguments of :func:`measure`: held-out statistics and initial weights too."""
    model, loss, reference, held_out = (arguments[name] for name in ("model", "loss", "reference", "held_out"))
    others, weights = None, {}
    if held_out is not None:
        of_features = replace(plan, sums=(Features,), residuals=False, notes=Notes())
        others = collect_planned(model, held_out, loss, of_features, None, exchange, arguments["progress"])
    if reference is not None:
        check_reference(model, reference)
        pairs = matched_layers(model, reference, plan.layers)
        weights = {name: other.weight_source() for name, (_, other) in pairs.items()}
    together = exchange if statistics.processes > 1 else None
    settings = {name: arguments[name] for name in ("ridge", "intercept")}
    if together is not None:
        _check_alike(together, [column.name for column in columns], *settings.values())
    return Context(
        statistics,
        reference_weights=weights,
        held_out=others,
        nearest_mean=partial(
            nearest_mean_agreement, model=model, loader=arguments["loader"], loss=loss, plan=plan, exchange=together
        ),
        budget=plan.budget,
        **settings,
        **{name: arguments[name] for name in ("gamma", "center", "weight_decay")},
    )


def _check_alike(exchange: Exchange, *settings: Any) -> None:
    """Raise in all processes if they measure different things: one that reads the data again would wait for the others."""
    found = exchange.gather_objects(settings)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise InputError(
                f"the processes measure different things: process 0 {list(found[0])}, process {rank} {list(other)}; give all "
                "of them the same measures=, ridge= and intercept="
            )


def given_by(model: nn.Module, loss: Loss | None) -> set[str]:
    """What measures may need that a model, its data and a loss give."""
    given = {"features", "gram", "jacobians", "reference_jacobians", "targets", "labels"}
    return given | OF_LOSS if loss is not None or may_compute_loss(model) else given


def plan_of(columns: Iterable[Column]) -> Plan:
    """The sums that columns need, and in which form."""
    columns = list(columns)
    needs, elsewhere = needs_of(columns), needs_of(column for column in columns if not column.at_inputs)
    own = dict.fromkeys(kind for column in columns for kind in column.sums)
    return Plan(
        sums=(*(kind for need, kind in SUMS.items() if need in needs), *own),
        gram="auto" if "gram" in needs else False,
        residuals="residuals" in needs,
        at_inputs=frozenset(SUMS[need] for need in ("covariance", "jacobians") if need not in elsewhere),
        snapshot=False,
        estimates=True,
    )


def check_used(columns: Iterable[Column], **arguments: Any) -> None:
    """Raise for an argument that none of the columns asked for reads."""
    columns = list(columns)
    reads = {
        "reference": "reference" in needs_of(columns),
        "held_out": "held_out" in needs_of(columns),
        "sketch": "jacobians" in needs_of(columns),
        "weight_decay": any(column.name == "fact_residual" for column in columns),
    }
    for name, value in arguments.items():
        if value is not None and not reads[name] and not any(column.sums for column in columns):
            names = ", ".join(column.name for column in columns)
            raise InputError(
                f"{name}= is read by none of the measures asked for ({names}); leave it out, or name one that does"
            )


def table_of(statistics: Statistics, columns: Iterable[Column], context: Context, progress: bool = True) -> Table:
    """Evaluate columns on collected statistics; module outputs get a row for the measures of features."""
    columns = list(columns)
    notes = {name: joined(found) for name, found in statistics.notes.items()}
    rows: dict[str, dict[str, float | None]] = {}

    def fill(row: str, layer: LayerStatistics, defined: Iterable[Column]) -> None:
        rows[row] = {column.name: None for column in columns}
        view = LayerView(replace(layer), context)  # a copy, so that what it puts together goes with it
        few = f"{layer.reached} of {statistics.n} samples" if 0 < layer.reached < statistics.n else ""
        if few:
            notes[row] = joined([*statistics.notes.get(row, ()), Note("remark", f"{few} reach it")])
        doubtful = f"doubtful: {few}" if few and _has_few_rows(layer, statistics.n) else ""
        for column in defined:
            found = evaluate(column, view, notes, doubtful if "features" in column.needs else "")
            if found is not None:
                rows[row][column.name] = found

    with progress_bar("measuring", len(statistics), progress) as advance:
        for layer in statistics:
            fill(layer.name, layer, columns)
            trim_malloc()
            advance()
    for module, part in statistics.outputs.items():  # features, but no weight
        if module != OUTPUT:
            row = f"{module} (output)" if module in rows else module
            fill(row, replace(part, name=module), [column for column in columns if column.of_features])
    network = statistics.network
    summary: dict[str, float | None] = {"samples": network.n}
    if network.positions > network.n:
        summary["positions"] = network.positions
    if network.loss_sum or "loss" in needs_of(columns):
        summary["loss"] = network.loss
    if network.accuracy is not None:
        summary["accuracy"] = network.accuracy
    return Table(rows, summary, notes)


def _has_few_rows(layer: LayerStatistics, n: int) -> bool:
    """Whether a layer's features are too few to tell: fewer than four times their width, or of a tenth of the data."""
    part = layer.features
    return part is not None and (part.n < 4 * part.moments.mean_h.numel() or layer.reached < n / 10)


def evaluate(column: Column, view: LayerView, notes: dict[str, Note], doubtful: str = "") -> Measured | None:
    """One cell of the table; where it has none, a note says why."""
    key, prefix = f"{view.layer.name}.{column.name}", f"layer {view.layer.name!r}: "
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GramscopeWarning)
        try:
            value = column.compute(view)
            found = value if isinstance(value, Measured) else Measured(float(value))
        except (Missing, InputError, NumericalError) as reason:
            known = view.context.statistics.notes if isinstance(reason, NotCollected) else {}
            causes = ([n for n in known.get(name, ()) if n.kind != "remark"] for name in (view.layer.name, OUTPUT))
            why = next(filter(None, causes), None)
            notes[key] = joined(why) if why else Note("undefined", str(reason).removeprefix(prefix))
            return None
    remarks = [Note("remark", found.remark)] if found.remark else []
    if doubtful:
        found = found.with_remark(doubtful)
        remarks.insert(0, Note("doubtful", doubtful))
    if math.isnan(found) and not caught:
        text = "undefined: a side of the quotient is zero, the features are constant, or both"
        remarks.append(Note("undefined", text))
    for warning in caught:
        if issubclass(warning.category, GramscopeWarning):
            remarks.insert(0, Note("doubtful", str(warning.message)))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if remarks:
        notes[key] = joined(remarks)
    return found


def needs_of(columns: Iterable[Column]) -> set[str]:
    """What must be collected for columns."""
    return set().union(*(column.needs for column in columns))
