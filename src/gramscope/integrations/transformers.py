"""A callback of Hugging Face's ``Trainer`` that measures the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from gramscope.errors import InputError, load_extra
from gramscope.instruments.log import Log
from gramscope.integrations.watch import Every, Watch
from gramscope.layers.losses import Loss

TrainerCallback: Any = load_extra("transformers", "transformers").TrainerCallback
#: the file beside a checkpoint's others that keeps the records
FILE = "gramscope.pt"
#: samples that are held
SAMPLES = 256
#: samples that pass through the model at a time
BATCH = 32


class GramscopeCallback(Watch, TrainerCallback):  # type: ignore[misc]
    """Measures every layer during training and logs one number for each measure and layer.

        trainer = Trainer(model, arguments, train_dataset=…, callbacks=[GramscopeCallback(held_out, every_n_steps=100)])

    The numbers are called ``gramscope/MEASURE/LAYER`` and stand in ``trainer.state.log_history``. To have them sent to
    everything in ``report_to`` as well, add the callback to the finished trainer:
    ``trainer.add_callback(GramscopeCallback(held_out, trainer=trainer))``. Checkpoints keep the records, and a resumed run goes
    on with them. Process 0 measures.

    Args:
        data: held-out samples: a data set or a list, whose rows the trainer's own collator joins; a loader; or one batch, a
            dict. ``None`` takes the training set. The first ``samples`` samples are held,
            by default 256.
        loss: as for :func:`gramscope.measure`; ``None`` takes the model's own.
        trainer: the trainer, to log through it.
        every_n_steps, every_n_epochs, log: as for :class:`~gramscope.integrations.watch.Watch`.
        options: further arguments of :class:`gramscope.Monitor` (``measures``, ``layers``, ``tokens``, …).

    Attributes:
        records: all records so far, in process 0.
    """

    def __init__(
        self,
        data: Any = None,
        loss: Loss | None = None,
        *,
        trainer: Any = None,
        every_n_steps: Every = None,
        every_n_epochs: Every = None,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        given = {"process_group": False, "samples": SAMPLES, **options}
        super().__init__(data, loss, every_n_steps, every_n_epochs, log, given)
        self._samples, self._trainer = given["samples"], trainer

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure before the first step, or go on with the records of a checkpoint."""
        self.skip_to(round(state.epoch or 0) if self.by_epochs else state.global_step)
        if not state.is_world_process_zero:
            return
        self.monitor = None
        saved = self._folder(args, state) / FILE
        if state.global_step and saved.is_file():
            self.load_state_dict(torch.load(saved, weights_only=True))
        data = _collated(self.data, given["train_dataloader"], self._samples)
        self._report(state, self.begin(given["model"], data, state.global_step))

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure if the step calls for it."""
        if not self.by_epochs and self.due(state.global_step):
            self._record(state)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure if the epoch calls for it."""
        if self.by_epochs and self.due(round(state.epoch)):
            self._record(state)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save the records in the checkpoint's folder."""
        folder = self._folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.state_dict(), folder / FILE)

    def _record(self, state: Any) -> None:
        if state.is_world_process_zero:
            self._report(state, self.record(state.global_step))

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
    return DataLoader(held, batch_size=BATCH, collate_fn=loader.collate_fn, generator=torch.Generator(device="cpu"))
