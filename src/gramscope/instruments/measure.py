"""``gs.measure``: a table of measures of every layer of a model, in one pass over a loader."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange
from gramscope.distributed.gathered import gathered
from gramscope.errors import GramscopeWarning, InputError, NumericalError
from gramscope.instruments.passes import FurtherReadings, Source
from gramscope.instruments.readout import nearest_mean_agreement
from gramscope.layers.jacobians import MEMORY
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import may_compute_loss
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.layers.validity import check_reference
from gramscope.linalg.measured import Measured
from gramscope.measures.column import Context, LayerView, Missing
from gramscope.measures.columns import COLUMNS, DEFAULT
from gramscope.measures.table import Table
from gramscope.notes import Note, joined
from gramscope.statistics.collect import collect
from gramscope.statistics.layer import LayerStatistics, NotCollected
from gramscope.statistics.memory import trim_malloc
from gramscope.statistics.progress import progress_bar
from gramscope.statistics.result import Statistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def measure(
    model: nn.Module,
    loader: Any,
    loss: Loss | None = None,
    *,
    measures: str | Iterable[str] | None = None,
    layers: LayerSelector = None,
    reference: nn.Module | None = None,
    held_out: Any = None,
    gamma: float = 0.05,
    ridge: float = 0.0,
    intercept: bool = False,
    center: bool = False,
    weight_decay: float | None = None,
    process_group: Group = None,
    mesh: DeviceMesh | None = None,
    **collecting: Any,
) -> Table:
    """Measure every layer of ``model`` on the data of ``loader``.

    In several processes of ``torch.distributed`` each reads its own part of the data, which may be empty, and all return
    the table of all data.

    Args:
        model: any module; it is left as it was.
        loader: a DataLoader, an iterable of batches, a data set, or tensors or NumPy arrays ``(x, y)``.
        loss: criterion or function of ``(output, target)``; without one, the model's own ``.loss`` is taken where it
            returns one, and else measures of gradients are left out.
        measures: names from ``gramscope.measures.columns.COLUMNS``; ``None`` for the usual ones that the given data
            allow, ``"all"`` for all of those. ``"nc4"`` reads the data a second time.
        layers: names, globs or types of linear-like layers; ``None`` for all.
        reference: the network at initialisation, for centred alignments and the change of weights.
        held_out: further data for target linearity on samples that were not fitted.
        gamma: learning rate of a step on the mean loss, for the measures of a step.
        ridge: λ of target linearity.
        intercept: fit target linearity with an intercept.
        center: Pearson instead of cosine in the correlations of the NFA and of the canonical representation.
        weight_decay: λ of the training, for ``fact_residual``; that of ``torch.optim.SGD``.
        process_group, mesh: the processes whose data are one sample, by default all; ``process_group=False`` for this process
            alone (:func:`gramscope.collect`).
        **collecting: further options of :func:`gramscope.collect` (``tokens``, ``outputs``, ``reduction``, ``targets``,
            ``ignore_index``, ``sketch``, …).

    Returns:
        A :class:`~gramscope.measures.table.Table` of layers by measures. What could not be measured is ``None`` with a note.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = (torch.rand(20, 3), torch.arange(20) % 2)
    >>> table = gs.measure(net, data, torch.nn.CrossEntropyLoss(), measures=["nfa", "target_linearity"])
    >>> list(table), table.columns
    (['0', '2'], ['nfa', 'target_linearity'])
    """
    given = given_by(model, loss)
    given |= {"reference"} if reference is not None else set()
    given |= {"held_out"} if held_out is not None else set()
    names = names_of(measures, given)
    needs = _needs(names)
    options = {**what_to_collect(names), "layers": layers, **collecting}
    twin = reference if "reference_jacobians" in needs else None
    options |= {"process_group": process_group, "mesh": mesh}
    exchange = find_exchange(process_group, mesh, model)
    with ExitStack() as whole:
        for network in (model, *([] if reference is None else [reference])):
            whole.enter_context(gathered(unwrap(network), exchange))
        statistics = collect(model, loader, loss, reference=twin, **options)
        trim_malloc()  # activations and gradients, before evaluation takes its own
        if loss is None and not statistics.network.terms:  # the model takes labels, but got none or returned no loss
            names = names_of(measures, given - OF_LOSS)
        options |= {"gradients": False, "residuals": False, "autograd": False, "jacobians": False}
        others = None if held_out is None else collect(model, held_out, loss, **options)
        weights = {}
        if reference is not None:
            check_reference(model, reference)
            weights = {layer.name: layer.weight() for layer in select_layers(reference, layers)}
        again: dict[str, Any] = {
            name: collecting[name] for name in ("unpack", "eval_mode", "batch_dim", "targets") if name in collecting
        }
        again["ignore_index"] = statistics.options["ignore_index"]
        together = again["exchange"] = exchange if statistics.processes > 1 else None
        if together is not None:
            _check_alike(together, names, ridge, intercept)

        def source(found: Statistics, data: Any) -> Source:
            read = partial(collect, model, data, loss, **{k: v for k, v in options.items() if k not in OF_PASSES})
            return Source(found, read, data, together)

        further = None if others is None else source(others, held_out)
        readings = FurtherReadings(source(statistics, loader), further, ridge, intercept)
        nearest_mean = partial(nearest_mean_agreement, model=model, loader=loader, **again)
        context = Context(
            statistics,
            gamma,
            ridge,
            intercept,
            center,
            weights,
            others,
            nearest_mean=nearest_mean,
            weight_decay=weight_decay,
            readings=readings if options["gram"] == "auto" else None,
            memory=collecting.get("memory", MEMORY),
        )
        return table_of(statistics, names, context, collecting.get("progress", True))


def _check_alike(exchange: Exchange, *settings: Any) -> None:
    """Raise in all processes if they measure different things: one that reads the data again would wait for the others."""
    found = exchange.gather_objects(settings)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise InputError(
                f"the processes measure different things: process 0 {list(found[0])}, process {rank} {list(other)}; give all "
                "of them the same measures=, ridge= and intercept="
            )


#: options of collecting that further passes over the data have of their own
OF_PASSES = frozenset({"layers", "outputs", "progress", "process_group", "mesh"})
#: what only a loss gives
OF_LOSS = frozenset({"loss", "covariance", "autograd", "residuals"})


def given_by(model: nn.Module, loss: Loss | None) -> set[str]:
    """What measures may need that a model, its data and a loss give."""
    given = {"features", "gram", "jacobians", "reference_jacobians", "targets", "labels"}
    return given | OF_LOSS if loss is not None or may_compute_loss(model) else given


def what_to_collect(names: Iterable[str]) -> dict[str, Any]:
    """The options of :func:`gramscope.collect` that measures need."""
    names = set(names)
    needs = _needs(names)
    options: dict[str, Any] = {name: name in needs for name in ("residuals", "autograd", "features", "covariance")}
    options |= {"snapshot": False, "probed": True, "gradients": "loss" in needs, "gram": "gram" in needs and "auto"}
    outputs = _needs({name for name in names if not COLUMNS[name].at_inputs})
    at_inputs = [sums for sums in ("covariance", "jacobians") if sums not in outputs]
    return options | {"jacobians": "jacobians" in needs and "auto", "at_inputs": at_inputs}


def table_of(statistics: Statistics, names: Iterable[str], context: Context, progress: bool = True) -> Table:
    """Evaluate measures on collected statistics; module outputs get a row for the measures of features."""
    notes = {name: joined(found) for name, found in statistics.notes.items()}
    rows: dict[str, dict[str, float | None]] = {}
    errors: dict[str, dict[str, float]] = {}

    def fill(row: str, layer: LayerStatistics, defined: Iterable[str]) -> None:
        rows[row] = dict.fromkeys(names)
        view = LayerView(layer, context)
        for name in defined:
            found = evaluate(name, view, notes)
            if found is not None:
                rows[row][name] = found.value
                if found.error is not None:
                    errors.setdefault(row, {})[name] = found.error

    names = list(names)
    with progress_bar("measuring", len(statistics), progress) as advance:
        for layer in statistics:
            fill(layer.name, layer, names)
            trim_malloc()
            advance()
    for module, part in statistics.outputs.items():
        # A module's output has features but no weight.
        featured = LayerStatistics(module, torch.empty(0, 0, dtype=torch.float64), part.n, features=part)
        row = f"{module} (output)" if module in rows else module
        fill(row, featured, [name for name in names if COLUMNS[name].of_features])
    network = statistics.network
    summary: dict[str, float | None] = {"samples": network.n}
    if network.terms > network.n:
        summary["positions"] = network.terms
    if network.loss_sum or any("loss" in COLUMNS[n].needs for n in names):
        summary["loss"] = network.loss
    if network.accuracy is not None:
        summary["accuracy"] = network.accuracy
    return Table(rows, summary, notes, errors)


def evaluate(name: str, view: LayerView, notes: dict[str, Note]) -> Measured | None:
    """One cell of the table; where it has none, a note says why."""
    key, prefix = f"{view.layer.name}.{name}", f"layer {view.layer.name!r}: "
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GramscopeWarning)
        try:
            found = COLUMNS[name](view)
        except (Missing, InputError, NumericalError) as reason:
            why = view.context.statistics.notes.get(view.layer.name) if isinstance(reason, NotCollected) else None
            notes[key] = joined(why) if why else Note("undefined", str(reason).removeprefix(prefix))
            return None
    remarks = [Note("remark", found.remark)] if found.remark else []
    if math.isnan(found.value) and not caught:
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


def _needs(names: Iterable[str]) -> set[str]:
    """What must be collected for measures."""
    return set().union(*(COLUMNS[name].needs for name in names))


def names_of(measures: str | Iterable[str] | None, given: set[str]) -> list[str]:
    """The measures to compute: those named, or the usual (all) ones that ``given`` allows."""
    if measures is None or measures == "all":
        return [name for name in (DEFAULT if measures is None else COLUMNS) if COLUMNS[name].needs <= given]
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        if name not in COLUMNS:
            raise InputError(f"no measure {name!r}; there are: {', '.join(COLUMNS)}")
        missing = sorted(COLUMNS[name].needs - given)
        if missing:
            raise InputError(f"measure {name!r} needs {', '.join(f'{m}=' for m in missing)}")
    if not names:
        raise InputError("measures=[] names nothing to measure")
    return names
