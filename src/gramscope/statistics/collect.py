"""``gs.collect``: everything the measures need, from one pass over a loader, in memory of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, find_exchange
from gramscope.distributed.gathered import check_not_flattened, gathered
from gramscope.errors import InputError
from gramscope.layers.batches import NoBatchError, Unpack, batches, to_device
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import MEMORY, check_samples_are_independent
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import (
    OutputSelector,
    evaluating,
    may_compute_loss,
    model_device,
    model_dtype,
)
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, select_modules
from gramscope.layers.tape import Tape
from gramscope.layers.validity import check_reference
from gramscope.statistics.accumulate import Accumulator
from gramscope.statistics.collect_options import Options
from gramscope.statistics.features import IGNORED, Tokens
from gramscope.statistics.layouts import check_channels, layout, sample_axes
from gramscope.statistics.memory import trim_malloc
from gramscope.statistics.one_batch import BatchRunner
from gramscope.statistics.processes import over_processes
from gramscope.statistics.progress import progress_bar
from gramscope.statistics.result import Statistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    at_inputs: Sequence[str] = (),
    snapshot: bool = True,
    probed: bool = False,
    visit: Callable[[str, Tensor], None] | None = None,
    progress: bool = True,
    process_group: Group = None,
    mesh: DeviceMesh | None = None,
) -> Statistics:
    """Collect the statistics of every layer in one pass over ``loader``; results do not depend on the batch size.

    In several processes of ``torch.distributed`` each reads its own part of the data, which may be empty, and all return
    the statistics of all data.

    Args:
        model: any module; it is left as it was.
        loader: a DataLoader, any iterable of batches, a data set, or one batch such as tensors or NumPy arrays ``(x, y)``
            (:func:`gramscope.layers.batches.batches`).
        loss: criterion or function of ``(output, target)``, freed of its batch reduction (:mod:`gramscope.layers.losses`);
            ``None`` takes the model's own ``.loss`` where it returns one (models of transformers, given labels), else
            collects features and Jacobians only. A function whose second argument is called ``batch`` gets all that the
            model returned and the whole batch: several heads, several terms.
        layers: names, globs or types of linear-like layers; ``None`` for all.
        outputs: names or globs of modules whose outputs are kept as features too.
        channels: where the features of those outputs are: ``"first"`` (after the batch), ``"last"``, or ``"auto"``: as the
            module's type has them, else last of three axes and first of four. Say it where three axes could be
            ``[batch, channels, length]``, in a network with 1-d convolutions.
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
        gram: keep ``HᵀH``: ``"auto"`` where d ≤ 4096 or three such matrices fit ``memory`` (for d > 512 the rows themselves
            while they are fewer than d; for larger d while ``memory`` has 16 bytes an entry), ``True`` or ``False`` for all.
        gradients: keep ``D`` (where there is a loss); ``False`` evaluates the loss alone.
        covariance: keep ``Σ`` beside ``D``.
        residuals: keep ``HᵀE`` with ``E = −∂L/∂f``, for the predicted change of the surrogate ([Gram] Theorem 3).
        autograd: keep the parameters' own gradients too, to check ``D`` against them.
        jacobians: keep ``Σ JᵀJ``, from which K, AGOP and the NFA follow; ``"auto"`` takes all outputs of a sample
            up to 256 and a sketch of 4 random combinations above.
        reference: the network at initialisation; adds ``Σ (J − J⁰)ᵀ(J − J⁰)`` (implies ``jacobians``). It may share
            frozen modules with the model, but no trainable weight.
        sketch: number of random output combinations instead of all outputs (large vocabularies).
        generator: source of their signs; by default one with seed 0.
        memory: bytes a chunk of Jacobians may take, with the gradients on the way to it; and bytes for the ``Σ``, and for
            the ``JᵀJ``, of one layer: where k × k is larger, and larger than ``D`` (the readout of a large vocabulary), it is
            left out, with a note.
        batch_dim: axis of the batch in inputs of Linear layers and in outputs of modules (1 for sequence-first models);
            what is inside torch's own attention, Transformer and recurrent modules follows their ``batch_first``.
        eval_mode: ``False`` keeps the model's own modes (batch norm in train mode is then an error).
        dtype: of the sums; moments are always float64.
        at_inputs: ``"covariance"``, ``"jacobians"`` or both, to keep ``WᵀΣW`` and ``WᵀKW``, which are d×d, in place of Σ and K
            where k > d (:class:`~gramscope.statistics.layer.LayerStatistics`).
        snapshot: ``False`` saves memory where the statistics are used before the model changes: they hold its weights
            themselves, no copies, gradients that were summed in the weights' precision stay in it, and symmetric sums are kept
            once: a layer is put together each time it is asked for.
        probed: keep products with random probes in place of Σ and K of layers where those, or the weight and its gradient in
            float64, do not fit ``memory``, for estimates (:mod:`gramscope.measures.probed`); ``gs.measure`` does so.
        visit: called with the name of a layer and the feature rows of a batch, in place of keeping their moments.
        progress: show a bar with the time left, on terminals; ``False`` for none.
        process_group: the processes whose data are one sample: by default those of a ``DistributedDataParallel`` model, else
            the default group of ``torch.distributed`` where there is one; ``False`` for this process alone. Every process of
            the group must make this call; one that waits 30 seconds warns for which others.
        mesh: a device mesh of one dimension, in place of ``process_group``.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    >>> stats = gs.collect(net, torch.utils.data.DataLoader(data, batch_size=5), torch.nn.CrossEntropyLoss())
    >>> stats.n, stats["0"].D.shape, stats["2"].features.joint.C_hh.shape
    (10, torch.Size([4, 3]), torch.Size([4, 4]))
    """
    if loss is not None and not callable(loss):
        raise InputError(f"loss={loss!r} is not callable; give a criterion or a function of (output, target)")
    root = unwrap(model)
    check_not_flattened(root)
    exchange = find_exchange(process_group, mesh, model)
    if generator is None:  # every process draws signs of its own for sketched Jacobians
        generator = torch.Generator().manual_seed(0 if exchange is None else exchange.rank)
    if reference is not None:
        check_reference(root, reference)
    modules = select_modules(root, outputs) if outputs else {}
    inferred = check_channels(channels) == "auto"
    asked = Options(
        gradients=gradients,
        covariance=covariance,
        features=features,
        jacobians=True if reference is not None else jacobians,
        sketch=sketch,
        gram=gram,
        residuals=residuals,
        autograd=autograd,
        tokens=tokens,
        ignore_index=getattr(loss, "ignore_index", IGNORED) if ignore_index is None else ignore_index,
        layouts={name: layout(module, root) if inferred else channels for name, module in modules.items()},
        memory=memory,
        batch_dim=batch_dim,
        eval_mode=eval_mode,
        dtype=dtype,
        at_inputs=frozenset(at_inputs),
        snapshot=snapshot,
        probed=probed,
        visit=visit,
    )
    options = replace(asked, gradients=gradients and (loss is not None or may_compute_loss(root)))
    runner = BatchRunner(model, loss, reduction, output, targets, options)
    accumulator = Accumulator(options, generator, sample_axes(root, batch_dim), modules)
    read = partial(_read, model, reference, loader, layers, outputs, unpack, runner, accumulator, progress)
    with ExitStack() as whole:
        for network in (root, *([] if reference is None else [unwrap(reference)])):
            whole.enter_context(gathered(network, exchange))
        return read() if exchange is None else _read_together(read, exchange, model_device(model))


def _read_together(read: Callable[..., Statistics], exchange: Exchange, device: torch.device) -> Statistics:
    """The statistics of the data of all processes."""
    own = exchange.read_together(partial(read, may_be_empty=True), device)
    whole = over_processes(own, exchange, device)
    if whole.n == 0:
        raise NoBatchError("the loaders of all processes yielded no batch")
    return whole


def _read(
    model: nn.Module,
    reference: nn.Module | None,
    loader: Any,
    layers: LayerSelector,
    outputs: str | Sequence[str],
    unpack: Unpack | None,
    runner: BatchRunner,
    accumulator: Accumulator,
    progress: bool,
    may_be_empty: bool = False,
) -> Statistics:
    """The statistics of one pass over the data of this process."""
    options = runner.options
    root = unwrap(model)
    names: list[str] = []
    bar = progress_bar("collecting", batch_count(loader), progress)
    try:
        with bar as advance, _captures(model, reference, layers, outputs, options) as (tape, twin):
            names = list(tape.records)
            device = model_device(model)
            for index, batch in enumerate(batches(loader, unpack, model_dtype(root))):
                inputs, target = (to_device(part, device) for part in batch)
                with nullcontext() if twin is None else twin.ignoring_calls():
                    step = runner.run(tape, inputs, target, index)
                if reference is None or twin is None:
                    accumulator.add(tape, step, None)
                else:
                    with tape.ignoring_calls():
                        reference_output = runner.run_reference(reference, step.inputs, step.output)
                    accumulator.add(tape, step, (twin, reference_output))
                    twin.clear()
                    del reference_output
                tape.clear()
                del step  # its graph, before the next batch makes another
                trim_malloc()
                advance()
    except NoBatchError:
        if not may_be_empty:
            raise
        return Statistics({}, options=options.to_dict(names, reference is not None))
    return accumulator.result(tape.unsupported, options.to_dict(list(tape.records), reference is not None))


def batch_count(loader: Any) -> int | None:
    """The number of batches, where it is known: of a loader or a list of batches."""
    if isinstance(loader, torch.utils.data.DataLoader) or (isinstance(loader, list) and len(loader) > 2):
        try:
            return len(loader)
        except TypeError:  # a loader over an iterable data set without a length
            return None
    return None


@contextmanager
def _captures(
    model: nn.Module,
    reference: nn.Module | None,
    layers: LayerSelector,
    outputs: str | Sequence[str],
    options: Options,
) -> Iterator[tuple[Tape, Tape | None]]:
    """Capture the model and, if given, the reference network, in the modes that the options ask for."""
    root, batch_dim = unwrap(model), options.batch_dim
    with ExitStack() as stack:
        stack.enter_context(evaluating(root, options.eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(options.needs_graph))
        check_samples_are_independent(root)
        mine = capture(
            model, layers, outputs=outputs, batch_dim=batch_dim, gradients=options.needs_graph, copy_weights=False
        )
        tape, twin = stack.enter_context(mine), None
        if reference is not None:
            stack.enter_context(evaluating(unwrap(reference), options.eval_mode))
            twin = stack.enter_context(capture(reference, layers, batch_dim=batch_dim, copy_weights=False))
        yield tape, twin
