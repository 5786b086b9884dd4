"""Many runs in one step: parameters stacked along a leading axis, gradients by ``vmap(grad(...))``, optimizers of torch.

Each member keeps its own initial weights, data order and hyper-parameters, so a stack gives what its members give one by one,
to float tolerance. A member's net holds views of the stacks. SGD, Adam and AdamW work number by number, so that one optimizer
trains all members with the same options at once, and whitening corrects its steps. Other methods train one run after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from typing_extensions import override

from gramscope.layers.model_call import evaluating
from gramscope.optim.choose_matrices import choose_matrices
from gramscope.optim.procrustes import nearest_with_gram
from gramscope_lab.training.job import Job
from gramscope_lab.training.method_options import split_wrapper
from gramscope_lab.training.methods import Method, torch_optimizer
from gramscope_lab.training.sample_losses import correct
from gramscope_lab.training.trainer import Engine

Stack: TypeAlias = dict[str, Tensor]

#: methods that treat every number alone
_BY_NUMBER = ("sgd", "adam", "adamw")


class StackedEngine(Engine):
    """Several members of one architecture, one vectorised backward pass for all of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._loss = jobs[0].loss
        self._template = copy.deepcopy(jobs[0].model).train()
        self._params, self._buffers = _stack_weights([job.model for job in jobs])
        sets = [(job.data.x_train, job.data.y_train) for job in jobs]
        self._shared = _same(sets)
        kept, which = (sets, range(len(jobs))) if self.full_batch else _distinct(sets)
        self._x, self._y = sets[0] if self._shared else (torch.stack(tensors) for tensors in zip(*kept, strict=True))
        self._which = torch.tensor(which, device=jobs[0].device).unsqueeze(1)
        self._groups = self._make_groups()
        self.notes = self._groups[0].method.notes
        data_axis = None if self.full_batch and self._shared else 0
        self._gradients = vmap(grad_and_value(self._batch_loss), in_dims=(0, 0, data_axis, data_axis))

    def _make_groups(self) -> list[_Group]:
        """Consecutive members with the same options together."""
        groups, start = [], 0
        for table, members in groupby(self.jobs, lambda job: job.config.method):
            jobs = list(members)
            stop = start + len(jobs)
            kind, base = split_wrapper(table.name)
            tensors = {name: stack[start:stop] for name, stack in self._params.items()}
            method = Method([torch_optimizer(base, tensors.values(), table.options)])
            after = _Whitening(jobs[0].model, tensors, table.options, kind) if kind else None
            groups.append(_Group(slice(start, stop), tensors, method, after))
            start = stop
        return groups

    # -- the step -------------------------------------------------------------------------------------------------
    def _batch_loss(self, params: Stack, buffers: Stack, x: Tensor, y: Tensor) -> Tensor:
        """A member's loss."""
        losses = self._loss(functional_call(self._template, (params, buffers), (x,)), y)
        return losses.mean() if self._mean else losses.sum()

    def _gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The members' batches ``[runs, batch, …]`` for indices ``[runs, batch]``."""
        if self.full_batch:
            return self._x, self._y
        if self._shared:
            return self._x[index], self._y[index]
        return self._x[self._which, index], self._y[self._which, index]

    @override
    def advance(self, step: int) -> None:
        """Take one step with every member."""
        x, y = self._gather(self.indices(step))
        grads, losses = self._gradients(self._params, self._buffers, x, y)
        samples = y.shape[0 if self.full_batch and self._shared else 1]
        self._loss_sum += losses if self._mean else losses / samples
        factor = self.plan.factor(step)
        for group in self._groups:
            group.step(grads, factor)
        self._loss_count += 1

    # -- evaluation -----------------------------------------------------------------------------------------------
    @override
    @torch.no_grad()
    def evaluate(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in self.jobs]
        for split in self.jobs[0].splits():
            sets = [job.splits()[split] for job in self.jobs]
            for name, values in self._evaluate(sets).items():
                for record, value in zip(found, values, strict=True):
                    record[f"{split}_{name}"] = value
        return found

    def _evaluate(self, sets: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
        shared = _same(sets)
        x, y = sets[0] if shared else (torch.stack([x for x, _ in sets]), torch.stack([y for _, y in sets]))
        axis = 0 if shared else 1
        size = max(1, 25_000 // len(self.jobs))

        def sums(params: Stack, buffers: Stack, xs: Tensor, ys: Tensor) -> dict[str, Tensor]:
            output = functional_call(self._template, (params, buffers), (xs,))
            hits = correct(output, ys)
            found = {"loss": self._loss(output, ys).sum()}
            return found if hits is None else {**found, "accuracy": hits.sum()}

        run = vmap(sums, in_dims=(0, 0, None, None) if shared else 0)
        totals: dict[str, Tensor] = {}
        with evaluating(self._template):
            for xs, ys in zip(torch.split(x, size, axis), torch.split(y, size, axis), strict=True):
                for name, values in run(self._params, self._buffers, xs, ys).items():
                    totals[name] = totals.get(name, 0.0) + values.double()
        return {name: (total / x.shape[axis]).tolist() for name, total in totals.items()}

    # -- checkpoints ----------------------------------------------------------------------------------------------
    @override
    def training_states(self) -> list[dict[str, Any]]:
        return [{"optimizers": state} for group in self._groups for state in group.states()]

    @override
    def load_training_states(self, states: Sequence[dict[str, Any]]) -> None:
        stored = [state["optimizers"] for state in states]
        for group in self._groups:
            count = group.count
            group.load(stored[:count])
            stored = stored[count:]


class _Group:
    """Members that one optimizer trains: a slice of the stacks.

    Args:
        place: where they are in the stacks.
        tensors: what the method trains, by parameter name.
        method: the optimizer.
        whitening: corrects its steps.
    """

    def __init__(
        self, place: slice, tensors: Mapping[str, Tensor], method: Method, whitening: _Whitening | None = None
    ) -> None:
        self._place, self._tensors, self.method, self._whitening = place, tensors, method, whitening
        self.count = place.stop - place.start

    def step(self, grads: Stack, factor: float) -> None:
        """One step with the gradients of all members."""
        for name, tensor in self._tensors.items():
            tensor.grad = grads[name][self._place]
        with nullcontext() if self._whitening is None else self._whitening:
            self.method.step(factor)

    def states(self) -> list[list[dict[str, Any]]]:
        """Each member's optimizer states, as it would have them alone."""
        whole = self.method.state_dict()
        return [
            [_of_member(state, lambda t, i=i: t[i] if t.dim() else t) for state in whole] for i in range(self.count)
        ]

    def load(self, states: Sequence[list[dict[str, Any]]]) -> None:
        """Continue from each member's optimizer states."""
        joined = []
        for several in zip(*states, strict=True):
            entries = {
                key: {name: _joined([state["state"][key][name] for state in several]) for name in values}
                for key, values in several[0]["state"].items()
            }
            joined.append({**several[0], "state": entries})
        self.method.load_state_dict(joined)


class _Whitening:
    """The Gram-whitened update of stacks, or its complement, around the steps taken inside.

    A member that has diverged keeps what its optimizer proposed.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], options: Mapping[str, Any], kind: str) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        layers = [options["layers"]] if options["layers"] else None
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        chosen = choose_matrices(groups, model, layers, options["whiten_readout"]).matrices
        self._matrices = [(m, tensors[names[id(m.parameter)]]) for m in chosen]
        self._polar, self._fixed = options["polar"], kind == "gram-fixed"

    def __enter__(self) -> None:
        self._before = [vmap(matrix.view)(stack).clone() for matrix, stack in self._matrices]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for old, (matrix, stack) in zip(self._before, self._matrices, strict=True):
                new = vmap(matrix.view)(stack)
                target, source = (new, old) if self._fixed else (old, new)
                axes = tuple(range(1, new.dim()))
                sound = new.isfinite().all(dim=axes) & old.isfinite().all(dim=axes)
                if bool(sound.any()):  # a view: this writes the parameter
                    new[sound] = nearest_with_gram(target[sound], source[sound], self._polar)


def _of_member(state: dict[str, Any], select: Any) -> dict[str, Any]:
    """The state of one member from that of an optimizer of stacks; counts of steps are the same for all."""
    entries = {
        key: {name: select(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        for key, values in state["state"].items()
    }
    return {**state, "state": entries}


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    return torch.stack(list(values)) if isinstance(first, Tensor) and first.dim() else first


def _stack_weights(models: Sequence[nn.Module]) -> tuple[Stack, Stack]:
    """Trainable parameters, and all other parameters and buffers, stacked; the nets then hold views of the stacks."""
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    found = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    stacks = {name: torch.stack([tensors[name].detach() for tensors in found]) for name in found[0]}
    for index, tensors in enumerate(found):
        for name, tensor in tensors.items():
            tensor.data = stacks[name][index]
    return (
        {name: stack for name, stack in stacks.items() if name in trained},
        {name: stack for name, stack in stacks.items() if name not in trained},
    )


def _same(sets: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all members share the same tensors."""
    return all(x is sets[0][0] and y is sets[0][1] for x, y in sets)


def _distinct(sets: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
    """The different pairs of tensors among ``sets``, and which of them each is."""
    numbers: dict[tuple[int, int], int] = {}
    which = [numbers.setdefault((id(x), id(y)), len(numbers)) for x, y in sets]
    return [sets[which.index(number)] for number in range(len(numbers))], which


# -- what can be stacked ------------------------------------------------------------------------------------------
def member_obstacle(job: Job) -> str:
    """Why runs such as this one cannot be stacked, as far as one of them shows; empty if they can."""
    config = job.config
    if split_wrapper(config.method.name)[1] not in _BY_NUMBER:
        return f"{config.method.name} has no vectorised form"
    if config.measure.samples and config.measure.matrices:
        return "measure.matrices follows the gradients of every step"
    if config.clip:
        return "each run's gradient is clipped on its own"
    for module in job.model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            return f"{type(module).__name__} keeps running statistics"
    return ""


def stack_obstacle(jobs: Sequence[Job]) -> str:
    """Why the members cannot be stacked; empty if they can."""
    first = jobs[0]
    for job in jobs:
        if obstacle := member_obstacle(job):
            return obstacle
    if any(job.plan != first.plan or job.loss is not first.loss for job in jobs):
        return "their numbers of steps or losses differ"
    shapes = [[(p, x.shape, y.shape, x.dtype) for p, (x, y) in job.splits().items()] for job in jobs]
    if any(shape != shapes[0] for shape in shapes):
        return "their data sets differ in shape"
    return _net_obstacle(jobs)


@torch.no_grad()
def _net_obstacle(jobs: Sequence[Job]) -> str:
    """Try the forward pass of two samples of each member together, and compare it with one by one."""
    models = [job.model for job in jobs]
    tensors = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    if any({n: t.shape for n, t in one.items()} != {n: t.shape for n, t in tensors[0].items()} for one in tensors):
        return "their nets differ"
    template = models[0]
    stack = {name: torch.stack([one[name] for one in tensors]) for name in tensors[0]}
    x = torch.stack([job.data.x_train[:2] for job in jobs])

    def call(params: Stack, x: Tensor) -> Any:
        return functional_call(template, params, (x,))

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
