"""A callback of Lightning that measures the layers of a model during ``Trainer.fit``."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from gramscope.errors import InputError, load_extra, no_such
from gramscope.instruments.log import Log
from gramscope.integrations.watch import Every, Watch
from gramscope.layers.losses import Loss

Callback: Any = load_extra("lightning.pytorch", "lightning").Callback
#: strategies under which a process holds pieces of weights, by their class
SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class GramscopeCallback(Watch, Callback):  # type: ignore[misc]
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
        module: name of the module to measure, such as ``"net"``; by default the LightningModule itself, by its ``forward``.
        prog_bar: show the numbers in the progress bar.
        every_n_steps, every_n_epochs, log: as for :class:`~gramscope.integrations.watch.Watch`.
        options: further arguments of :class:`gramscope.Monitor` (``measures``, ``layers``, ``samples``, …).

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
        every_n_steps: Every = None,
        every_n_epochs: Every = None,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, loss, every_n_steps, every_n_epochs, log, options)
        self._module, self._prog_bar = module, prog_bar
        self._batch: Any = None
        self._key = repr((every_n_steps, every_n_epochs, module, options.get("measures"), options.get("layers")))

    @property
    @override
    def state_key(self) -> str:
        """Tells the states of several such callbacks apart."""
        return str(self._generate_state_key(of=self._key))

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin anew, or go on with the records where the trainer goes on with its steps."""
        if stage == "fit":
            state = self.state_dict() if trainer.global_step else {}
            self.monitor = None
            self.load_state_dict(state)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure the held-out samples before the first step."""
        strategy = type(trainer.strategy).__name__
        if strategy in SHARDED:
            raise InputError(
                f"under {strategy} a process has pieces of the weights only, and a measurement needs whole ones; train with "
                "DDP, or measure checkpoints"
            )
        self.writes = trainer.is_global_zero
        self.skip_to(trainer.current_epoch if self.by_epochs else trainer.global_step)
        if self.data is not None:
            self._begin(trainer, pl_module, self.data)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure the first training batch before the first step, where there are no held-out samples."""
        if self.data is None and self.monitor is None:
            self._begin(trainer, pl_module, batch)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure if the step calls for it."""
        self._batch = batch if self.data is None else None
        if not self.by_epochs and self.due(trainer.global_step):
            self._record(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure if the epoch calls for it."""
        if self.by_epochs and self.due(trainer.current_epoch + 1):
            self._record(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Forget the last batch."""
        self._batch = None

    def _begin(self, trainer: Any, pl_module: Any, data: Any) -> None:
        if self._measures(trainer):
            data = trainer.precision_plugin.convert_input(data)
            self._to_loggers(trainer, self.begin(self._measured(pl_module), data, trainer.global_step))

    def _record(self, trainer: Any, pl_module: Any) -> None:
        values = self.record(trainer.global_step, self._batch) if self._measures(trainer) else {}
        self._to_loggers(trainer, values)
        values = trainer.strategy.broadcast(values)
        # all processes have the same values; Lightning warns of each that is logged for an epoch and not averaged
        averaged = self.by_epochs
        pl_module.log_dict(values, logger=False, prog_bar=self._prog_bar, rank_zero_only=False, sync_dist=averaged)

    def _measures(self, trainer: Any) -> bool:
        """Whether this process measures: all of them do where each has its own training batch."""
        return bool(trainer.is_global_zero) or self.data is None

    def _to_loggers(self, trainer: Any, values: dict[str, float]) -> None:
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)
            logger.save()

    def _measured(self, pl_module: Any) -> nn.Module:
        modules = dict(pl_module.named_modules())
        if self._module is not None:
            if self._module not in modules:
                raise InputError(f"module: {no_such('module', self._module, list(modules)[1:])}")
            return modules[self._module]  # type: ignore[no-any-return]
        if type(pl_module).forward.__qualname__ == "LightningModule.forward":
            names = ", ".join(repr(name) for name, _ in pl_module.named_children())
            raise InputError(
                f"{type(pl_module).__name__} has no forward of its own; name the module to measure with module=, one of {names}"
            )
        return pl_module  # type: ignore[no-any-return]
