"""Neural collapse at a network's readout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange
from gramscope.errors import InputError
from gramscope.layers.batches import NoBatchError, batches, flattened, is_array
from gramscope.layers.capture import capture
from gramscope.layers.kinds import effective_weight
from gramscope.layers.labels import LabelReader
from gramscope.layers.model_call import call_model, evaluating, model_device, model_dtype
from gramscope.layers.modules import unwrap
from gramscope.linalg.arrays import Array, as_tensor, to_double
from gramscope.linalg.moments import ClassMoments
from gramscope.measures.collapse import NeuralCollapse, nearest_class, neural_collapse_from_rows
from gramscope.statistics.result import LayerStatistics
from gramscope.statistics.sums import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: weight [C, d], a pair of weight and bias, or a module with ``weight`` and ``bias``
Readout: TypeAlias = Array | Sequence[Array | None] | nn.Module


def neural_collapse(
    H: Array,
    labels: Array,
    readout: Readout | None = None,
    *,
    process_group: Group = None,
    mesh: DeviceMesh | None = None,
) -> NeuralCollapse:
    """NC1–NC4 of penultimate features; see :func:`~gramscope.measures.collapse.neural_collapse_from_rows`.

    Args:
        H: features ``[n, d]``.
        labels: integers ``[n]``; with a readout its row numbers.
        readout: weight ``[C, d]``, a pair of weight and bias, or a module with both (its weight may be parametrised);
            needed for NC3 and NC4.
        process_group, mesh: the processes whose rows are one sample, by default all of ``torch.distributed``;
            ``process_group=False`` for this process alone. The rows of all are sent to all; ``gs.measure`` with ``"nc1"`` to
            ``"nc4"`` sends class means and scatter instead.

    >>> H = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    >>> neural_collapse(H, torch.tensor([0, 0, 1, 1]), nn.Linear(2, 2)).nc1
    0.0
    """
    exchange = find_exchange(process_group, mesh)
    if exchange is not None:
        H, labels = _rows_of_all(H, labels, exchange)
    return neural_collapse_from_rows(H, labels, *_weight_and_bias(readout))


def _rows_of_all(H: Array, labels: Array, exchange: Exchange) -> tuple[Array, Array]:
    """The rows of all processes, in their order."""
    exchange.wait_for_all()
    given: tuple[Tensor, Tensor] | InputError
    try:
        given = as_tensor(H, "H").cpu(), as_tensor(labels, "labels").cpu()
    except InputError as error:
        given = error
    parts: list[tuple[Tensor, Tensor]] = []
    for rank, found in enumerate(exchange.gather_objects(given)):
        if isinstance(found, InputError):
            raise InputError(f"process {rank}: {found}") from found
        parts.append(found)
    features = as_tensor(H, "H")
    parts = [part for part in parts if len(part[0])] or parts[:1]
    return tuple(torch.cat(column).to(features.device) for column in zip(*parts, strict=True))  # type: ignore[return-value]


def _weight_and_bias(readout: Any) -> tuple[Any, Any]:
    if isinstance(readout, nn.Module):
        if not isinstance(getattr(readout, "weight", None), Tensor):
            raise InputError(f"readout is a {type(readout).__name__}, which has no weight; give its last linear layer")
        return effective_weight(readout, "weight"), getattr(readout, "bias", None)
    if isinstance(readout, tuple) or (isinstance(readout, list) and is_array(readout[0])):
        if len(readout) != 2:
            raise InputError(f"readout has {len(readout)} parts; give the weight [classes, features] and the bias")
        return readout[0], readout[1]
    return readout, None


@torch.no_grad()
def nearest_mean_agreement(
    layer: LayerStatistics, model: nn.Module, loader: Any, plan: Plan, exchange: Exchange | None = None
) -> float:
    """Share of samples, or labelled tokens, whose nearest class mean is the class with the largest score.

    Args:
        layer: statistics of the readout, with the class means of its inputs.
        model, loader, plan: what the statistics were collected with.
        exchange: the processes whose data they are of.
    """
    classes = None if layer.features is None else layer.features.classes
    if classes is None:
        raise InputError("NC4 needs class labels")
    if exchange is None:
        agree, count = _agreement(layer.name, classes, model, loader, plan)
        return agree / count
    agree, count, error = 0, 0, None
    try:
        agree, count = _agreement(layer.name, classes, model, loader, plan)
    except NoBatchError:
        pass
    except Exception as raised:
        error = raised
    device = model_device(model)
    exchange.raise_together(error, device)
    numbers = torch.tensor([agree, count], dtype=torch.int64, device=device)
    exchange.add(numbers)
    return int(numbers[0]) / int(numbers[1])


def _agreement(name: str, classes: ClassMoments, model: nn.Module, loader: Any, plan: Plan) -> tuple[int, int]:
    """How many rows agree, and how many there are."""
    if isinstance(loader, Iterator):
        raise InputError(
            "NC4 reads the data twice, and this loader can be read once; give a DataLoader or a list of batches"
        )
    agree = count = 0
    root = unwrap(model)
    captured = capture(model, [name], outputs=[name], gradients=False, batch_dim=plan.batch_dim)
    with evaluating(root, plan.eval_mode), captured as tape:
        reader = LabelReader(model, plan.ignore_index, own_loss=False)
        for inputs, given in batches(loader, plan.unpack, model_dtype(root), model_device(model)):
            with tape.ignoring_calls():
                read = reader.read(inputs, given)
            call_model(model, read.inputs)
            target = read.target if plan.targets is None else plan.targets(read.inputs, given)
            h = flattened(tape[name].h, len(target), read.positions.lengths)
            if h.dim() != 3 or target.numel() != h.shape[0] * h.shape[1]:
                raise InputError(f"NC4 needs one label per row; layer {name!r} has {h.shape[-2]} sites")
            kept = target.flatten() != plan.ignore_index
            nearest = nearest_class(to_double(h.flatten(0, 1)[kept]), classes)
            scores = tape.outputs[name].reshape(kept.shape[0], -1)[kept]
            agree += int((nearest == scores.argmax(1).to(nearest.device)).sum())
            count += nearest.shape[0]
            tape.clear()
    return agree, count
