"""Where the samples of a batch are: the batch axis of each layer, inputs and outputs that several samples share.

One run of the model on two samples of a batch shows all three. It also says which rows of a layer's inputs represent a sample:
pooling over sites, one token, a mask, or every token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.batches import flattened, nested
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import layers_with_shared_rows
from gramscope.layers.kinds import LinearLayer
from gramscope.layers.labels import IGNORED
from gramscope.layers.losses import Losses
from gramscope.layers.model_call import OutputSelector, call_model, run_captured, select_output
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.select import Selection
from gramscope.layers.tape import Tape
from gramscope.statistics.sums import OUTPUT, BatchResult, LeftOut, Plan

#: why coupled samples have no Jacobians of their own
COUPLED = (
    "samples of a batch influence each other: the outputs of some change with the inputs of others, so Jacobians of single "
    "samples do not exist. If a batch is one object (a graph whose nodes are rows), make it one sample with a wrapper that "
    "adds a batch axis; if the model uses statistics of the batch, give batches of one sample"
)
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
        axes: the axis along which samples stand one after the other, for those linear layers (and outputs of modules) whose
            shape does not tell; ``None`` where two samples alone do not tell either.
    """

    coupled: bool = False
    serves_many: frozenset[str] = frozenset()
    axes: dict[str, int | None] = field(default_factory=dict)

    def axis(self, name: str, value: Tensor, default: int) -> int:
        """The axis of the samples in a layer's input, or in the output of a module; an error where it is unclear."""
        found = self.axes.get(name, default)
        if found is None and value.dim() > 2 and value.shape[0] == value.shape[1]:
            raise LeftOut(
                f"in shape {tuple(value.shape)} either of the first axes could be the samples, so rows and targets cannot be "
                "paired; take another batch size"
            )
        return default if found is None else found


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
    asked = _of_unclear_axis(tape, n)
    if n < 2:
        return Structure(axes={name: int(x.dim() > 2 and x.shape[1] == 1) for name, x in asked.items()})
    across = bool(tape.calls[-1].across_samples)
    chosen = [n - 1, 0] if n > 2 else [0]
    with _run_alone(model, tape, inputs, n, chosen, random) as (alone, returned):
        axes = _axes(asked, alone, n, chosen)
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


@torch.no_grad()
def depends_on_batch(
    evaluate: Callable[[Any, Any, int], Losses], losses: Tensor, output: Any, target: Any, n: int
) -> bool:
    """Whether the losses of samples change where the other half of the batch is left out.

    Args:
        evaluate: the losses of an output, a target and a number of samples.
        losses: those of the whole batch.
        output, target: of the n samples.
    """

    def of_part(start: int, stop: int) -> Tensor:
        some, of_them = (of_samples(value, lambda rows: rows[start:stop], n, 0) for value in (output, target))
        return evaluate(some, of_them, stop - start).values.reshape(-1)

    try:
        with torch.random.fork_rng(devices=[]):
            again = evaluate(output, target, n).values
            parts = torch.cat([of_part(0, n // 2), of_part(n // 2, n)])
    except Exception:
        return False  # it accepts whole batches only
    if n < 2 or not torch.equal(again, losses):  # it draws random numbers
        return False
    if parts.shape != again.reshape(-1).shape:
        parts, again = parts.sum(), again.sum()
    rtol = min(1e-3, _ROUNDING * torch.finfo(again.dtype).eps)
    return not torch.allclose(parts, again.reshape(parts.shape), rtol=rtol, atol=rtol * float(again.abs().mean()))


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
    seen = Selection(tuple(record.layer for record in tape), {})
    dim = tape.batch_dim

    def select(value: Tensor) -> Tensor:
        return value.index_select(dim, torch.tensor(chosen, dtype=torch.long, device=value.device))

    with _unseen(tape, random):
        try:
            few = of_samples(inputs, select, n, dim)
            gradients = torch.is_grad_enabled()
            options: dict[str, Any] = {"gradients": gradients, "copy_weights": False, "batch_dim": dim}
            with capture(model, seen, outputs=list(tape.outputs), **options) as alone:
                returned = run_captured(model, alone, few)
        except Exception:
            yield None, None
        else:
            yield alone, returned


def _of_unclear_axis(tape: Tape, n: int) -> dict[str, Tensor]:
    """Inputs of linear layers, applied once, and outputs of modules that have another number of rows than samples.

    Attention in windows has several rows for each sample, and some models put positions first; with as many positions as
    samples the shape does not show it.
    """
    dim = tape.batch_dim
    once = [record.applications[0] for record in tape if len(record.applications) == 1]
    values = {a.layer.name: a.x for a in once if isinstance(a.layer, LinearLayer) and a.x.dim() > 1}
    values |= {f"{name} {OUTPUT}".strip(): value for name, value in tape.outputs.items() if value.dim() == 3}

    def is_unclear(x: Tensor) -> bool:
        return x.shape[dim if x.dim() > 2 else 0] != n or (x.dim() > 2 and x.shape[0] == x.shape[1])

    return {name: x for name, x in values.items() if n > 0 and is_unclear(x)}


def _axes(asked: dict[str, Tensor], alone: Tape | None, n: int, chosen: Sequence[int]) -> dict[str, int | None]:
    """The axis along which each of the values holds the samples."""
    seen: dict[str, Tensor] = {}
    if alone is not None:
        seen = {record.layer.name: record.applications[0].x for record in alone}
        seen |= {f"{name} {OUTPUT}".strip(): value for name, value in alone.outputs.items()}
    return {name: _axis(x, seen[name], n, chosen) if name in seen else None for name, x in asked.items()}


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


# --- rows of features -------------------------------------------------------------------------------------------------

#: how sites become rows, see :func:`rows_and_targets`
Tokens: TypeAlias = str | int | Callable[[Any, Any], Tensor]


class Unpaired(LeftOut):
    """Features and targets of a layer do not go together; the message says why."""


class NoSuchSites(Unpaired):
    """A layer lacks the sites that ``tokens=`` asks for."""


def inputs_of(
    record: LayerRecord, axis: int, n: int, averaged: bool, lengths: tuple[int, ...] = (), grouped: bool = False
) -> Tensor:
    """A layer's inputs in one forward of ``n`` samples, ``[…, n, sites, d]``; or averaged over the sites.

    Args:
        record: what was captured of the layer; several applications add sites.
        axis: of the samples in the inputs of a Linear layer.
        n: samples of the batch; where an application has another number of rows, they cannot be paired.
        averaged: give the mean over sites, without forming the sites of a convolution.
        lengths: of the batch's sequences; n × length rows of a layer that sees all tokens in one axis are taken apart.
        grouped: several rows of one sample are known to stand together. Their order is not known, only their mean can be had.
    """
    single = averaged and len(record.applications) == 1
    parts = []
    for a in record.applications:
        a.check_unchanged()
        h = a.layer.features(a.x, axis, single)
        h = flattened(h, n, lengths) if lengths else h
        if grouped and single and h.shape[-3] != n:
            h = h.reshape(*h.shape[:-3], n, -1, h.shape[-1]).mean(-2, keepdim=True)
        if h.shape[-3] != n:
            raise Unpaired(f"its inputs have {h.shape[-3]} rows for {n} samples, so rows and targets cannot be paired")
        parts.append(h)
    if single:
        return parts[0]
    h = torch.cat(parts, -2) if len(parts) > 1 else parts[0]
    return h.mean(-2, keepdim=True) if averaged else h


def rows_and_targets(
    h: Tensor,
    target: Tensor | None,
    tokens: Tokens,
    inputs: Any,
    name: str,
    ignore_index: int = IGNORED,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Feature rows ``[rows, d]`` and their targets from ``h [batch, sites, d]``.

    Args:
        h: features in normal form; a leading ``groups`` axis is joined into d.
        target: ``[batch]``, ``[batch, c]`` or token labels ``[batch, sites]`` (pixel labels ``[batch, height, width]``);
            ``None`` for features alone.
        tokens: ``"auto"`` pairs token labels ``[batch, sites]`` with their sites and averages over sites otherwise;
            ``"mean"`` averages; ``"flatten"`` joins the sites into one row; ``"each"`` makes every site a row (the sample's
            target is repeated); a number takes that site (0 is [CLS]); a function ``(inputs, target) -> mask [batch, sites]``
            takes the marked sites (first sub-words, non-padding). Pixel labels are paired when asked for with
            ``"each"``, a number or a function: one row per pixel takes much memory.
        inputs: the batch's inputs, for the mask function.
        name: the layer, for messages.
        ignore_index: token labels equal to this are left out.
        valid: boolean ``[batch, sites]``, false at padding, which is left out: it enters no mean and makes no row, and a
            number of ``tokens`` does not count it.
    """
    if h.dim() == 4:
        h = h.permute(1, 2, 0, 3).flatten(2)  # [batch, sites, groups·d]
    batch, sites, _ = h.shape
    if target is not None and target.shape[0] != batch:
        raise InputError(
            f"layer {name!r} has inputs for {batch} rows but the target has {target.shape[0]}; if the batch is not the "
            "first axis pass batch_dim=, if samples are folded together choose other layers"
        )
    if target is not None and target.dim() > 2 and not target.is_floating_point() and tokens != "auto":
        target = target.flatten(1)
    per_token = target is not None and target.dim() == 2 and not target.is_floating_point() and target.shape[1] == sites
    if tokens == "auto":
        tokens = "each" if per_token else "mean"
    if callable(tokens):
        mask = tokens(inputs, target)
        if not isinstance(mask, Tensor):
            raise InputError(
                f"tokens= returned a {type(mask).__name__}; give a function (inputs, target) -> boolean tensor [batch, sites]"
            )
        if tuple(mask.shape) != (batch, sites):
            raise NoSuchSites(
                f"the token mask has shape {tuple(mask.shape)}; layer {name!r} has {batch} × {sites} sites"
            )
        return _marked(h, target, mask.bool().to(h.device), per_token, ignore_index)
    real = torch.ones(batch, sites, dtype=torch.bool, device=h.device) if valid is None else valid.to(h.device)
    if tokens == "each":
        return _marked(h, target, real, per_token, ignore_index)
    if isinstance(tokens, int):
        if not -sites <= tokens < sites:
            raise NoSuchSites(f"tokens={tokens}: layer {name!r} has {sites} sites")
        rank = real.cumsum(1) - (1 if tokens >= 0 else real.sum(1, keepdim=True) + 1)
        chosen = real & (rank == tokens)  # nothing in sequences with fewer sites
        rows = _marked(h, target, chosen, per_token, ignore_index) if valid is not None else None
        return rows or (h[:, tokens], target[:, tokens] if per_token and target is not None else target)
    if tokens == "mean":
        if valid is not None:
            return (h * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).clamp(min=1), target
        return (h[:, 0] if sites == 1 else h.mean(1)), target
    if tokens == "flatten":
        return h.flatten(1), target
    raise InputError(f"tokens={tokens!r}: give 'auto', 'mean', 'flatten', 'each', a position or a mask function")


def _marked(
    h: Tensor, target: Tensor | None, mask: Tensor, per_token: bool, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    if per_token and target is not None:
        mask = mask & (target != ignore_index)
    index = mask.flatten().nonzero().squeeze(1)
    rows = h.flatten(0, 1)[index]
    if target is None:
        return rows, None
    each = target if per_token else target.unsqueeze(1).expand(-1, mask.shape[1], *target.shape[1:])
    return rows, each.flatten(0, 1)[index]


def layer_rows(
    record: LayerRecord, batch: BatchResult, structure: Structure, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Feature rows at a layer's inputs in one batch, their targets, and the residuals ``[n, c]`` where rows are samples."""
    name, lengths = record.layer.name, batch.positions.lengths
    axis = structure.axis(name, record.applications[0].x, plan.batch_dim)
    known = structure.axes.get(name) is not None
    labels = batch.target
    labelled = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    averaged = plan.tokens in ("auto", "mean") and not labelled and not lengths
    single = batch.residual is not None and batch.residual.dim() == 2 and len(record.applications) == 1
    residual = batch.residual if single and _sites(record.applications[0], axis) == 1 else None
    h = _cut_sites(record.layer.module, inputs_of(record, axis, batch.n, averaged, lengths, known), lengths)
    valid = batch.positions.of(h.shape[-2], len(record.applications)) if batch.positions.masks else None
    rows, target = paired_rows(name, h, batch, plan, plan.tokens, valid)
    return rows, target, None if residual is None else residual.to(rows.device)


def paired_rows(
    name: str, h: Tensor, batch: BatchResult, plan: Plan, tokens: Tokens, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rows ``h [..., n, sites, d]`` of a batch with its targets (:func:`rows_and_targets`)."""
    if h.shape[-3] != batch.n:
        raise Unpaired(f"it has {h.shape[-3]} rows for {batch.n} samples, so rows and targets cannot be paired")
    target = batch.target.to(h.device) if isinstance(batch.target, Tensor) else None
    return rows_and_targets(h, target, tokens, batch.inputs, name, plan.ignore_index, valid)


def _sites(a: Application, axis: int) -> int:
    """Sites of a sample in an application that the loss reaches, 0 in others."""
    return 0 if a.dz is None else a.layer.outputs(a.dz, axis).shape[-2]


def _cut_sites(module: nn.Module, h: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The sites of a causal convolution that belong to tokens: padded on both sides, its last outputs are cut off."""
    extra = module.kernel_size[0] - 1 if isinstance(module, nn.Conv1d) else 0
    length = h.shape[-2] - extra
    causal = extra and getattr(module, "padding", None) == (extra,) and length in lengths and h.shape[-2] not in lengths
    return h[..., :length, :] if causal else h
