"""MLflow as the ``log=`` of a monitor."""

from __future__ import annotations

import re
from typing import Any

from gramscope.instruments.log import scalars
from gramscope.integrations.extras import load_extra

#: metrics that MLflow takes at a time
MOST = 1000


class MlflowLog:
    """Writes every record of a monitor to a run of MLflow, one metric ``gramscope/MEASURE/LAYER`` for each measure and layer.

    MLflow allows letters, digits and ``_-. :/`` in names; anything else becomes ``_``.

        with mlflow.start_run():
            monitor = gs.Monitor(model, (x, y), loss, log=MlflowLog())

    Args:
        run_id: of the run; by default the active one, which MLflow starts if there is none.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = load_extra("mlflow", "mlflow-skinny", "mlflow", "2.12")
        self.run_id = run_id

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        values = [(re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII), value) for name, value in scalars(record).items()]
        for start in range(0, len(values), MOST):
            self._mlflow.log_metrics(dict(values[start : start + MOST]), step=step, run_id=self.run_id)
