"""Many runs in one step: parameters stacked along a leading axis, gradients by ``vmap(grad(...))``.

Each member keeps its own initial weights, data order and hyper-parameters, so a stack gives what its members give one
by one, to float tolerance. On a GPU the whole step is replayed as one CUDA graph, because launching its many small
kernels one at a time would take longer than running them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from typing_extensions import override

from gramscope.errors import InputError
from gramscope.layers.model_call import evaluating
from gramscope.linalg.cuda_graph import Replay, Tensors
from gramscope_lab.training.engine import Engine
from gramscope_lab.training.job import Job
from gramscope_lab.training.sample_losses import correct
from gramscope_lab.training.stacked_methods import build_rules
from gramscope_lab.training.stacked_rules import Stack


class StackedEngine(Engine):
    """Several members of one architecture, one vectorised step for all of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        first = jobs[0]
        self._loss = first.loss
        self._template = copy.deepcopy(first.model).train()
        trainable = {name for name, p in first.model.named_parameters() if p.requires_grad}
        self._params, self._buffers = stack_weights([job.model for job in jobs], trainable)
        sets = [(job.data.x_train, job.data.y_train) for job in jobs]
        self._shared = _same(sets)
        kept, which = (sets, range(len(jobs))) if self.full_batch else _distinct(sets)
        self._x, self._y = sets[0] if self._shared else (torch.stack(part) for part in zip(*kept, strict=True))
        self._which = torch.tensor(which, device=first.device).unsqueeze(1)
        self.rules, self.notes = build_rules(jobs, self._template, self._params)
        self._factor = torch.ones((), dtype=torch.float64, device=first.device)
        data_axis = 0 if self._batched_inputs else None
        self._gradients = vmap(grad_and_value(self._batch_loss), in_dims=(0, 0, data_axis, data_axis))
        self._whole = all(rule.capturable for rule in self.rules)
        self._recorded = Replay(self._step if self._whole else self._backward, state=self._state_tensors)

    # -- the step -------------------------------------------------------------------------------------------------
    @property
    def _batched_inputs(self) -> bool:
        return not (self.full_batch and self._shared)

    def _batch_loss(self, params: Stack, buffers: Stack, x: Tensor, y: Tensor) -> Tensor:
        """A member's loss."""
        losses = self._loss(functional_call(self._template, (params, buffers), (x,)), y)
        return losses.mean() if self._mean else losses.sum()

    def _gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The members' batches ``[runs, batch, …]`` for indices ``[runs, batch]``."""
        if self.full_batch:
            return self._x, self._y
        if self._shared:
            flat = index.reshape(-1)
            x, y = self._x.index_select(0, flat), self._y.index_select(0, flat)
            return x.reshape(*index.shape, *x.shape[1:]), y.reshape(*index.shape, *y.shape[1:])
        return self._x[self._which, index], self._y[self._which, index]

    def _backward(self, given: Tensors) -> Stack:
        """Gradients of every member's loss for the batches ``given["index"]``."""
        x, y = self._gather(given["index"])
        grads, losses = self._gradients(self._params, self._buffers, x, y)
        self._loss_sum += losses if self._mean else losses / y.shape[1 if self._batched_inputs else 0]
        found: Stack = grads
        return found

    def _update(self, grads: Stack) -> None:
        for rule in self.rules:
            rule.update(grads, self._factor)

    def _step(self, given: Tensors) -> Stack:
        self._update(self._backward(given))
        return {}

    @override
    def advance(self, step: int) -> None:
        """Take one step with every member."""
        self._factor.fill_(self.plan.factor(step))
        grads = self._recorded({"index": self.indices(step)})
        if not self._whole:
            self._update(grads)
        self._loss_count += 1

    def _state_tensors(self) -> list[Tensor]:
        return [*(t for rule in self.rules for t in rule.tensors()), self._loss_sum]

    @override
    def active(self) -> AbstractContextManager[None]:
        return nullcontext()  # nets that draw random numbers are not stacked

    # -- evaluation -----------------------------------------------------------------------------------------------
    @override
    @torch.no_grad()
    def evaluate(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in self.jobs]
        for part in self.jobs[0].parts():
            sets = [job.parts()[part] for job in self.jobs]
            for name, values in self._evaluate(sets).items():
                for record, value in zip(found, values, strict=True):
                    record[f"{part}_{name}"] = value
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

    @override
    @torch.no_grad()
    def models(self) -> Iterator[nn.Module]:
        for index, job in enumerate(self.jobs):
            for name, tensor in (*job.model.named_parameters(), *job.model.named_buffers()):
                tensor.copy_((self._params | self._buffers)[name][index])
            yield job.model

    # -- checkpoints ----------------------------------------------------------------------------------------------
    @override
    def states(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        for index, model in enumerate(self.models()):
            rules = [rule.export(index) for rule in self.rules]
            training = {"stacked": rules, "loss_sum": self._loss_sum[index], "loss_count": self._loss_count}
            yield model.state_dict(), training

    @override
    @torch.no_grad()
    def load_states(self, states: Sequence[tuple[dict[str, Tensor], Any]]) -> None:
        for index, (job, (weights, training)) in enumerate(zip(self.jobs, states, strict=True)):
            if "stacked" not in training:
                raise InputError(f"the checkpoint of {job.name} was not written by vectorised runs")
            job.model.load_state_dict(weights)
            for name, tensor in (*job.model.named_parameters(), *job.model.named_buffers()):
                (self._params | self._buffers)[name][index].copy_(tensor)
            self._loss_sum[index] = training["loss_sum"].to(self._loss_sum.device)
            self._loss_count = training["loss_count"]
        for number, rule in enumerate(self.rules):
            rule.restore([training["stacked"][number] for _, training in states])


def _same(sets: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all members share the same tensors."""
    return all(x is sets[0][0] and y is sets[0][1] for x, y in sets)


def _distinct(sets: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
    """The different pairs of tensors among ``sets``, and which of them each is."""
    numbers: dict[tuple[int, int], int] = {}
    which = [numbers.setdefault((id(x), id(y)), len(numbers)) for x, y in sets]
    return [sets[which.index(number)] for number in range(len(numbers))], which


def stack_weights(models: Sequence[nn.Module], trainable: set[str]) -> tuple[Stack, Stack]:
    """Trainable parameters, and all other parameters and buffers, stacked along a new first axis."""
    found = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    stacks = {name: torch.stack([tensors[name].detach() for tensors in found]) for name in found[0]}
    return (
        {name: stack for name, stack in stacks.items() if name in trainable},
        {name: stack for name, stack in stacks.items() if name not in trainable},
    )
