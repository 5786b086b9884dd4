"""Neural collapse at a network's readout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange
from gramscope.errors import InputError
from gramscope.layers.batches import NoBatchError, Unpack, batches, flattened, is_array, to_device
from gramscope.layers.capture import capture
from gramscope.layers.kinds import effective_weight
from gramscope.layers.labels import IGNORED, LabelReader
from gramscope.layers.model_call import call_model, evaluating, model_device, model_dtype
from gramscope.layers.modules import unwrap
from gramscope.linalg.arrays import Array, as_tensor, to_double
from gramscope.linalg.moments import ClassMoments
from gramscope.measures.collapse import NeuralCollapse, nearest_class, neural_collapse_from_rows
from gramscope.statistics.result import LayerStatistics

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
    layer: LayerStatistics,
    model: nn.Module,
    loader: Any,
    unpack: Unpack | None = None,
    eval_mode: bool = True,
    batch_dim: int = 0,
    targets: Callable[[Any, Any], Tensor] | None = None,
    ignore_index: int = IGNORED,
    exchange: Exchange | None = None,
) -> float:
    """Share of samples, or labelled tokens, whose nearest class mean is the class with the largest score.

    Args:
        layer: statistics of the readout, with the class means of its inputs.
        model, loader, unpack, eval_mode, batch_dim, targets, ignore_index: what the statistics were collected with.
        exchange: the processes whose data they are of.
    """
    classes = None if layer.features is None else layer.features.classes
    if classes is None:
        raise InputError("NC4 needs class labels")
    read = partial(_agreement, layer, classes, model, loader, unpack, eval_mode, batch_dim, targets, ignore_index)
    if exchange is None:
        agree, count = read()
        return agree / count
    agree, count, error = 0, 0, None
    try:
        agree, count = read()
    except NoBatchError:
        pass
    except Exception as raised:
        error = raised
    device = model_device(model)
    exchange.raise_together(error, device)
    numbers = torch.tensor([agree, count], dtype=torch.int64, device=device)
    exchange.add(numbers)
    return int(numbers[0]) / int(numbers[1])


def _agreement(
    layer: LayerStatistics,
    classes: ClassMoments,
    model: nn.Module,
    loader: Any,
    unpack: Unpack | None,
    eval_mode: bool,
    batch_dim: int,
    targets: Callable[[Any, Any], Tensor] | None,
    ignore_index: int,
) -> tuple[int, int]:
    """How many rows agree, and how many there are."""
    if isinstance(loader, Iterator):
        raise InputError(
            "NC4 reads the data twice, and this loader can be read once; give a DataLoader or a list of batches"
        )
    agree = count = 0
    device, root = model_device(model), unwrap(model)
    with (
        evaluating(root, eval_mode),
        capture(model, [layer.name], outputs=[layer.name], gradients=False, batch_dim=batch_dim) as tape,
    ):
        reader = LabelReader(model, ignore_index, own_loss=False)
        for batch in batches(loader, unpack, model_dtype(root)):
            inputs, given = to_device(batch, device)
            with tape.ignoring_calls():
                inputs, target, positions, _ = reader.read(inputs, given)
            call_model(model, inputs)
            target = target if targets is None else targets(inputs, given)
            h = flattened(tape[layer.name].h, len(target), positions.lengths)
            if h.dim() != 3 or target.numel() != h.shape[0] * h.shape[1]:
                raise InputError(f"NC4 needs one label per row; layer {layer.name!r} has {h.shape[-2]} sites")
            kept = target.flatten() != ignore_index
            nearest = nearest_class(to_double(h.flatten(0, 1)[kept]), classes)
            scores = tape.outputs[layer.name].reshape(kept.shape[0], -1)[kept]
            agree += int((nearest == scores.argmax(1).to(nearest.device)).sum())
            count += nearest.shape[0]
            tape.clear()
    return agree, count
