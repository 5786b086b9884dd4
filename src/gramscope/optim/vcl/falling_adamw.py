"""AdamW whose rate falls by itself, beside VCL's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.optim.vcl.averaged import falling


class FallingAdamW(AdamW):
    """AdamW with the rate ``lr·min(1, (25/9)/√n)`` at step n; ``lr`` is what schedulers change. There is no weight decay.

    Args:
        params: as for AdamW.
        lr: rate of the first steps.

    Raises:
        InputError: a parameter is float16.
    """

    def __init__(self, params: ParamsT, lr: float = 0.02) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        if any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"]):
            raise InputError(
                "AdamW gives NaN with float16 weights, as squares of gradients become zero there: keep the weights in float32 "
                "and compute in float16 with torch.autocast, use bfloat16, or give readout="
            )

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = group["lr"] * falling(group["taken"])
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
