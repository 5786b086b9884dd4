"""Which rows of a layer's inputs represent a sample: pooling over sites, one token, a mask, or every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.positions import flattened
from gramscope.layers.record import Application, LayerRecord
from gramscope.statistics.sums import LeftOut, Plan

if TYPE_CHECKING:
    from gramscope.statistics.run import BatchResult
    from gramscope.statistics.structure import Structure

#: how sites become rows, see :func:`rows_and_targets`
Tokens: TypeAlias = str | int | Callable[[Any, Any], Tensor]

#: labels that are left out unless the loss or the caller names others
IGNORED = -100


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
        h = flattened(h, n, lengths)
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
    if target is not None and target.dim() > 2 and not target.is_floating_point():
        if tokens == "auto":
            raise Unpaired(
                f"the target has one label per position, {tuple(target.shape)}; tokens='each' pairs them with the layers "
                "that have as many sites, targets= gives one label per sample"
            )
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
    rows = h[mask]
    if target is None:
        return rows, None
    if per_token:
        return rows, target[mask]
    return rows, target.unsqueeze(1).expand(-1, mask.shape[1], *target.shape[1:])[mask]


def layer_rows(
    record: LayerRecord, batch: BatchResult, structure: Structure, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Feature rows at a layer's inputs in one batch, their targets, and the residuals ``[n, c]`` where rows are samples."""
    name, lengths = record.layer.name, batch.positions.lengths
    axis = structure.axis(name, record.applications[0].x, plan.batch_dim)
    known = structure.axes.get(name) is not None
    target = batch.target
    labelled = isinstance(target, Tensor) and target.dim() == 2 and not target.is_floating_point()
    averaged = plan.tokens in ("auto", "mean") and not labelled and not lengths
    single = batch.residual is not None and batch.residual.dim() == 2 and len(record.applications) == 1
    residual = batch.residual if single and _sites(record.applications[0], axis) == 1 else None
    h = _cut_sites(record.layer.module, inputs_of(record, axis, batch.n, averaged, lengths, known), lengths)
    valid = batch.positions.of(h.shape[-2], len(record.applications))
    return *paired_rows(name, h, batch, plan, plan.tokens, valid), residual


def paired_rows(
    name: str, h: Tensor, batch: BatchResult, plan: Plan, tokens: Tokens, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rows ``h [..., n, sites, d]`` of a batch with its targets (:func:`rows_and_targets`)."""
    if h.shape[-3] != batch.n:
        raise Unpaired(f"it has {h.shape[-3]} rows for {batch.n} samples, so rows and targets cannot be paired")
    target = batch.target if isinstance(batch.target, Tensor) else None
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
