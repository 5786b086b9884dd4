"""Continue a VCL run from a checkpoint of vectorised VCL runs, which versions up to 0.1 could write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gramscope.errors import InputError
from gramscope_lab.training.job import Job
from gramscope_lab.training.methods import Method, VCLMethod

#: state of a stacked readout rule → its name in ``torch.optim``
_READOUT = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}


def load_stacked_vcl(method: Method, job: Job, rules: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizers of one run the state that it had in a stack.

    Args:
        method: the run's optimizers.
        job: the run; its net holds the weights of the checkpoint.
        rules: the state of VCL, ``{"done", "units": one per matrix, "later": [readout]}``, and that of the readout of the
            warmed-up layer. ``later`` is the readout of the parameters that the warm-up leaves alone.

    Raises:
        InputError: the run is not trained by VCL.
    """
    if not isinstance(method, VCLMethod):
        raise InputError(f"the checkpoint of {job.name} was written by vectorised runs; resume it with them")
    vcl = method.vcl
    job.loss(job.model(job.data.x_train[:2]), job.data.y_train[:2]).sum().backward()  # type: ignore[no-untyped-call]
    vcl.warm_up_parameters()  # this pass has shown which layer runs last, so that the units are those of the stack
    vcl.zero_grad()
    first, *others = rules
    for unit, stored in zip(vcl.units, first["units"], strict=True):
        state = {name: tensor.to(job.device) for name, tensor in stored["matrices"].items()}
        if not state:
            continue
        if unit.solver == "recursive":
            state |= {key: stored[key] for key in ("steps", "since", "wait")}
        if stored["momentum"] is not None:
            state["momentum"] = stored["momentum"].to(job.device)
        vcl.state[unit.weight.parameter] = state
    parameters = dict(job.model.named_parameters())
    for rule in (*first["later"], *others):
        for key, torch_key in _READOUT.items():
            for name, tensor in rule.get(key, {}).items():
                state = vcl.state[parameters[name]]
                state[torch_key] = tensor.to(job.device)
                if "step" in rule:
                    state["step"] = torch.tensor(float(rule["step"][""]))
    method.done = first["done"]
