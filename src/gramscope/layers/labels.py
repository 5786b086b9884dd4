"""Labels as a language model reads them: shifted by one, ignored at padding, or fed to a decoder.

A batch ``{input_ids, attention_mask, labels}`` holds labels in the convention of its model. A causal language model
compares its output at position t with the label at t + 1, a masked language model and a tagger with the label at t.
:class:`LabelReader` finds out which by asking the model for its own loss: one that does not depend on the first label
shifts. Targets that are given apart from the inputs, as a pair ``(x, y)`` or by ``unpack=``, are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import Note
from gramscope.layers.batches import LABEL_KEYS, Positions, head, label_key, positions_in
from gramscope.layers.model_call import call_model, forward_arguments, model_dtype, own_loss, unused_inputs

#: the label that models of transformers leave out of their own loss
IGNORED = -100

SHIFTED = Note(
    "remark",
    "next-token labels: the output at position t is compared with the label at t + 1, as the model's own loss does "
    "(loss, accuracy, features and targets alike)",
)
PADDED_LABELS = Note("remark", "labels at padding, and those predicted from padding, are left out")
LEFT_PADDED = Note(
    "remark",
    "the batch is padded on the left and has no position_ids: a model with absolute positions counts them from the first "
    "pad; add position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)",
)


class ReadBatch(NamedTuple):
    """A batch as the model reads it.

    Args:
        inputs: of the model.
        target: what its outputs and features are compared with.
        positions: tokens and padding.
        notes: what was done to the labels, by key.
    """

    inputs: Any
    target: Any
    positions: Positions
    notes: dict[str, Note]


class LabelReader:
    """Reads the batches of one measurement; the model is asked about its labels once.

    Args:
        model: the model that will be called.
        ignore_index: the label that losses and features leave out.
        own_loss: whether the model's own loss will be used; if not, a model that runs without the labels, and feeds
            them to no decoder, is called without them, which saves the memory of that loss.
    """

    def __init__(self, model: nn.Module, ignore_index: int = IGNORED, own_loss: bool = True) -> None:
        self._model, self._ignore_index, self._own_loss = model, ignore_index, own_loss
        self._usable: bool | None = None  # whether the model can be called with the labels
        self._needed = True  # whether it is called with them
        self._shifts = False

    def read(self, inputs: Any, target: Any) -> ReadBatch:
        """The batch with its labels as targets of the outputs at the same position."""
        if not isinstance(inputs, Mapping):
            return ReadBatch(inputs, target, Positions(), {})
        read = self._read(inputs, target)
        key = label_key(read.inputs)
        if key is not None and not self._needed:
            read = read._replace(inputs=_without(read.inputs, key))
        unused = unused_inputs(self._model, inputs) - set(LABEL_KEYS)
        if unused:
            text = f"the model's forward has no argument for {', '.join(sorted(unused))}: not passed to it"
            read.notes["(batch)"] = Note("remark", text)
        return read

    def _read(self, inputs: Any, target: Any) -> ReadBatch:
        key = label_key(inputs)
        arguments = forward_arguments(self._model) if key is not None else frozenset()
        if key is None or key not in arguments or not isinstance(target, Tensor):
            return ReadBatch(inputs, target, positions_in(inputs), _padding_notes(inputs))
        if self._usable is None:
            self._usable = self._ask(inputs, key)
        if not self._usable:
            rest = _without(inputs, key)
            return ReadBatch(rest, target, positions_in(rest), _padding_notes(rest))
        given = inputs[key]
        own = given is target or (isinstance(given, Tensor) and torch.equal(given, target))
        if not own or target.dim() != 2 or target.is_floating_point():
            return ReadBatch(inputs, target, positions_in(inputs), _padding_notes(inputs))
        if "decoder_input_ids" in arguments:
            return self._read_decoder(inputs, key, target)
        return self._read_tokens(inputs, key, target)

    def _read_tokens(self, inputs: Mapping[str, Any], key: str, target: Tensor) -> ReadBatch:
        positions, notes = positions_in(inputs), _padding_notes(inputs)
        labels, mask = target, positions.of(target.shape[1])
        if mask is not None:
            before = F.pad(mask[:, :-1], (1, 0), value=True)
            counted = mask & before if self._shifts else mask
            labels = target.masked_fill(~counted, IGNORED)
            if not torch.equal(labels, target):
                notes["(labels)"] = PADDED_LABELS
        target = labels
        if self._shifts:
            target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            notes["(targets)"] = SHIFTED
        if self._ignore_index != IGNORED:
            target = target.masked_fill(target == IGNORED, self._ignore_index)
        return ReadBatch({**inputs, key: labels}, target, positions, notes)

    def _read_decoder(self, inputs: Mapping[str, Any], key: str, target: Tensor) -> ReadBatch:
        """Labels feed the decoder. Where both sequences are equally long, the decoder's gets one ignored position more.

        Layers of the encoder and of the decoder then differ in their number of sites.
        """
        source = inputs.get("input_ids")
        inputs = dict(inputs)
        if isinstance(source, Tensor) and source.dim() == 2 and source.shape[1] == target.shape[1]:
            fill = {key: IGNORED, "decoder_input_ids": 0, "decoder_attention_mask": 0}
            inputs |= {name: F.pad(inputs[name], (0, 1), value=v) for name, v in fill.items() if name in inputs}
            target = F.pad(target, (0, 1), value=IGNORED)
        positions = positions_in(inputs, decoder=target != IGNORED)
        if self._ignore_index != IGNORED:
            target = target.masked_fill(target == IGNORED, self._ignore_index)
        return ReadBatch(inputs, target, positions, _padding_notes(inputs))

    @torch.no_grad()
    def _ask(self, inputs: Mapping[str, Any], key: str) -> bool:
        """Whether the model runs with the labels; finds out whether it shifts them, from its loss of one sample."""
        labels = inputs[key]
        sample = head(inputs, 1, labels.shape[0])
        returned = self._returned(sample)
        if (
            returned is None
        ):  # if it fails without them too, the labels are not to blame: the measurement will show the error
            return self._returned(_without(sample, key)) is None
        feeds_decoder = "decoder_input_ids" in forward_arguments(self._model)
        self._needed = self._own_loss or feeds_decoder or self._returned(_without(sample, key)) is None
        scores = returned.get("logits") if isinstance(returned, Mapping) else None
        if labels.dim() == 2 and labels.shape[1] > 1 and not labels.is_floating_point():
            none = torch.full_like(sample[key], IGNORED)
            first = none.clone()
            first[:, 0] = 0
            a, b = (own_loss(call_model(self._model, {**sample, key: given})) for given in (none, first))
            paired = not isinstance(scores, Tensor) or scores.shape[:2] == labels[:1].shape
            self._shifts = (
                paired and a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
            )
        return True

    def _returned(self, inputs: dict[str, Any]) -> Any:
        """What the model returns, or ``None`` if it fails."""
        try:
            return call_model(self._model, inputs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _without(inputs: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != key}


def _padding_notes(inputs: Any) -> dict[str, Note]:
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or "position_ids" in inputs or bool(mask[:, 0].all()):
        return {}
    return {"(padding)": LEFT_PADDED}


@torch.no_grad()
def reduction_of_own_loss(model: nn.Module, inputs: Any, terms: Sequence[int]) -> str | None:
    """How a model's own loss joins samples: ``"mean"``, ``"sum"``, or ``"coupled"`` where it does neither.

    Two samples are run alone and together; a random loss is taken for a mean. ``None`` for a single sample.

    Args:
        model: in eval mode.
        inputs: the keyword arguments of a batch.
        terms: for each sample, what a mean over it divides by (:mod:`gramscope.layers.losses`).
    """
    n = len(terms)
    if n < 2 or not isinstance(inputs, Mapping):
        return None

    def loss(start: int, stop: int) -> float:
        lengths = {k: len(v) for k, v in inputs.items() if isinstance(v, list) or (isinstance(v, Tensor) and v.dim())}
        some = {k: v[start:stop] if lengths.get(k) == n else v for k, v in inputs.items()}
        found = own_loss(call_model(model, some))
        return math.nan if found is None else float(found)

    tolerance = 3e-2 if model_dtype(model) in (torch.bfloat16, torch.float16) else 1e-3
    try:
        with torch.random.fork_rng(devices=[]):
            first, second, both = loss(0, 1), loss(1, 2), loss(0, 2)
            mean = (first * terms[0] + second * terms[1]) / max(sum(terms[:2]), 1)
            close = partial(math.isclose, both, rel_tol=tolerance, abs_tol=1e-6 * max(abs(first), abs(second)))
            if close(mean) or not math.isfinite(mean + both) or both != loss(0, 2):
                return "mean"
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return "mean"  # it accepts whole batches only
    return "sum" if close(first + second) else "coupled"
