"""``gs.capture``: watch a model inside a ``with`` block, and leave it as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from gramscope.errors import LayerError, ResultWarning, checks_names
from gramscope.layers.modules import ModuleHook, is_compiled, unwrap
from gramscope.layers.select import LayerSelector, Selection, select_layers, select_modules
from gramscope.layers.tape import Observer, Reduction, Tape


@checks_names
@contextmanager
def capture(
    model: nn.Module,
    layers: LayerSelector | Selection = None,
    *,
    outputs: str | Sequence[str] = (),
    reduction: Reduction = "sum",
    batch_dim: int = 0,
    gradients: bool = True,
    copy_weights: bool = True,
) -> Iterator[Tape]:
    """Record every linear-like layer application of the forwards and backwards run inside the ``with`` block.

    Args:
        model: any module, also inside ``torch.compile`` (run eagerly meanwhile) or DDP.
        layers: names, globs or module types; ``None`` for every linear-like layer.
        outputs: names or globs of modules whose output is kept too (the hidden state of a Transformer block): the one of
            the last time the module ran.
        reduction: how the loss you call ``backward`` on was reduced over the batch. ``"sum"`` takes gradients as they
            come; ``"mean"`` multiplies them by the number of samples n, so that ``delta`` is per sample; a number multiplies
            them whatever the loss was. A capture sees gradients, not the loss: ``"mean"`` is right only for a loss that
            divided by n. One that divided by something else (the weights of the classes, the labels that are not
            ignored, n times the tokens) needs that divisor as a number, or ``tape.backward(losses)`` with one loss per
            sample, or :func:`gramscope.collect` with the criterion itself.
        batch_dim: axis of the batch in the inputs of Linear layers (1 for sequence-first models).
        gradients: ``False`` records inputs only.
        copy_weights: copy each weight when its layer is first applied; ``False`` reads it when asked for.

    The model is left as it was, also after an exception. Layers that cannot be captured are in ``tape.unsupported``.
    Batch normalisation in train mode makes the samples of a batch depend on each other, so that gradients of single
    samples do not exist: a :class:`~gramscope.errors.ResultWarning` says so; ``model.eval()`` first gives them.

    >>> import torch, gramscope as gs
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> with gs.capture(model) as tape:
    ...     model(torch.ones(5, 3)).square().sum().backward()
    >>> tape["0"].h.shape, tape["0"].delta.shape, tape["0"].D.shape
    (torch.Size([5, 1, 3]), torch.Size([5, 1, 4]), torch.Size([4, 3]))
    """
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        raise LayerError(
            f"{type(root).__name__} is a scripted module, whose layers cannot be watched; use the original"
        )
    selection = select_layers(root, layers)
    tape = Tape(
        root,
        selection,
        reduction=reduction,
        batch_dim=batch_dim,
        gradients=gradients,
        copy_weights=copy_weights,
    )
    tape.explicit = layers is not None
    wanted = select_modules(root, outputs) if outputs else {}
    with ExitStack() as stack:
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(root.register_forward_pre_hook(ModuleHook(tape.called), with_kwargs=True).remove)
        stack.callback(root.register_forward_hook(ModuleHook(tape.returned)).remove)
        for name, module in wanted.items():
            stack.callback(module.register_forward_hook(ModuleHook(partial(tape.keep_output, name))).remove)
        stack.enter_context(Observer(selection, tape.applied).attached())
        yield tape
    check_seen(tape)


def check_seen(tape: Tape) -> None:
    """After a capture: raise if layers that were asked for (or all of them) were not seen or reached, else note it."""
    if not tape.ran and not tape.applied_layers:
        warnings.warn(
            "nothing was captured: the model did not run inside the block, or it ran inside a compiled function that holds "
            "it; run the module itself",
            ResultWarning,
            stacklevel=4,
        )
    if not tape.ran:
        return
    unseen = [name for name in tape.records if name not in tape.applied_layers]
    known = {name: tape.unsupported[name] for name in unseen if name in tape.unsupported}
    if known and tape.explicit:
        raise LayerError("; ".join(f"layer {name!r} cannot be captured: {why}" for name, why in known.items()))
    if unseen and (tape.explicit or len(unseen) == len(tape.records)):
        raise LayerError(
            f"the model ran but these layers were never applied: {', '.join(unseen)}. Either the forward does not use them, "
            "or it uses their weights without calling the layers"
        )
    tape.note_unapplied()
    idle = {name: why for name, why in tape.unsupported.items() if why.kind == "no gradient"}
    without = {name: why for name, why in tape.unsupported.items() if why.kind == "no Jacobians"} | idle
    if without and (tape.explicit or len(idle) == len(tape.applied_layers)):
        reasons = "; ".join(f"layer {name!r}: {why}" for name, why in without.items())
        raise LayerError(f"{reasons}; leave it out of layers=")
