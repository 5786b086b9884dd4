"""Measures in a training loop of Hugging Face's Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn

from gramscope.instruments.log import scalars
from gramscope.instruments.measure import measure
from gramscope.instruments.monitor import DEFAULT
from gramscope.integrations.extras import load_extra
from gramscope.layers.losses import Loss
from gramscope.measures.table import Table


def log_measures(
    accelerator: Any, model: nn.Module, data: Any, loss: Loss | None = None, *, step: int, **options: Any
) -> Table | None:
    """Measure a prepared model and log the numbers with ``accelerator.log``, as ``gramscope/MEASURE/LAYER``.

        if step % 100 == 0:
            log_measures(accelerator, model, held_out, step=step)

    The main process measures; the others return at once with ``None``.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        model: the model, prepared or not.
        data, loss: as for :func:`gramscope.measure`.
        step: the number of this step in the logs.
        options: further options of :func:`gramscope.measure`; ``measures`` are by default the cheap ones of
            :class:`gramscope.Monitor`.
    """
    load_extra("accelerate", "accelerate", "accelerate", "0.34")
    if not accelerator.is_main_process:
        return None
    options = {"measures": DEFAULT, "progress": False, "process_group": False, **options}
    table = measure(accelerator.unwrap_model(model), data, loss, **options)
    accelerator.log(scalars(table.to_dict()), step=step)
    return table
