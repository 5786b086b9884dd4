"""Weights & Biases as the ``log=`` of a monitor."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gramscope.errors import InputError
from gramscope.instruments.log import scalars
from gramscope.integrations.extras import load_extra


class WandbLog:
    """Writes every record of a monitor to a run of Weights & Biases, one number for each measure and layer.

    The names are ``gramscope/MEASURE/LAYER``. Their horizontal axis is ``gramscope/step``, the monitor's step. A record joins
    the row of the run's history that is open, and the run's own count of steps stays as the rest of the program has it.

        wandb.init(mode="offline")
        monitor = gs.Monitor(model, (x, y), loss, log=WandbLog())

    Args:
        run: what ``wandb.init`` returned; by default the run that is active.
        pictures: also write histograms of singular values and, where inputs are images, the diagonals of WᵀW (and of the AGOP)
            as images, as to TensorBoard.
    """

    def __init__(self, run: Any = None, pictures: bool = False) -> None:
        self._wandb = load_extra("wandb", "wandb", "wandb", "0.17")
        self.run = self._wandb.run if run is None else run
        if self.run is None:
            raise InputError("there is no active run: call wandb.init(…) first, or give its result as run=")
        self._row: int | None = None  # of the last record
        self.run.define_metric("gramscope/step", hidden=True)
        self.run.define_metric("gramscope/*", step_metric="gramscope/step")
        if pictures:  # a monitor draws pictures for logs that have these functions
            self.add_histogram, self.add_image = self._add_histogram, self._add_image

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        if self._row == self.run.step:  # the row with the last record is still open
            self.run.log({}, commit=True)
        self._row = self.run.step
        self.run.log({"gramscope/step": step, **scalars(record)}, commit=False)

    def _add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        self.run.log({tag: self._wandb.Histogram(values.numpy())}, commit=False)

    def _add_image(self, tag: str, img_tensor: Tensor, global_step: int) -> None:
        pixels = (255 * img_tensor.permute(1, 2, 0).double().numpy()).round().astype(np.uint8)
        image = self._wandb.Image(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        self.run.log({tag: image}, commit=False)
