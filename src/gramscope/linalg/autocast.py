"""Computing in the precision of the tensors, also inside an autocast region."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations on ``device`` keep the dtype of their inputs; nothing where that is so anyway."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
