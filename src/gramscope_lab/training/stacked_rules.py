"""Optimizers' mathematics on stacks: every tensor has a leading axis of runs, every hyper-parameter is one number a run.

The formulas and their order are those of ``torch.optim``, so that a stack and its members one by one agree to float
tolerance. All state is updated in place, which lets a CUDA graph replay a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.optim.orthogonalise import quintic_polar

Stack: TypeAlias = dict[str, Tensor]


def per_run(values: Tensor, like: Tensor) -> Tensor:
    """``[runs]`` shaped and typed to multiply a stack ``[runs, …]``."""
    return values.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def accumulate_square(total: Tensor, g: Tensor, beta: Tensor | float) -> Tensor:
    """``β total + (1 − β) g²`` in place."""
    if isinstance(beta, float):
        return total.mul_(beta).addcmul_(g, g, value=1 - beta)
    return total.mul_(beta).add_((1 - beta) * g * g)


class Rule(ABC):
    """One optimizer for some of the stacked parameters.

    Args:
        params: the stacks it updates in place, by parameter name.
        options: each run's options.
    """

    #: whether a CUDA graph can hold its update
    capturable = True

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]]) -> None:
        self.params = params
        self.options = options
        self._device = next(iter(params.values())).device
        self._numbers = {
            key: torch.tensor([float(run[key]) for run in options], dtype=torch.float64, device=self._device)
            for key, value in options[0].items()
            if isinstance(value, int | float)
        }
        self.state: dict[str, Stack] = {}

    def any(self, key: str) -> bool:
        """Whether some run has a value other than 0."""
        return any(run[key] != 0 for run in self.options)

    def number(self, key: str, like: Tensor) -> Tensor | float:
        """A hyper-parameter: one number if all runs agree on it (which is faster), else shaped to multiply ``like``."""
        if all(run[key] == self.options[0][key] for run in self.options):
            return float(self.options[0][key])
        return per_run(self._numbers[key], like)

    def zeros(self) -> Stack:
        """A state tensor for every parameter, starting at 0."""
        return {name: torch.zeros_like(p) for name, p in self.params.items()}

    @abstractmethod
    def update(self, grads: Stack, factor: Tensor) -> None:
        """One step in place.

        Args:
            grads: gradients of the members' losses.
            factor: the schedule's, a scalar on the device.
        """

    def export(self, run: int) -> Any:
        """The state of one run, for its checkpoint."""
        return {key: {name: t[run] for name, t in stack.items()} for key, stack in self.state.items()}

    def restore(self, states: Sequence[Any]) -> None:
        """Continue from every run's state."""
        for run, stored in enumerate(states):
            for key, stack in self.state.items():
                for name, tensor in stack.items():
                    tensor[run].copy_(stored[key][name])

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes."""
        return [*self.params.values(), *(t for stack in self.state.values() for t in stack.values())]


class SGDRule(Rule):
    """``torch.optim.SGD``: momentum, Nesterov, coupled weight decay."""

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(params, options)
        if self.any("momentum"):
            self.state["momentum"] = self.zeros()

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        size = -self._numbers["lr"] * factor
        for name, p in self.params.items():
            g = grads[name]
            if self.any("weight_decay"):
                g = g + self.number("weight_decay", p) * p
            if self.state:
                momentum = self.number("momentum", p)
                buffer = self.state["momentum"][name].mul_(momentum).add_(g)
                g = g + momentum * buffer if self.options[0]["nesterov"] else buffer
            p.addcmul_(g, per_run(size, p))


class AdamRule(Rule):
    """``torch.optim.Adam`` and, with ``decoupled``, ``AdamW``."""

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]], *, decoupled: bool) -> None:
        super().__init__(params, options)
        self._decoupled = decoupled
        self.state = {
            "mean": self.zeros(),
            "square": self.zeros(),
            "step": {"": torch.zeros(len(options), dtype=torch.float64, device=self._device)},
        }

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        n = self._numbers
        step = self.state["step"][""].add_(1)
        lr = n["lr"] * factor
        size = lr / (1 - n["beta1"] ** step)
        root = (1 - n["beta2"] ** step).sqrt()
        decays = self.any("weight_decay")
        for name, p in self.params.items():
            g = grads[name]
            if decays and self._decoupled:
                p.mul_(per_run(1 - lr * n["weight_decay"], p))
            elif decays:
                g = g + self.number("weight_decay", p) * p
            mean = self.state["mean"][name].lerp_(g, per_run(1 - n["beta1"], p))
            square = accumulate_square(self.state["square"][name], g, self.number("beta2", p))
            # −size · mean / (√square / root + eps), with the size divided into the denominator
            denominator = square.sqrt().mul_(per_run(1 / root, p)).add_(self.number("eps", p))
            p.addcdiv_(mean, denominator.mul_(per_run(-1 / size, p)))


class MuonRule(Rule):
    """``torch.optim.Muon`` on stacks of matrices ``[runs, k, d]``."""

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(params, options)
        self.state["momentum"] = self.zeros()

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        lr = self._numbers["lr"] * factor
        for name, p in self.params.items():
            momentum = per_run(self._numbers["momentum"], p)
            buffer = self.state["momentum"][name].lerp_(grads[name], 1 - momentum)
            update = grads[name].lerp(buffer, momentum) if self.options[0]["nesterov"] else buffer
            update = quintic_polar(update.bfloat16(), self.options[0]["ns_steps"])
            if self.any("weight_decay"):
                p.mul_(per_run(1 - lr * self._numbers["weight_decay"], p))
            p.addcmul_(update.to(p.dtype), per_run(-lr * self._ratio(p), p))

    def _ratio(self, p: Tensor) -> float:
        k, d = p.shape[-2:]
        if self.options[0]["adjust"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(k, d))
        return math.sqrt(max(1.0, k / d))
