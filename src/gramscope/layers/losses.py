"""Losses of single samples, free of any reduction over the batch.

What every formula calls ``L_i`` is the loss of sample i before the batch reduction. :func:`losses_and_terms` obtains them:

- a criterion with a ``reduction`` attribute (``nn.CrossEntropyLoss()``) is copied with ``reduction="none"``;
- a function with a ``reduction`` argument (``F.cross_entropy``) is called with ``reduction="none"``;
- any other function must return one loss per sample, or state its ``reduction``.

A sample may have a loss at each of many positions: tokens of a sequence, pixels of an image. One rule holds for all
criteria: the loss, its gradient and a step of size γ are those of **the mean over every position that counts in all of
the data**, as a ``"mean"`` criterion computes it on one batch that holds everything. Positions with an ignored label
and padding do not count. :func:`losses_and_terms` returns the number of terms that the mean divides by beside the sums
``L_i``. Position-wise losses (cross-entropy) are summed over positions, and their terms are the positions; element-wise
losses (mean squared error) are averaged over a sample's elements, and their terms are the samples: both give that mean.
The losses of a ``"sum"`` criterion, and those of a function that returns no loss for each label, are summed within a
sample and averaged over samples. Class weights multiply the loss of their samples, ``L_i = w_{y_i} ℓ_i``, and the mean of
a criterion with class weights divides by ``Σ w_{y_i}``, as torch does: its terms are that sum, a float.

Scores may have their classes last, ``[batch, tokens, classes]``, as language models return them.

A stated ``reduction="mean"`` is undone by multiplying by the number of samples n. A function that divides by another
number (class weights, ignored labels, a mean over tokens) needs that number in place of ``"mean"``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError
from gramscope.layers.batches import Positions

#: ``(output, target) -> loss``, or ``(returned, batch) -> loss`` where the second argument is called ``batch``
Loss: TypeAlias = Callable[[Any, Any], Tensor]

#: losses whose targets are class labels
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS_OF_CLASSES = (F.cross_entropy, F.nll_loss)
#: losses whose targets are classes or their probabilities
_CLASSIFICATION = (
    *_OF_CLASSES, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss, nn.SoftMarginLoss,
    nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
_FUNCTIONS_OF_CLASSIFICATION = (
    *_FUNCTIONS_OF_CLASSES, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.hinge_embedding_loss,
    F.soft_margin_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip


class Losses(NamedTuple):
    """``values``: ``L_i [n]`` or a scalar with the gradient of ``Σ_i L_i``; ``terms``: what their mean divides by.

    Terms that are counted (samples, positions) are an integer, a sum of class weights is a float.
    """

    values: Tensor
    terms: float


def losses_and_terms(
    loss: Loss,
    output: Any,
    target: Any,
    n: int,
    reduction: str | float | None = None,
    ignore_index: int = -100,
    positions: Positions | None = None,
) -> Losses:
    """The losses of the samples and the number of terms that the mean loss divides by.

    Args:
        loss: a torch criterion, a ``torch.nn.functional`` loss, or any function of ``(output, target)``.
        output: the model's output.
        target: the batch's target.
        n: number of samples in the batch.
        reduction: how ``loss`` reduces over the batch, where that cannot be seen: ``"mean"``, ``"sum"``, ``"none"``, or
            the factor that turns what it returns into the sum over samples. A number multiplies whatever comes: several
            losses (one per sample) are summed and then multiplied too. ``"mean"`` stands for a division by n.
        ignore_index: the label that losses leave out; where it occurs, ``"mean"`` does not divide by n.
        positions: sequences of the batch; element-wise losses leave their padding out.
    """
    if reduction == "mean" and isinstance(target, Tensor) and not target.is_floating_point():
        ignored = int((target == ignore_index).sum())
        if ignored:
            raise InputError(
                f"reduction='mean' stands for a loss divided by the {n} samples, but {ignored} of {target.numel()} labels are "
                f"{ignore_index} and are left out; give the criterion itself, such as nn.CrossEntropyLoss(), without "
                "reduction=, or a loss of every sample"
            )
    try:
        return _losses(loss, output, target, n, reduction, ignore_index, positions or Positions())
    except (GramscopeError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        sides = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in (output, target)]
        own = "" if takes_batch(loss) or is_torch_criterion(loss) else f"; {WHOLE_BATCH}"
        raise InputError(
            f"{_name(loss)} failed on an output of {sides[0]} and a target of {sides[1]}: {error}{own}"
        ) from error


def _losses(
    loss: Loss, output: Any, target: Any, n: int, reduction: str | float | None, ignore_index: int, positions: Positions
) -> Losses:
    counted = _counted(target, ignore_index)
    if reduction is not None:
        return _stated(_tensor(loss(output, target)), n, reduction, counted)
    of_classes = isinstance(loss, _OF_CLASSES) or _without_options(loss) in _FUNCTIONS_OF_CLASSES
    if of_classes and class_axis(output, target, positions.lengths) == -1:
        output = output.movedim(-1, 1)
    valid = positions.of(output.shape[1]) if isinstance(output, Tensor) and output.dim() > 1 else None
    own = reduction_of(loss)
    if of_classes and own == "mean":
        values = _unreduced(loss, output, target)
        return Losses(
            _within_samples(values, output, n, "none", counted).values, _terms_of_classes(loss, target, values)
        )
    if own is None:
        value = _tensor(loss(output, target))
        if value.numel() == 1 and n > 1:
            raise InputError(
                f"the loss {_name(loss)} returns one number for {n} samples; state how "
                "it reduces over the batch with reduction='mean', 'sum' or a factor, or return one loss per sample"
            )
        return _within_samples(value, output, n, "none", counted)
    return _within_samples(_unreduced(loss, output, target), output, n, own, counted, valid)


def _unreduced(loss: Loss, output: Any, target: Any) -> Tensor:
    if not isinstance(loss, nn.Module):
        return loss(output, target, reduction="none")  # type: ignore[call-arg]
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"  # type: ignore[assignment]
    return _tensor(unreduced(output, target))


def _terms_of_classes(loss: Loss, target: Tensor, values: Tensor) -> float:
    """What the mean of cross-entropy divides by: labels that count, their class weights, or all rows of probabilities."""
    if target.is_floating_point():
        return values.numel()
    labels = target[target != ignored_label(loss)]
    weight = option_of(loss, "weight")
    return labels.numel() if weight is None else float(weight.to(labels.device, torch.float64)[labels].sum())


def option_of(loss: Any, name: str, default: Any = None) -> Any:
    """An option of a criterion, or one that ``functools.partial`` gives to a function."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name, option_of(loss.func, name, default))
    return getattr(loss, name, default)


def classifies(loss: Any) -> bool:
    """Whether the targets of a loss are classes or their probabilities, also where they are floating-point numbers.

    >>> classifies(nn.BCEWithLogitsLoss()), classifies(F.cross_entropy), classifies(nn.MSELoss())
    (True, True, False)
    """
    return isinstance(loss, _CLASSIFICATION) or _without_options(loss) in _FUNCTIONS_OF_CLASSIFICATION


def ignored_label(loss: Any) -> int:
    """The label that a criterion leaves out, −100 where it does not say.

    >>> ignored_label(nn.CrossEntropyLoss(ignore_index=255)), ignored_label(functools.partial(F.cross_entropy, ignore_index=7))
    (255, 7)
    """
    return int(option_of(loss, "ignore_index", -100))


def own_losses(value: Tensor, terms: Sequence[int], output: Tensor, summed: bool = False) -> Losses:
    """The summed losses of a batch from the mean (or sum) that a model computed itself, and :func:`own_terms`."""
    if summed:
        return Losses(value, len(terms))
    total = sum(terms)
    return Losses(value * total if total else output.sum() * 0, total)  # the mean of no labels is NaN


def own_terms(output: Tensor, target: Any, n: int, ignore_index: int) -> list[int]:
    """What a model's own mean divides by, for each of n samples.

    Models of transformers average over the labels that count. Labels of another shape than the scores count as one per
    sample.
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or output.shape[:-1] != target.shape:
        return [1] * n
    return (target != ignore_index).reshape(n, -1).sum(1).tolist()


#: for losses of several heads, or without a target
WHOLE_BATCH = "a loss whose second argument is called batch gets all that the model returned and the whole batch"


def takes_batch(loss: Any) -> bool:
    """Whether a loss wants all that the model returned and the whole batch: its second argument is called ``batch``.

    >>> takes_batch(lambda returned, batch: 0), takes_batch(lambda output, target: 0)
    (True, False)
    """
    names = list(_parameters(loss))
    return len(names) > 1 and names[1] == "batch"


def is_torch_criterion(loss: Any) -> bool:
    """Whether a loss is one of torch's own, which knows nothing of shifted labels."""
    return (type(loss) if isinstance(loss, nn.Module) else _without_options(loss)).__module__.startswith("torch.nn")


def _without_options(loss: Any) -> Any:
    """The function inside ``functools.partial``."""
    return _without_options(loss.func) if isinstance(loss, functools.partial) else loss


def class_axis(output: Any, target: Any, lengths: tuple[int, ...] = ()) -> int | None:
    """The axis of the classes in scores of integer labels, −1 or 1; ``None`` where shapes fit neither or both.

    Where they fit both and the labels belong to sequences of one of the known ``lengths``, the classes are last.

    >>> class_axis(torch.zeros(2, 3, 5), torch.zeros(2, 3).long()), class_axis(torch.zeros(2, 5, 3), torch.zeros(2, 3).long())
    (-1, 1)
    """
    labels = isinstance(target, Tensor) and not target.is_floating_point()
    if not labels or not isinstance(output, Tensor) or output.dim() < 2:
        return None
    last = output.shape[:-1] == target.shape
    second = output.dim() > 2 and output.shape[0] == target.shape[0] and output.shape[2:] == target.shape[1:]
    if last and second:
        return -1 if output.dim() == 3 and target.shape[1] in lengths else None
    return -1 if last else 1 if second else None


def _counted(target: Any, ignore_index: int) -> tuple[int, int] | None:
    """How many labels there are and how many of them count; ``None`` for targets that are not labels."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return target.numel(), int((target != ignore_index).sum())


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"the loss returned a {type(value).__name__}, not a tensor")
    return value


def _stated(value: Tensor, n: int, reduction: str | float, counted: tuple[int, int] | None) -> Losses:
    if not isinstance(check_reduction(reduction), str):
        return Losses(value.sum() * float(reduction), n)
    if reduction == "none":
        return _within_samples(value, None, n, "none", counted)
    if value.numel() != 1:
        raise InputError(f"reduction={reduction!r} was stated but the loss has shape {tuple(value.shape)}")
    return Losses(value * n if reduction == "mean" else value, n)


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def check_reduction(reduction: str | float) -> str | float:
    """The reduction, or an error unless it is ``"mean"``, ``"sum"``, ``"none"`` or a positive number."""
    number = isinstance(reduction, int | float) and not isinstance(reduction, bool) and 0 < reduction < math.inf
    if not number and reduction not in ("mean", "sum", "none"):
        raise InputError(f"reduction={reduction!r}: give 'mean', 'sum', 'none' or the factor as a positive number")
    return reduction


def _within_samples(
    value: Tensor,
    output: Any,
    n: int,
    reduction: str,
    counted: tuple[int, int] | None,
    valid: Tensor | None = None,
) -> Losses:
    """One loss per sample from unreduced losses ``[n, …]``, and the terms of their mean."""
    if value.dim() == 0:
        value = value.reshape(1)
    if value.shape[0] % n:
        raise InputError(
            f"the unreduced loss has shape {tuple(value.shape)}, which does not divide into {n} samples; if it reduces over "
            "the batch by itself, say how with reduction='mean', 'sum' or a factor"
        )
    if isinstance(output, Tensor) and value.numel() > output.numel():
        raise InputError(
            f"the loss of an output of shape {tuple(output.shape)} has {value.numel()} terms: output and target were "
            "broadcast against each other; give them one shape"
        )
    elementwise = isinstance(output, Tensor) and value.shape == output.shape
    if valid is not None and elementwise and value.shape[:2] == valid.shape:
        value = value.flatten(2).mean(2) if value.dim() > 2 and reduction == "mean" else value.flatten(2).sum(2)
        value = torch.where(valid, value, 0)
        return Losses(value.sum(1), int(valid.sum()) if reduction == "mean" else n)
    value = value.reshape(n, -1)
    if elementwise and reduction == "mean":
        return Losses(value.mean(1), n)
    labelled = reduction != "sum" and counted is not None and counted[0] == value.numel()
    return Losses(value.sum(1), counted[1] if labelled and counted is not None else n)


def reduction_of(loss: Any) -> str | None:
    """The ``reduction`` of a criterion, or the default of a function's ``reduction`` argument, if it has one."""
    own = getattr(loss, "reduction", None)
    if not isinstance(loss, nn.Module):
        parameter = _parameters(loss).get("reduction")
        own = None if parameter is None else parameter.default
    return own if isinstance(own, str) else None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The arguments of a function; none where Python cannot tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
