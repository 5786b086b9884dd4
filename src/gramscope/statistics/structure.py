"""The structure of a batch: each layer's batch axis, inputs that serve several samples, samples that influence each other.

One run of the model on two samples of a batch shows all three.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.batches import nested
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import layers_with_shared_rows
from gramscope.layers.kinds import LinearKind
from gramscope.layers.model_call import OutputSelector, call_model, run_captured, select_output
from gramscope.layers.record import Application
from gramscope.layers.tape import Tape

#: change of an output, in units of its rounding error, that is not taken for an influence of other samples
_ROUNDING = 1000.0
_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_LAST = (
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
)  # fmt: skip
_FIRST_MODULES = ("torch.nn.modules.pooling", "torch.nn.modules.upsampling", "torch.nn.modules.padding")
_ELEMENTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
#: where these are used, three axes may be [batch, channels, length]
_ONE_DIMENSIONAL = (nn.Conv1d, nn.ConvTranspose1d)


@dataclass(frozen=True)
class Structure:
    """What is known of the samples of every batch.

    Args:
        coupled: whether samples of a batch influence each other's outputs.
        serves_many: layers of which one row of inputs serves several samples (learned queries, relative positions).
        axes: by layer, where its inputs do not have one row for each sample: the axis along which it sees the samples, one
            after the other.
    """

    coupled: bool = False
    serves_many: frozenset[str] = frozenset()
    axes: dict[str, int] = field(default_factory=dict)


def find_structure(
    model: nn.Module, tape: Tape, inputs: Any, output: Tensor, selector: OutputSelector, random: Tensor | None = None
) -> Structure:
    """The structure of the batch that ``tape`` has just seen.

    The last sample and the first one are run alone, in this order: where their outputs stay as they were, no sample influences
    another. (Of two samples, or where the outputs change, the inputs of others are replaced instead, since a model may draw
    random numbers or accept one size alone.) A layer sees the samples along the axis where it saw parts of what it saw of the
    whole batch. A row serves several samples where the outputs of both have gradients there.

    Args:
        model: the model.
        tape: a capture that has seen one forward of the model.
        inputs: of that forward.
        output: of that forward, chosen by ``selector``.
        selector: which output of the model.
        random: the state of torch's generator before that forward.
    """
    n, batch_dim = tape.calls[-1].samples, tape.batch_dim
    asked = _layers_with_other_rows(tape, n)
    if n < 2:
        return Structure(axes=dict.fromkeys(asked, 0))
    across = bool(tape.calls[-1].across_samples)
    chosen = [n - 1, 0] if n > 2 else [0]
    with _run_alone(model, tape, inputs, n, chosen, random) as (alone, returned):
        axes = {} if alone is None else _axes(asked, alone, n, chosen)
        if not torch.is_grad_enabled() or across:  # nothing is differentiated; or the tape has a note with the cause
            return Structure(axes=axes)
        try:
            found = None if alone is None else select_output(returned, selector)
        except InputError:
            found = None
        coupled = n == 2 or found is None or _changed(output, found, chosen, n, batch_dim) is not False
        coupled = coupled and _influences_others(
            lambda x: select_output(call_model(model, x), selector), tape, inputs, output, random
        )
        if coupled:
            return Structure(True, axes=axes)
        pair = (alone, found) if alone is not None and found is not None and n > 2 else (tape, output)
        try:
            return Structure(False, layers_with_shared_rows(*pair), axes)
        except InputError:  # the rows of the output are not those of samples
            return Structure(False, axes=axes)


@torch.no_grad()
def _influences_others(
    run: Callable[[Any], Tensor], tape: Tape, inputs: Any, output: Tensor, random: Tensor | None
) -> bool:
    """Whether outputs of some samples change when the inputs of others are replaced.

    The first half of the samples is replaced by copies of others, and the outputs of the second half must stay as they were;
    then the same with the halves exchanged, since influence may go one way only.

    Args:
        run: from inputs to the model's output.
        tape: a capture that has seen the forward of the batch.
        inputs: of the batch, tensors in any nesting; those of all samples are exchanged.
        output: what ``run`` returned for these inputs, samples along the first axis or that of the batch.
        random: the state of torch's generator before that forward.
    """
    n, batch_dim = tape.calls[-1].samples, tape.batch_dim
    half = n // 2
    for replaced, same in ((0, half), (n - half, 0)) if half else ():  # where the replaced and the other samples begin

        def exchanged(value: Tensor, replaced: int = replaced, same: int = same) -> Tensor:
            result = value.clone()
            result.narrow(batch_dim, replaced, half).copy_(value.narrow(batch_dim, same, half))
            return result

        rows = list(range(same, same + n - half))
        try:
            with _unseen(tape, random):
                found = run(of_samples(inputs, exchanged, n, batch_dim))
        except Exception:
            return False  # the model accepts samples in some orders only, such as sequences sorted by length
        changed = _changed(output, found, rows, n, batch_dim, rows)
        if changed is not False:
            return bool(changed)
    return False


def of_samples(value: Any, convert: Callable[[Tensor], Tensor], n: int, batch_dim: int) -> Any:
    """Inputs of ``n`` samples, with tensors of all samples converted."""
    if not isinstance(value, Tensor):
        return nested(value, lambda item: of_samples(item, convert, n, batch_dim))
    fits = value.dim() > batch_dim and value.shape[batch_dim] == n and value.layout == torch.strided
    return convert(value) if fits else value


def _changed(
    output: Tensor, other: Tensor, chosen: Sequence[int], n: int, batch_dim: int, places: Sequence[int] | None = None
) -> bool | None:
    """Whether the outputs of the ``chosen`` of n samples differ in another batch, which has them at ``places``.

    None where the shapes do not fit. By default the other batch holds the chosen samples alone.
    """
    size = len(chosen) if places is None else n
    axis = next((axis for axis in (batch_dim, 0) if output.dim() > axis and output.shape[axis] == n), None)
    if axis is None or other.dim() != output.dim() or other.shape[axis] != size:
        return None
    before = output.detach().index_select(axis, torch.tensor(chosen, dtype=torch.long, device=output.device))
    after = other.detach()
    after = (
        after
        if places is None
        else after.index_select(axis, torch.tensor(places, dtype=torch.long, device=other.device))
    )
    if before.shape != after.shape:
        return None
    allowed = _ROUNDING * torch.finfo(output.dtype).eps * float(output.detach().abs().max())
    return float((after - before).abs().max()) > allowed


@contextmanager
def _unseen(tape: Tape, random: Tensor | None) -> Iterator[None]:
    """A run that ``tape`` does not see, from a given state of the random generator, without warnings."""
    with tape.ignoring_calls(), torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        if random is not None:
            torch.set_rng_state(random)
        yield


@contextmanager
def _run_alone(
    model: nn.Module, tape: Tape, inputs: Any, n: int, chosen: Sequence[int], random: Tensor | None
) -> Iterator[tuple[Tape | None, Any]]:
    """A capture of the chosen samples alone, and what the model returned; None where it does not accept them."""
    names = [record.name for record in tape]
    dim = tape.batch_dim

    def select(value: Tensor) -> Tensor:
        return value.index_select(dim, torch.tensor(chosen, dtype=torch.long, device=value.device))

    with _unseen(tape, random):
        try:
            few = of_samples(inputs, select, n, dim)
            gradients = torch.is_grad_enabled()
            with capture(model, names, gradients=gradients, copy_weights=False, batch_dim=dim) as alone:
                returned = run_captured(model, alone, few)
        except Exception:
            yield None, None
        else:
            yield alone, returned


def _layers_with_other_rows(tape: Tape, n: int) -> dict[str, Tensor]:
    """Inputs of linear layers, applied once, with another number of rows than samples, or with as many positions as samples.

    Attention in windows has several rows for each sample, and some models put positions first.
    """

    def is_asked(a: Application) -> bool:
        other = a.layer.kind.samples(a.layer.module, a.x, tape.batch_dim) != n
        doubtful = a.x.dim() > 2 and a.x.shape[0] == a.x.shape[1]
        return isinstance(a.layer.kind, LinearKind) and a.x.dim() > 1 and n > 0 and (other or doubtful)

    applied = {record.name: record.applications for record in tape if len(record.applications) == 1}
    return {name: a.x for name, (a,) in applied.items() if is_asked(a)}


def _axes(asked: dict[str, Tensor], alone: Tape, n: int, chosen: Sequence[int]) -> dict[str, int]:
    """The axis along which each layer sees the samples, of those where it can be told."""
    seen = {record.name: record.applications[0].x for record in alone}
    axes = {name: _axis(x, seen[name], n, chosen) for name, x in asked.items() if name in seen}
    return {name: axis for name, axis in axes.items() if axis is not None}


def _axis(whole: Tensor, few: Tensor, n: int, chosen: Sequence[int]) -> int | None:
    """The axis along which ``few`` holds the rows of the chosen samples of ``whole``, each with equally many."""
    for axis in range(min(whole.dim(), few.dim()) - 1):
        each = few.shape[axis] // len(chosen)
        if each * len(chosen) != few.shape[axis] or whole.shape[axis] != n * each:
            continue
        rows = torch.cat([whole.narrow(axis, each * i, each) for i in chosen], axis)
        if rows.shape == few.shape and torch.allclose(rows, few, rtol=1e-3, atol=1e-4 * float(few.abs().max())):
            return axis
    return None


def layout(module: nn.Module, model: nn.Module) -> str:
    """``"first"`` or ``"last"`` where the module's type tells; else ``"usual"``, or ``"unknown"`` near 1-d convolutions.

    >>> layout(nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU()), nn.Identity()), layout(nn.ReLU(), nn.Linear(2, 2))
    ('first', 'usual')
    """
    if isinstance(module, nn.Sequential):
        for child in reversed(module):
            if type(child).__module__ not in _ELEMENTWISE or isinstance(child, _LAST):
                return layout(child, model)
    if isinstance(module, _FIRST) or type(module).__module__ in _FIRST_MODULES:
        return "first"
    if isinstance(module, _LAST):
        return "last"
    around = module if any(True for _ in module.children()) else model
    return "unknown" if any(isinstance(m, _ONE_DIMENSIONAL) for m in around.modules()) else "usual"


def output_rows(value: Tensor, layout: str, name: str, batch_dim: int = 0) -> Tensor:
    """A module's output as ``[batch, sites, features]``; usual are ``[batch, sites, features]`` and ``[batch, c, h, w]``.

    ``batch_dim`` is the axis of the batch where features are last; images have it first.
    """
    if value.dim() == 1:
        return value.reshape(-1, 1, 1)
    if value.dim() == 2:
        return value.unsqueeze(1)
    if layout == "unknown" and value.dim() == 3:
        raise InputError(
            f"the output of module {name!r} has shape {tuple(value.shape)}, in a network with 1-d convolutions: say whether "
            "its features are the axis after the batch (channels='first') or the last one (channels='last')"
        )
    if layout == "first" or (layout != "last" and value.dim() > 3):
        return value.flatten(2).mT
    return value.movedim(batch_dim, 0).flatten(1, -2)


@dataclass(frozen=True)
class SampleAxes:
    """Where the samples are in tensors of three and more axes.

    Args:
        batch_dim: the axis that the caller gave.
        known: axes inside torch's own sequence modules, from their ``batch_first``.
    """

    batch_dim: int
    known: dict[nn.Module, int]

    def of(self, module: nn.Module) -> int:
        """The axis of the samples in the module's inputs and outputs."""
        return self.known.get(module, self.batch_dim)

    def is_doubtful(self, module: nn.Module, value: Tensor) -> bool:
        """Whether either of the first two axes may hold the samples: equally long, in a model with sequence-first modules."""
        if module in self.known or self.batch_dim != 0 or 1 not in self.known.values():
            return False
        return value.dim() > 2 and value.shape[0] == value.shape[1]


def sample_axes(model: nn.Module, batch_dim: int) -> SampleAxes:
    """The axes of a model, from ``batch_dim`` and from torch's own sequence modules inside it.

    >>> encoder = nn.TransformerEncoderLayer(4, 2, 8)
    >>> sample_axes(nn.Sequential(nn.Linear(4, 4), encoder), 0).of(encoder.linear1)
    1
    """
    known: dict[nn.Module, int] = {}
    for module in model.modules():  # from the outside in
        first = _batch_first(module)
        if first is not None:
            known |= dict.fromkeys(module.modules(), 0 if first else 1)
    return SampleAxes(batch_dim, known)


def _batch_first(module: nn.Module) -> bool | None:
    """Whether a sequence module of torch has its samples first; ``None`` for other modules."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        module = module.layers[0]
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        module = module.self_attn
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.Transformer):
        return bool(module.batch_first)
    return None
