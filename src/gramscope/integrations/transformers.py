"""A callback of Hugging Face's ``Trainer`` that measures the layers of a model, and whitened optimizers for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.instruments.history import Records
from gramscope.integrations.extras import load_extra
from gramscope.integrations.watch import Watch
from gramscope.layers.losses import Loss
from gramscope.optim.whitening import GramWhitened

TrainerCallback: Any = load_extra("transformers", "transformers", "transformers", "4.48").TrainerCallback
#: the file beside a checkpoint's others that keeps the records
FILE = "gramscope.pt"
#: samples that pass through the model at a time
BATCH = 32


class GramscopeCallback(TrainerCallback):  # type: ignore[misc]
    """Measures every layer during training and logs one number for each measure and layer.

        trainer = Trainer(model, arguments, train_dataset=…, callbacks=[GramscopeCallback(held_out, every_n_steps=100)])

    The numbers are called ``gramscope/MEASURE/LAYER`` and stand in ``trainer.state.log_history``. To have them sent to
    everything in ``report_to`` as well, add the callback to the finished trainer:
    ``trainer.add_callback(GramscopeCallback(held_out, trainer=trainer))``. Checkpoints keep the records, and a resumed run goes
    on with them. Process 0 measures.

    Args:
        data: held-out samples: a data set or a list, whose rows the trainer's own collator joins; a loader; or one batch, a
            dict. ``None`` takes the training set. The first ``samples`` samples are held.
        loss: as for :func:`gramscope.measure`; ``None`` takes the model's own.
        samples: how many samples to hold.
        trainer: the trainer, to log through it.
        options: ``every_n_steps``, ``every_n_epochs`` and ``log`` of :class:`~gramscope.integrations.watch.Watch`, and further
            options of :class:`gramscope.Monitor` (``measures``, ``layers``, ``tokens``, …).

    Attributes:
        records: all records so far, in process 0.
    """

    def __init__(
        self,
        data: Any = None,
        loss: Loss | None = None,
        *,
        samples: int = 256,
        trainer: Any = None,
        **options: Any,
    ) -> None:
        self._watch = Watch(data, loss, **{"samples": samples, "process_group": False, **options})
        self._samples, self._trainer = samples, trainer

    @property
    def records(self) -> Records:
        """All records so far."""
        return self._watch.records

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure before the first step, or go on with the records of a checkpoint."""
        self._watch.skip_to(round(state.epoch or 0) if self._watch.by_epochs else state.global_step)
        if not state.is_world_process_zero:
            return
        self._watch.monitor = None
        saved = self._folder(args, state) / FILE
        if state.global_step and saved.is_file():
            self._watch.load_state_dict(torch.load(saved, weights_only=True))
        data = _collated(self._watch.data, parts["train_dataloader"], self._samples)
        self._report(state, self._watch.begin(parts["model"], data, state.global_step))

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure if the step calls for it."""
        if not self._watch.by_epochs and self._watch.due(state.global_step):
            self._record(state)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure if the epoch calls for it."""
        if self._watch.by_epochs and self._watch.due(round(state.epoch)):
            self._record(state)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the records in the checkpoint's folder."""
        folder = self._folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self._watch.state_dict(), folder / FILE)

    def _record(self, state: Any) -> None:
        if state.is_world_process_zero:
            self._report(state, self._watch.record(state.global_step))

    def _report(self, state: Any, values: dict[str, float]) -> None:
        if values and self._trainer is not None:
            self._trainer.log(values)
        elif values:
            state.log_history.append({**values, "epoch": state.epoch, "step": state.global_step})

    def _folder(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _collated(data: Any, loader: Any, samples: int) -> Any:
    """Data as batches; rows of a data set are joined as the training loader joins them, in order."""
    rows = loader.dataset if data is None else data
    if isinstance(rows, Mapping | tuple | DataLoader) or not (
        hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
    ):
        if data is None:
            raise InputError(f"the training set is a {type(rows).__name__}, which has no rows to hold; give data=")
        return data
    held: Any = [rows[i] for i in range(min(samples, len(rows)))]
    return DataLoader(held, batch_size=BATCH, collate_fn=loader.collate_fn, generator=torch.Generator())


class Whitened(GramWhitened):
    """:class:`gramscope.GramWhitened` as a trainer's ``optimizer_cls_and_kwargs`` wants it: made from parameters.

        Trainer(…, optimizer_cls_and_kwargs=(Whitened, {"inner": torch.optim.AdamW, "network": model, "lr": 1e-3}))

    :class:`gramscope.VCL` needs no such class: ``(gs.VCL, {"model": model, "gamma": 0.1})``.

    Args:
        params: the groups that the trainer makes, with and without weight decay.
        inner: the class of the wrapped optimizer.
        network: the model.
        options: of the wrapped optimizer.
    """

    def __init__(self, params: Any, *, inner: Callable[..., Optimizer], network: nn.Module, **options: Any) -> None:
        super().__init__(inner(params, **options), network)
