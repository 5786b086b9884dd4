"""``gs.collect``: everything the measures need, from one run over a loader, in memory of fixed size."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange, Group, check_not_flattened, find_exchange, gathered
from gramscope.errors import InputError, checks_names
from gramscope.layers.batches import NoBatchError, Unpack
from gramscope.layers.losses import Loss, classifies
from gramscope.layers.model_call import OutputSelector, model_device
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector
from gramscope.linalg.budget import MEMORY
from gramscope.statistics.features import Features
from gramscope.statistics.matrix_sums import CenteredKernel, Covariance, Gradient, Kernel, ParameterGradient
from gramscope.statistics.result import (
    LayerStatistics,
    NetworkStatistics,
    Statistics,
    drop_refuted,
    merge_orders,
    over_processes,
)
from gramscope.statistics.run import run
from gramscope.statistics.structure import Tokens
from gramscope.statistics.sums import EVERY, OUTPUT, LeftOut, Plan, Seen, Sum


@checks_names
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
    sums: Sequence[type[Sum]] = (),
    memory: int = MEMORY,
    batch_dim: int = 0,
    eval_mode: bool = True,
    dtype: torch.dtype = torch.float64,
    progress: bool = True,
    process_group: Group = None,
) -> Statistics:
    """Collect the statistics of every layer in one run over ``loader``; results do not depend on the batch size.

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
        tokens: how sites become feature rows (:func:`gramscope.statistics.structure.rows_and_targets`).
        ignore_index: the label of positions or samples to leave out; by default the loss's own, or −100.
        features: keep moments of the layers' inputs with the targets.
        gram: keep ``HᵀH``: ``"auto"`` where d ≤ 4096 or three such matrices fit ``memory`` (for d > 512 the rows themselves
            while they are d or fewer; for larger d while ``memory`` has 16 bytes an entry), ``True`` or ``False`` for all.
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
        sums: further sums of your own, subclasses of :class:`gramscope.Sum`; ``stats[layer][MySum]`` is one of a layer.
        memory: bytes a chunk of Jacobians may take, with the gradients on the way to it; and bytes for the ``Σ``, and for
            the ``JᵀJ``, of one layer: where k × k is larger, and larger than ``D`` (the readout of a large vocabulary), it is
            left out, with a note.
        batch_dim: axis of the batch in inputs of Linear layers and in outputs of modules (1 for sequence-first models);
            what is inside torch's own attention, Transformer and recurrent modules follows their ``batch_first``.
        eval_mode: ``False`` keeps the model's own modes (batch norm in train mode is then an error).
        dtype: of the sums; moments are always float64.
        progress: show a bar with the time left, on terminals; ``False`` for none.
        process_group: the processes whose data are one sample: by default those of a ``DistributedDataParallel`` model, else
            the default group of ``torch.distributed`` where there is one; ``False`` for this process alone. Every process of
            the group must make this call; one that waits 30 seconds warns for which others.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    >>> stats = gs.collect(net, torch.utils.data.DataLoader(data, batch_size=5), torch.nn.CrossEntropyLoss())
    >>> stats.n, stats["0"].D.shape, stats["2"].features.joint.C_hh.shape
    (10, torch.Size([4, 3]), torch.Size([4, 4]))
    """
    arguments = locals()
    for name in ("features", "gradients", "covariance", "autograd"):
        if not isinstance(arguments[name], bool):
            raise InputError(f"{name}={arguments[name]!r}: give True or False")
    wanted: dict[type[Sum], bool] = {
        Gradient: gradients,
        Covariance: gradients and covariance,
        ParameterGradient: gradients and autograd,
        Kernel: bool(jacobians) or reference is not None,
        CenteredKernel: reference is not None,
        Features: features,
    }
    plan = Plan((*(kind for kind, is_wanted in wanted.items() if is_wanted), *sums)).with_arguments(arguments, loss)
    if reference is not None:
        plan = replace(plan, jacobians=True)
    return collect_planned(model, loader, loss, plan, reference, find_exchange(process_group, model), progress)


def collect_planned(
    model: nn.Module,
    loader: Any,
    loss: Loss | None,
    plan: Plan,
    reference: nn.Module | None,
    exchange: Exchange | None,
    progress: bool,
) -> Statistics:
    """The statistics of a plan, over the data of all processes."""
    if loss is not None and not callable(loss):
        raise InputError(f"loss={loss!r} is not callable; give a criterion or a function of (output, target)")
    root = unwrap(model)
    check_not_flattened(root)
    if reference is not None:
        check_reference(root, reference)
    if plan.generator is None:  # every process draws signs of its own for sketched Jacobians
        seed = 0 if exchange is None else exchange.rank
        plan = replace(plan, generator=torch.Generator(device="cpu").manual_seed(seed))
    if plan.targets is None and classifies(loss):
        plan = replace(plan, classes=True)
    with ExitStack() as whole:
        for network in (root, *([] if reference is None else [unwrap(reference)])):
            whole.enter_context(gathered(network, exchange))
        read = partial(_of_one_process, model, loader, loss, plan, reference, progress)
        if exchange is None:
            return read()
        own = exchange.read_together(partial(read, may_be_empty=True), model_device(model))
        found = over_processes(own, exchange, model_device(model))
    if found.n == 0:
        raise NoBatchError("the loaders of all processes yielded no batch")
    return found


def _of_one_process(
    model: nn.Module,
    loader: Any,
    loss: Loss | None,
    plan: Plan,
    reference: nn.Module | None,
    progress: bool,
    may_be_empty: bool = False,
) -> Statistics:
    """The statistics of one run over the data of this process."""
    kept: dict[str, dict[type[Sum], Sum]] = {}
    weights: dict[str, Any] = {}
    reached: dict[str, int] = {}
    order: list[str] = []
    network = NetworkStatistics()
    try:
        with (
            progress_bar("collecting", batch_count(loader), progress) as advance,
            closing(run(model, loader, loss, plan, reference, advance)) as stream,
        ):
            for seen in stream:
                _add(kept.setdefault(seen.layer, {}), seen, plan)
                if seen.record is not None:
                    weights.setdefault(seen.layer, seen.source)
                    reached[seen.layer] = reached.get(seen.layer, 0) + seen.batch.n
                if seen.whole_batch:
                    network = network.with_batch(seen.batch, plan.ignore_index)
                    order = order if seen.batch.order == order else merge_orders(order, seen.batch.order)
                del seen  # its graph, before the next batch makes another
    except NoBatchError:
        if not may_be_empty:
            raise
        return Statistics({}, options=plan.to_dict())
    for name, sums in kept.items():
        kept[name] = {kind: total for kind, total in sums.items() if not _is_left_out(name, kind, plan)}
        for total in kept[name].values():
            total.finish()
            if isinstance(total, Features) and total.unpaired:
                plan.notes.left_out(name, f"no targets: {total.unpaired}")
    n, terms = network.n, network.terms
    layers = {
        name: LayerStatistics(name, weights[name], n, kept.pop(name), terms, reached[name])
        for name in order
        if name in weights
    }
    nothing = torch.empty(0, 0, dtype=torch.float64, device=model_device(model))
    outputs = {
        name.removesuffix(OUTPUT).strip() or name: LayerStatistics(name, nothing, n, sums, terms)
        for name, sums in kept.items()
        if sums and Features in sums and sums[Features].n  # type: ignore[attr-defined]
    }
    notes = drop_refuted(plan.notes.found, layers)
    left_out = frozenset(plan.notes.without)
    return Statistics(layers, outputs, network, notes, left_out, plan.to_dict(), order=tuple(order))


def _add(sums: dict[type[Sum], Sum], seen: Seen, plan: Plan) -> None:
    """Add what is seen to the sums that read it; the first batch makes them."""
    given = {name for name in ("parameter_gradient", "J", "J_reference", "rows") if getattr(seen, name) is not None}
    if seen.record is not None:
        given |= {"h", "delta"} if any(a.dz is not None for a in seen.record.applications) else {"h"}
    if seen.whole_batch:
        given.add("batch")
    for kind in plan.sums:
        if not kind.needs <= given or _is_left_out(seen.layer, kind, plan):
            continue
        try:
            if kind not in sums:
                sums[kind] = kind(seen.layer, seen.weight, plan)
                sums[kind].weight = seen.source
            sums[kind].add(seen)
        except LeftOut as reason:
            plan.notes.leave_out(seen.layer, kind, str(reason))


def _is_left_out(layer: str, kind: type[Sum], plan: Plan) -> bool:
    return not plan.notes.without.isdisjoint({(layer, kind.__name__), (EVERY, kind.__name__)})


def check_reference(model: nn.Module, reference: nn.Module) -> None:
    """Raise if the reference network shares a trainable weight with the model: it would change along with it."""
    places = {
        p.untyped_storage().data_ptr(): name
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and p.device.type != "meta" and p.numel()
    }
    known = [p for p in unwrap(reference).parameters() if p.device.type != "meta"]
    shared = [places[p.untyped_storage().data_ptr()] for p in known if p.untyped_storage().data_ptr() in places]
    if shared:
        raise InputError(
            f"reference shares {len(shared)} trainable parameters with the model ({', '.join(shared[:3])}), so it is not "
            "the network at initialisation; keep copy.deepcopy(model) before training"
        )


def batch_count(loader: Any) -> int | None:
    """The number of batches, where it is known: of a loader or a list of batches."""
    if isinstance(loader, torch.utils.data.DataLoader) or (isinstance(loader, list) and len(loader) > 2):
        try:
            return len(loader)
        except TypeError:  # a loader over an iterable data set without a length
            return None
    return None


@contextmanager
def progress_bar(text: str, total: int | None, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show on standard error, if that is a terminal, how much is done; yield a function that advances it by one.

    Args:
        text: what is being done.
        total: number of steps, ``None`` if it is not known.
        shown: ``False`` shows nothing.

    >>> with progress_bar("collecting", 2) as advance:
    ...     advance()
    """
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda: None
        return
    done, start = -1, time.monotonic()

    def advance() -> None:
        nonlocal done
        done += 1
        left = f", {(time.monotonic() - start) / done * (total - done):.0f} s left" if total and done else ""
        sys.stderr.write(f"\r{text} {done}{f'/{total}' if total else ''}{left}\x1b[K")
        sys.stderr.flush()

    try:
        advance()
        yield advance
    finally:
        sys.stderr.write("\r\x1b[K")
