"""A plot in a notebook that redraws itself while a net is trained."""

from __future__ import annotations

from typing import Any

from gramscope.instruments.history import Records
from gramscope.integrations.extras import load_extra


class LivePlot:
    """The ``log=`` of a monitor in a notebook: shows curves and the last table, and draws them anew with every record.

        monitor = gs.Monitor(model, (x, y), loss, log=LivePlot())

    A monitor itself is shown by naming it in the last line of a cell; that needs nothing from this module.
    """

    def __init__(self) -> None:
        self._display = load_extra("IPython.display", "ipython", "notebook", "8.20")
        self._handle: Any = None
        self.records = Records()

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Add a record and draw."""
        self.records.append(record)
        picture = self._display.HTML(self.records._repr_html_())
        if self._handle is None:
            self._handle = self._display.display(picture, display_id=True)
        else:
            self._handle.update(picture)
