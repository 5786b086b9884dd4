"""A callback of Lightning that measures the layers of a model during ``Trainer.fit``."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.instruments.history import Records
from gramscope.integrations.extras import load_extra
from gramscope.integrations.watch import Watch
from gramscope.layers.losses import Loss

Callback: Any = load_extra("lightning.pytorch", "lightning", "lightning", "2.3").Callback
#: strategies under which a process holds parts of weights, by their class
SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
#: arguments that tell the states of several callbacks apart in a checkpoint, in this order
KEY = ("every_n_steps", "every_n_epochs", "module", "measures", "layers")


class GramscopeCallback(Callback):  # type: ignore[misc]
    """Measures every layer during training and logs one number for each measure and layer.

        trainer = Trainer(callbacks=[GramscopeCallback((x, y), every_n_steps=100)])

    The numbers are called ``gramscope/MEASURE/LAYER``. All loggers of the trainer get them at the step of the record, whatever
    ``log_every_n_steps`` is; ``self.log`` hands them to other callbacks (``ModelCheckpoint(monitor=…)``). A checkpoint keeps
    the records, and a resumed run goes on with them. Under DDP process 0 measures held-out samples, and all processes get its
    numbers.

    Args:
        data: held-out samples: tensors or arrays ``(x, y)``, a loader or a data set. ``None`` measures the training batch that
            has just been used, under DDP those of all processes as one sample.
        loss: as for :func:`gramscope.measure`; without one, measures of gradients are left out.
        module: name of the part to measure, such as ``"net"``; by default the LightningModule itself, by its ``forward``.
        prog_bar: show the numbers in the progress bar.
        options: ``every_n_steps``, ``every_n_epochs`` and ``log`` of :class:`~gramscope.integrations.watch.Watch`, and further
            options of :class:`gramscope.Monitor` (``measures``, ``layers``, ``samples``, ``unpack``, …).

    Attributes:
        records: all records so far (under DDP with held-out samples, in process 0 alone).
    """

    def __init__(
        self,
        data: Any = None,
        loss: Loss | None = None,
        *,
        module: str | None = None,
        prog_bar: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._watch = Watch(data, loss, **options)
        self._module, self._prog_bar = module, prog_bar
        self._batch: Any = None
        given = {"module": module, **options}
        self._key = {name: repr(given.get(name)) for name in KEY}

    @property
    def records(self) -> Records:
        """All records so far."""
        return self._watch.records

    @property
    @override
    def state_key(self) -> str:
        """Tells the states of several such callbacks apart."""
        return str(self._generate_state_key(**self._key))

    @override
    def state_dict(self) -> dict[str, Any]:
        """The records, for a checkpoint."""
        return self._watch.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the records of a checkpoint."""
        self._watch.load_state_dict(state_dict)

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin anew, or go on with the records where the trainer goes on with its steps."""
        if stage == "fit":
            state = self._watch.state_dict() if trainer.global_step else {}
            self._watch.monitor = None
            self._watch.load_state_dict(state)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure the held-out samples before the first step."""
        strategy = type(trainer.strategy).__name__
        if strategy in SHARDED:
            raise InputError(
                f"under {strategy} a process has parts of the weights only, and a measurement needs whole ones; train with "
                "DDP, or measure checkpoints"
            )
        self._watch.writes = trainer.is_global_zero
        self._watch.skip_to(trainer.current_epoch if self._watch.by_epochs else trainer.global_step)
        if self._watch.data is not None:
            self._begin(trainer, pl_module, self._watch.data)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure the first training batch before the first step, where there are no held-out samples."""
        if self._watch.data is None and self._watch.monitor is None:
            self._begin(trainer, pl_module, batch)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure if the step calls for it."""
        self._batch = batch if self._watch.data is None else None
        if not self._watch.by_epochs and self._watch.due(trainer.global_step):
            self._record(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure if the epoch calls for it."""
        if self._watch.by_epochs and self._watch.due(trainer.current_epoch + 1):
            self._record(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Forget the last batch."""
        self._batch = None

    def _begin(self, trainer: Any, pl_module: Any, data: Any) -> None:
        if self._measures(trainer):
            data = trainer.precision_plugin.convert_input(data)
            values = self._watch.begin(self._part(pl_module), data, trainer.global_step)
            self._to_loggers(trainer, values)

    def _record(self, trainer: Any, pl_module: Any) -> None:
        values = self._watch.record(trainer.global_step, self._batch) if self._measures(trainer) else {}
        self._to_loggers(trainer, values)
        values = trainer.strategy.broadcast(values)
        # all processes have the same values; Lightning warns of each that is logged for an epoch and not averaged
        averaged = self._watch.by_epochs
        pl_module.log_dict(values, logger=False, prog_bar=self._prog_bar, rank_zero_only=False, sync_dist=averaged)

    def _measures(self, trainer: Any) -> bool:
        """Whether this process measures: all of them do where each has a part of the training batch."""
        return bool(trainer.is_global_zero) or self._watch.data is None

    def _to_loggers(self, trainer: Any, values: dict[str, float]) -> None:
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)
            logger.save()

    def _part(self, pl_module: Any) -> nn.Module:
        if self._module is None:
            if type(pl_module).forward.__qualname__ == "LightningModule.forward":
                parts = ", ".join(repr(name) for name, _ in pl_module.named_children())
                raise InputError(
                    f"{type(pl_module).__name__} has no forward of its own; name the part to measure with module=, "
                    f"one of {parts}"
                )
            return pl_module  # type: ignore[no-any-return]
        try:
            return pl_module.get_submodule(self._module)  # type: ignore[no-any-return]
        except AttributeError as error:
            raise InputError(f"module={self._module!r} is not a part of {type(pl_module).__name__}: {error}") from error
