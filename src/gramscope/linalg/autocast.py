"""Computing in the precision of the tensors, also inside an autocast region."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations on ``device`` keep the dtype of their inputs; it does nothing where autocast is off."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
