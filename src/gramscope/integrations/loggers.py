"""Weights & Biases, MLflow and a notebook as the ``log=`` of a monitor."""

from __future__ import annotations

import re
from typing import Any

from gramscope.errors import InputError, load_extra
from gramscope.instruments.log import scalars
from gramscope.measures.series import Series

#: metrics that MLflow takes at a time
MOST = 1000


class WandbLog:
    """Writes every record of a monitor to a run of Weights & Biases, one number for each measure and layer.

    The names are ``gramscope/MEASURE/LAYER``. Their horizontal axis is ``gramscope/step``, the monitor's step. A record joins
    the row of the run's history that is open, and the run's own count of steps stays as the rest of the program has it.

        wandb.init(mode="offline")
        monitor = gs.Monitor(model, (x, y), loss, log=WandbLog())

    Args:
        run: what ``wandb.init`` returned; by default the run that is active.
    """

    def __init__(self, run: Any = None) -> None:
        self._wandb = load_extra("wandb", "wandb")
        self.run = self._wandb.run if run is None else run
        if self.run is None:
            raise InputError("there is no active run: call wandb.init(…) first, or give its result as run=")
        self._row: int | None = None  # of the last record
        self.run.define_metric("gramscope/step", hidden=True)
        self.run.define_metric("gramscope/*", step_metric="gramscope/step")

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        if self._row == self.run.step:  # the row with the last record is still open
            self.run.log({}, commit=True)
        self._row = self.run.step
        self.run.log({"gramscope/step": step, **scalars(record)}, commit=False)


class MlflowLog:
    """Writes every record of a monitor to a run of MLflow, one metric ``gramscope/MEASURE/LAYER`` for each measure and layer.

    MLflow allows letters, digits and ``_-. :/`` in names; anything else becomes ``_``.

        with mlflow.start_run():
            monitor = gs.Monitor(model, (x, y), loss, log=MlflowLog())

    Args:
        run_id: of the run; by default the active one, which MLflow starts if there is none.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = load_extra("mlflow", "mlflow")
        self.run_id = run_id

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        values = [(re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII), value) for name, value in scalars(record).items()]
        for start in range(0, len(values), MOST):
            self._mlflow.log_metrics(dict(values[start : start + MOST]), step=step, run_id=self.run_id)


class LivePlot:
    """Shows curves and the last table of a monitor in a notebook, and draws them anew with every record.

        monitor = gs.Monitor(model, (x, y), loss, log=LivePlot())

    A monitor itself is shown by naming it in the last line of a cell; that needs nothing from this module.
    """

    def __init__(self) -> None:
        self._display = load_extra("IPython.display", "notebook")
        self._handle: Any = None
        self.records: list[dict[str, Any]] = []

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Add a record and draw."""
        self.records.append(record)
        picture = self._display.HTML(Series.from_records(self.records)._repr_html_())
        if self._handle is None:
            self._handle = self._display.display(picture, display_id=True)
        else:
            self._handle.update(picture)
