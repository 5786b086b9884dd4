"""``gs.collect``: one pass over a loader, and everything the measures need is in memory of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.layers.batches import Unpack, batches, to_device
from gramscope.layers.jacobians import MEMORY, check_samples_are_independent
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import (
    OutputSelector,
    call_model,
    evaluating,
    model_device,
    model_dtype,
    select_output,
)
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, select_modules
from gramscope.layers.tape import capture
from gramscope.layers.validity import check_reference
from gramscope.statistics.accumulate import Accumulator
from gramscope.statistics.features import IGNORED, Tokens
from gramscope.statistics.layouts import check_channels, layout, sample_axes
from gramscope.statistics.one_batch import Options, backward, forward
from gramscope.statistics.result import Statistics

#: losses whose targets are numbers, also where they are stored as integers
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
REGRESSION_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def collect(
    model: nn.Module,
    loader: Any,
    loss: Loss | None = None,
    *,
    layers: LayerSelector = None,
    outputs: str | Sequence[str] = (),
    channels: str = "auto",
    reduction: str | float | None = None,
    output: OutputSelector = None,
    unpack: Unpack | None = None,
    targets: Callable[[Any, Any], Tensor] | None = None,
    tokens: Tokens = "auto",
    ignore_index: int | None = None,
    features: bool = True,
    gram: bool | str = "auto",
    gradients: bool = True,
    covariance: bool = True,
    residuals: bool = False,
    autograd: bool = False,
    jacobians: bool | str = False,
    reference: nn.Module | None = None,
    sketch: int | None = None,
    generator: torch.Generator | None = None,
    memory: int = MEMORY,
    batch_dim: int = 0,
    eval_mode: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Statistics:
    """Collect the statistics of every layer in one pass over ``loader``; results do not depend on the batch size.

    Args:
        model: any module; it leaves as it came.
        loader: a DataLoader, any iterable of batches, a data set, or one batch such as tensors or NumPy arrays ``(x, y)``
            (:func:`gramscope.layers.batches.batches`).
        loss: criterion or function of ``(output, target)``, freed of its batch reduction (:mod:`gramscope.layers.losses`);
            ``None`` collects features and Jacobians only.
        layers: names, globs or types of linear-like layers; ``None`` for all.
        outputs: names or globs of modules whose outputs are kept as features too.
        channels: where the features of those outputs are: ``"first"`` (after the batch), ``"last"``, or ``"auto"``: as the
            module's type has them, else last of three axes and first of four. Three axes that could be
            ``[batch, channels, length]``, in a network with 1-d convolutions, must be told.
        reduction: how a custom ``loss`` reduces over the batch: ``"mean"`` (it divides by the number of samples; a mean over
            tokens or weighted by class divides by something else, so pass the criterion itself or a number), ``"sum"``,
            ``"none"``, or a factor that multiplies the (summed) losses.
        output: key, index or function that finds the output tensor in what the model returns.
        unpack: ``batch -> (inputs, target)`` for loaders that yield something else.
        targets: ``(inputs, target) -> Y`` where features are to be compared with something else than the batch's target.
            Integer targets are class labels from 0 on (for labels −1 and 1 pass ``lambda x, y: (y > 0).long()``),
            floating-point ones are regressed on as they are.
        tokens: how sites become feature rows (:func:`gramscope.statistics.features.rows_and_targets`).
        ignore_index: the label of positions or samples to leave out; by default the loss's own, or −100.
        features: keep moments of the layers' inputs with the targets.
        gram: keep ``HᵀH``: ``"auto"`` where d ≤ 512, ``True`` or ``False`` for all.
        gradients: keep ``D`` (where there is a loss); ``False`` evaluates the loss alone.
        covariance: keep ``Σ`` beside ``D``.
        residuals: keep ``HᵀE`` with ``E = −∂L/∂f``, for the predicted change of the surrogate (003 Theorem 3).
        autograd: keep the parameters' own gradients too, to check ``D`` against them.
        jacobians: keep ``Σ JᵀJ``, from which K, AGOP and the NFA follow; ``"auto"`` unless a sample has more than
            256 outputs and no ``sketch`` was asked for.
        reference: the network at initialisation; adds ``Σ (J − J⁰)ᵀ(J − J⁰)`` (implies ``jacobians``). It may share
            frozen modules with the model, but no trainable weight.
        sketch: number of random output combinations instead of all outputs (large vocabularies); needs ``generator``.
        memory: bytes a chunk of Jacobians may take, with the gradients on the way to it; and bytes for the ``Σ``, and for
            the ``JᵀJ``, of one layer: where k × k is larger, and larger than ``D`` (the readout of a large vocabulary), it is
            left out, with a note.
        batch_dim: axis of the batch in inputs of Linear layers and in outputs of modules (1 for sequence-first models);
            what is inside torch's own attention, Transformer and recurrent modules follows their ``batch_first``.
        eval_mode: ``False`` keeps the model's own modes (batch norm in train mode is then an error).
        dtype: of the sums; moments are always float64.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    >>> stats = gs.collect(net, torch.utils.data.DataLoader(data, batch_size=5), torch.nn.CrossEntropyLoss())
    >>> stats.n, stats["0"].D.shape, stats["2"].features.joint.C_hh.shape
    (10, torch.Size([4, 3]), torch.Size([4, 4]))
    """
    if dtype not in (torch.float64, torch.float32):
        raise InputError(f"dtype={dtype}: sums are kept in torch.float64 or torch.float32")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise InputError(f"memory={memory!r}: give a positive whole number of bytes")
    flags = {"features": features, "gradients": gradients, "covariance": covariance, "residuals": residuals}
    flags |= {"autograd": autograd, "eval_mode": eval_mode}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name}={value!r}: give True or False")
    for name, choice in (("gram", gram), ("jacobians", jacobians)):
        if not isinstance(choice, bool) and choice != "auto":
            raise InputError(f"{name}={choice!r}: give True, False or 'auto'")
    if loss is not None and not callable(loss):
        raise InputError(f"loss={loss!r} is not callable; give a criterion or a function of (output, target)")
    device, root = model_device(model), unwrap(model)
    if reference is not None:
        check_reference(root, reference)
    if ignore_index is None:
        ignore_index = getattr(loss, "ignore_index", IGNORED)
    modules = select_modules(root, outputs) if outputs else {}
    inferred = check_channels(channels) == "auto"
    options = Options(
        gradients=gradients and loss is not None,
        features=features,
        jacobians=True if reference is not None else jacobians,
        sketch=sketch,
        gram=gram,
        residuals=residuals,
        autograd=autograd,
        tokens=tokens,
        ignore_index=ignore_index,
        layouts={name: layout(module, root) if inferred else channels for name, module in modules.items()},
        memory=memory,
        dtype=dtype,
    )
    regression = isinstance(loss, REGRESSION) or loss in REGRESSION_FUNCTIONS
    needs_graph = options.gradients or bool(options.jacobians)
    with ExitStack() as stack:
        stack.enter_context(evaluating(root, eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(needs_graph))
        check_samples_are_independent(root)
        tape = stack.enter_context(
            capture(model, layers, outputs=outputs, batch_dim=batch_dim, gradients=needs_graph, copy_weights=False)
        )
        twin = None
        if reference is not None:
            stack.enter_context(evaluating(unwrap(reference), eval_mode))
            twin = stack.enter_context(capture(reference, layers, batch_dim=batch_dim, copy_weights=False))
        accumulator = Accumulator(options, generator, covariance, sample_axes(root, batch_dim), modules)
        for index, (inputs, target) in enumerate(batches(loader, unpack, model_dtype(root))):
            inputs, target = to_device(inputs, device), to_device(target, device)
            given = target
            if regression and isinstance(target, Tensor) and not target.is_floating_point():
                target = target.to(model_dtype(root))
                if targets is None:
                    tape.unsupported["(targets)"] = (
                        "integers under a loss of regression are numbers to regress on; targets=lambda x, y: y makes them "
                        "classes"
                    )
            with nullcontext() if twin is None else twin.looking_away():
                step = forward(model, tape, inputs, target, index, output)
            if loss is not None:
                step = backward(step, tape, loss, reduction, index, options)
            if targets is not None:
                step = replace(step, target=targets(inputs, given))
            twin_output = None
            if reference is not None and twin is not None:
                with tape.looking_away():
                    twin_output = (twin, select_output(call_model(reference, inputs), output))
            accumulator.add(tape, step, twin_output)
            tape.clear()
            if twin is not None:
                twin.clear()
    asked = {
        "layers": sorted(tape.records),
        "outputs": sorted(modules),
        "tokens": "a function" if callable(tokens) else tokens,
        "covariance": covariance and options.gradients,
        "reference": reference is not None,
        "batch_dim": batch_dim,
        "eval_mode": eval_mode,
    }
    asked |= {name: getattr(options, name) for name in ("gradients", "features", "gram", "residuals", "autograd")}
    asked |= {name: getattr(options, name) for name in ("jacobians", "sketch", "ignore_index")}
    return accumulator.result(tape.unsupported, asked)
