"""Measure the layers of nets: while they train, from run directories, or of the user's own net."""

from __future__ import annotations

import copy
import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, ResultWarning
from gramscope.instruments.measure import given_by, measure
from gramscope.instruments.monitor import DEFAULT as MONITORED
from gramscope.instruments.monitor import Monitor
from gramscope.instruments.series import series
from gramscope.layers.capture import capture
from gramscope.layers.tape import Tape
from gramscope.linalg.gram import shift_factor
from gramscope.measures.columns import columns_of
from gramscope.measures.series import Series
from gramscope.measures.table import Table
from gramscope.statistics.collect import collect
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.runs.checkpoints import read_tensors
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import DataTable, MeasureTable, ModelTable, TrainConfig
from gramscope_lab.training.job import (
    Job,
    build_model,
    check_fit,
    load_data,
    load_state,
    loss_and_data,
    prepare,
    probe,
    resolve_device,
)
from gramscope_lab.training.sample_losses import SampleLoss, joined_loss, measured_output

Batches = list[tuple[Tensor, Tensor]]

#: measured while training unless the configuration names others
WHILE_TRAINING = (*MONITORED, "target_linearity_null", "nfa", "nfa_null", "weight_change")


def measure_net(
    model: nn.Module, batches: Batches, loss: SampleLoss, table: MeasureTable, reference: nn.Module | None = None
) -> Table:
    """:func:`gramscope.measure` with the settings of a configuration; the reference is given to measures that read it."""
    return measure(model, batches, joined_loss(model, loss), **_settings(model, loss, table, reference))


def _settings(model: nn.Module, loss: SampleLoss, table: MeasureTable, reference: nn.Module | None) -> dict[str, Any]:
    """Arguments of :func:`gramscope.measure`."""
    columns = columns_of(_chosen(table), given_by(model, loss) | {"reference"})
    return {
        "measures": _chosen(table),
        "layers": table.layers or None,
        "reference": reference if any("reference" in column.needs for column in columns) else None,
        "output": measured_output(model),
    }


def _chosen(table: MeasureTable) -> tuple[str, ...] | str | None:
    """The measures a configuration names; ``None`` for the usual ones."""
    return "all" if table.names == ("all",) else table.names or None


class LayerMeasures:
    """Measures every layer of the members of a run while they train: one :class:`~gramscope.Monitor` a member."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._initial = {job.name: copy.deepcopy(job.model) for job in jobs}
        self._monitors: dict[str, Monitor] = {}

    def __call__(self, model: nn.Module, job: Job, step: int) -> Iterator[Mapping[str, Any]]:
        """One record a layer."""
        monitor = self._monitors.get(job.name)
        if monitor is None:  # its creation makes the first record
            try:
                monitor = self._monitors[job.name] = self._monitor(model, job)
            except LayerError as error:
                if job.config.measure != MeasureTable():  # more than the defaults is asked for
                    raise
                if step == 0:
                    warnings.warn(f"layers are not measured: {error}", ResultWarning, stacklevel=2)
                return
        else:
            monitor.step_count = step
            monitor.record()
        for layer, row in monitor.records[-1]["layers"].items():
            yield {"layer": layer, **row}

    def _monitor(self, model: nn.Module, job: Job) -> Monitor:
        table = job.config.measure
        return Monitor(
            model,
            probe(job.data.x_train, job.data.y_train, table.samples, table.batch_size),
            joined_loss(model, job.loss),
            measures=_chosen(table) or WHILE_TRAINING,
            layers=table.layers or None,
            samples=table.samples,
            reference=self._initial[job.name],
            output=measured_output(model),
        )


# -- nets on disk -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """The table of one net: a checkpoint of a run, or the user's own."""

    name: str
    step: int | None
    epoch: float | None
    table: Table

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"run": self.name, "step": self.step, "epoch": self.epoch, **self.table.to_dict()}


def measure_runs(
    path: Path | str,
    table: MeasureTable,
    *,
    part: str = "train",
    every: bool = False,
    device: str = "auto",
    trust: bool = False,
) -> Iterator[Measured]:
    """Measure what is in a run directory: each member's newest checkpoint, or with ``every`` all of them in order.

    The report shows what was measured on training samples.

    Args:
        path: a run, a group of runs, or one checkpoint folder.
        table: how to measure.
        part: on which samples: ``train``, ``validation`` or ``test``.
        every: all checkpoints instead of the newest.
        device: where to compute.
        trust: let the stored configuration name a function ``package.module:function`` as the net.
    """
    root, only = RunDirectory.locate(path)
    for run in root.runs():
        job, batches, initial = _opened(run, table, part, device, trust)
        steps: list[int | None] = [*run.checkpoint_steps()] if every and only is None else [only]
        records: list[dict[str, Any]] = []
        for step in steps:
            checkpoint = run.load_checkpoint(step)  # without a step the newest
            load_state(job.model, checkpoint.model, run.path)
            found = measure_net(job.model, batches, job.loss, table, initial)
            name = run.path.relative_to(root.path).as_posix() if run.path != root.path else run.name
            head = job.head("measurement", checkpoint.step)
            records += [{**head, "layer": layer, **row} for layer, row in found.to_dict()["layers"].items()]
            yield Measured(name, checkpoint.step, checkpoint.step / job.plan.steps_per_epoch, found)
        if part == "train":  # as while training: the report shows both
            try:
                run.save_measured(records)
            except OSError as error:
                warnings.warn(f"the report will not show this: {error}", ResultWarning, stacklevel=2)


def run_series(
    path: Path | str, table: MeasureTable, *, device: str = "auto", trust: bool = False, **options: Any
) -> Series:
    """:func:`gramscope.series` of all checkpoints of one run, on its training samples; ``options`` are that function's."""
    runs = list(RunDirectory.locate(path)[0].runs())
    if len(runs) != 1:
        raise InputError(f"{path} holds {len(runs)} runs; give one of them, such as {runs[0].path}")
    job, batches, initial = _opened(runs[0], table, "train", device, trust)
    paths = [(step, runs[0].checkpoint_path(step)) for step in runs[0].checkpoint_steps()]
    settings, loss = _settings(job.model, job.loss, table, initial), joined_loss(job.model, job.loss)
    return series(paths, batches, loss, model=job.model, measuring=settings, **options)


def _opened(
    run: RunDirectory, table: MeasureTable, part: str, device: str, trust: bool
) -> tuple[Job, Batches, nn.Module]:
    """The net of a run with its data and loss, the samples to measure, and a copy of the untrained net."""
    if run.status() == "recorded":
        raise InputError(
            f"{run.path} was written by your own training loop, so its net and data are not known here: call gs.measure in "
            f"Python; `gramscope report {run.path}` shows what was recorded"
        )
    config = TrainConfig.from_dict({**run.config, "device": device})
    if not trust:
        config.check_trusted(run.path)
    if not run.checkpoint_steps():
        raise InputError(f"{run.path} has no checkpoint yet")
    job = prepare(config)
    return job, probe(*choose_part(job.data, part), table.samples, table.batch_size), copy.deepcopy(job.model)


def measure_own(
    model: ModelTable,
    weights: Path | None,
    data: DataTable,
    table: MeasureTable,
    *,
    loss: str = "auto",
    part: str = "train",
    device: str = "auto",
) -> Measured:
    """Measure the user's net: a factory (or one of our nets by name) with weights from a file."""
    place = resolve_device(device)
    loaded = load_data(data).to(place)
    net = build_model(model, 0, loaded.input_shape, loaded.outputs)
    if weights is not None:
        load_weights(net, weights)
    net.to(place)
    chosen: SampleLoss
    if loaded.labels_tokens:
        if loss not in ("auto", "cross-entropy"):
            raise InputError(f"loss = {loss!r}: labels of tokens go with cross-entropy")
        chosen = nn.CrossEntropyLoss()
    else:
        chosen, loaded = loss_and_data(loss, net, loaded)
        check_fit(net, loaded, chosen, configured=True)
    batches = probe(*choose_part(loaded, part), table.samples, table.batch_size)
    found = measure_net(net, batches, chosen, table)
    return Measured(model.name, None, None, found)


def choose_part(data: DataSet, part: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one part of a data set."""
    parts = {"train": (data.x_train, data.y_train), "test": (data.x_test, data.y_test)}
    if data.x_val is not None and data.y_val is not None:
        parts["validation"] = (data.x_val, data.y_val)
    if part not in parts:
        raise InputError(f"part = {part!r}: choose one of {', '.join(parts)}")
    return parts[part]


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from ``.safetensors``, or from ``.pt``/``.pth`` read as weights only (no code is run)."""
    if not path.is_file():
        raise InputError(f"{path} is not a file; give weights as .safetensors or .pt")
    state = read_tensors(path) if path.suffix == ".safetensors" else _read_torch_file(path)
    load_state(model, state, path)


def _read_torch_file(path: Path) -> Any:
    packed: list[str] = []
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        state = None if packed else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file torch raises almost anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path} cannot be read as weights only, and nothing else is read: {reason}") from error
    if packed:  # a small file could fill the memory
        raise InputError(f"{path} has compressed entries ({packed[0]}), which torch.save never writes; save it again")
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            return state[key]
    return state


# -- matrices for the report ----------------------------------------------------------------------------------------------
class ShiftWatcher:
    """Sums the diagonal of the virtual covariance shift ``v = WᵀM + MᵀW`` of every layer over all training steps.

    ``M = −γD + ½γ²ΣW`` with the step's own γ on the summed loss, so that for plain gradient descent the sum follows
    ``diag(WᵀW − W₀ᵀW₀)`` ([VCL] Fig. 1). For VCL γ is its own; for other optimizers it is their learning rate.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._model = model
        self._reduction = config.reduction
        self._virtual = config.method.name == "vcl"
        options = config.method.options
        self._rate = float(options["gamma"] if self._virtual else options.get("lr", 1.0))
        self.diagonals: dict[str, Tensor] = {}

    @contextmanager
    def step(self, batch_size: int, factor: float) -> Iterator[None]:
        """Watch the forward and backward pass of one step, run inside."""
        with capture(self._model, reduction=self._reduction) as tape:
            yield
            per_sample = 1.0 if self._virtual or self._reduction == "sum" else 1.0 / batch_size
            self._add(tape, self._rate * factor * per_sample)

    @torch.no_grad()
    def _add(self, tape: Tape, gamma: float) -> None:
        for record in tape:
            D = record.D
            W = record.weight.to(D.dtype)
            shift = 2 * (W * shift_factor(W, D, record.Sigma, gamma)).sum(-2).double()
            self.diagonals[record.name] = self.diagonals.get(record.name, 0.0) + shift

    def load(self, diagonals: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from stored sums."""
        self.diagonals = {name: tensor.to(device) for name, tensor in diagonals.items()}


def layer_matrices(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    shifts: Mapping[str, Tensor],
    layers: str | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """For the report: spectra of all layers; diagonals ``nfm`` (WᵀW), ``agop`` (WᵀKW) and ``vcs`` (``shifts``), in the shape of
    the image, of the one that sees images."""
    statistics = collect(model, batches, layers=layers, features=False, jacobians=True, output=measured_output(model))
    image = tuple(batches[0][0].shape[1:])
    shape = image[1:] if len(image) == 3 and image[0] == 1 else image
    spectra, diagonals = {}, {}
    first = next(iter(statistics)).name  # in order of execution: the one that sees the input
    for layer in statistics:
        W = layer.weight.double()
        spectra[layer.name] = torch.linalg.svdvals(W).flatten().sort(descending=True).values.float()
        if layer.name != first or W.dim() != 2 or len(image) not in (2, 3) or W.shape[-1] != math.prod(image):
            continue
        found = {"nfm": W.square().sum(-2), "agop": (W * (layer.K.double() @ W)).sum(-2)}
        if layer.name in shifts:
            found["vcs"] = shifts[layer.name]
        diagonals[layer.name] = {name: diagonal.float().reshape(shape) for name, diagonal in found.items()}
    return spectra, diagonals
