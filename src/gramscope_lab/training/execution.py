"""Choose how several members run: stacked into one step, in processes, or one after another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gramscope.errors import InputError
from gramscope_lab.training.job import Job
from gramscope_lab.training.stacked_methods import method_obstacle
from gramscope_lab.training.stacked_rules import Stack
from gramscope_lab.training.stacking import stack_weights
from gramscope_lab.training.torch_settings import SMALL_STEP, operations_per_step

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
_RUNNING = (nn.modules.batchnorm._NormBase,)


def choose_execution(jobs: Sequence[Job], asked: str, *, portable: bool) -> tuple[str, str]:
    """How to run the members, and a sentence that says why.

    Args:
        jobs: the members.
        asked: ``auto`` or one of the ways.
        portable: whether other processes can build the members, because everything comes from their configuration.
    """
    if len(jobs) == 1 or asked == "one-by-one":
        return "one-by-one", ""
    if asked == "processes":
        if not portable:
            raise InputError("execution = 'processes': parts given as Python objects cannot be sent; use one-by-one")
        return "processes", f"{len(jobs)} runs in processes, as asked"
    if asked == "vectorised" and any(job.config.method.name == "vcl" for job in jobs):
        way, how = ("processes", "in processes") if portable else ("one-by-one", "one after another")
        return way, f"{len(jobs)} runs {how}, because VCL has no vectorised form"
    obstacle = stack_obstacle(jobs)
    if asked == "vectorised":
        if obstacle:
            raise InputError(f"execution = 'vectorised': {obstacle}; use auto, processes or one-by-one")
        return "vectorised", f"{len(jobs)} runs in one vectorised step"
    obstacle = obstacle or _does_not_pay(jobs)
    if not obstacle:
        return "vectorised", f"{len(jobs)} runs in one vectorised step"
    if portable and not _too_short(jobs):
        return "processes", f"{len(jobs)} runs in processes, because {obstacle}"
    return "one-by-one", f"{len(jobs)} runs one after another, because {obstacle}"


def stack_obstacle(jobs: Sequence[Job]) -> str:
    """Why the members cannot be stacked; empty if they can."""
    first = jobs[0]
    if first.config.measure.every and first.config.measure.matrices:
        return "measure.matrices follows the gradients of every step"
    if first.config.patience:
        return "each run may stop early on its own"
    if any(job.plan != first.plan or job.loss is not first.loss for job in jobs):
        return "their numbers of steps or losses differ"
    shapes = [[(p, x.shape, y.shape, x.dtype) for p, (x, y) in job.parts().items()] for job in jobs]
    if any(shape != shapes[0] for shape in shapes):
        return "their data sets differ in shape"
    for module in first.model.modules():
        if isinstance(module, _RANDOM) and getattr(module, "p", 1.0) != 0.0:
            return f"{type(module).__name__} draws random numbers"
        if isinstance(module, _RUNNING) and module.track_running_stats:
            return f"{type(module).__name__} keeps running statistics"
    return method_obstacle(jobs) or _net_obstacle(jobs)


@torch.no_grad()
def _net_obstacle(jobs: Sequence[Job]) -> str:
    """Try it: the stacked net must give each member's own output on a few samples."""
    models = [job.model for job in jobs]
    weights = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in weights]
    if any(shape != shapes[0] for shape in shapes):
        return "their nets differ in shape"
    template = copy.deepcopy(models[0])
    stack, _ = stack_weights(models, set(shapes[0]))
    x = torch.stack([job.data.x_train[:3] for job in jobs])

    def call(params: Stack, batch: Tensor) -> Any:
        return functional_call(template, params, (batch,))

    try:
        together = vmap(call)(stack, x)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if "random" in reason:
            reason = "it draws random numbers"
        return f"vmap cannot run {type(template).__name__} ({reason})"
    if not isinstance(together, Tensor):
        return f"{type(template).__name__} returns {type(together).__name__}, not a tensor"
    alone = torch.stack([model(batch) for model, batch in zip(models, x, strict=True)])
    scale = alone.abs().max().clamp(min=1e-30)
    if not bool((together - alone).abs().max() <= 1e-3 * scale):
        return "their nets differ in more than their weights"
    return ""


def _does_not_pay(jobs: Sequence[Job]) -> str:
    """Why a stacked step would be slower than separate ones; empty if it would not.

    On a CPU a step of a small net is mostly overhead, which a stack pays once for all runs; a large one is mostly
    memory traffic, which a stack makes no smaller.
    """
    if jobs[0].device.type == "cuda" or max(map(operations_per_step, jobs)) <= SMALL_STEP:
        return ""
    return (
        f"on a CPU a stacked step of nets this large is slower ({operations_per_step(jobs[0]) / 1e6:.0f} Mflop a step)"
    )


def _too_short(jobs: Sequence[Job]) -> bool:
    """Whether all runs one after another take less time than starting processes would."""
    seconds = sum(job.plan.steps * (5e-4 + operations_per_step(job) / 1e10) for job in jobs)
    return jobs[0].device.type == "cpu" and seconds < 20.0
