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

Stack: TypeAlias = dict[str, Tensor]

# coefficients of the quintic iteration, as in torch.optim.Muon
_A, _B, _C = 3.4445, -4.7750, 2.0315


def per_run(values: Tensor, like: Tensor) -> Tensor:
    """``[runs]`` shaped and typed to multiply a stack ``[runs, …]``."""
    return values.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def orthogonalise(matrices: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """``torch.optim.Muon``'s Newton–Schulz iteration in bfloat16 on a stack ``[runs, k, d]``."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, gram, x, beta=_A)
    return x.mT if tall else x


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
        device = next(iter(params.values())).device
        self._device = device
        self._hyper = {
            key: torch.tensor([float(run[key]) for run in options], dtype=torch.float64, device=device)
            for key, value in options[0].items()
            if isinstance(value, int | float)
        }
        self.state: dict[str, Stack] = {}

    def any(self, key: str) -> bool:
        """Whether some run has a value other than 0."""
        return any(run[key] != 0 for run in self.options)

    def zeros(self) -> Stack:
        """A state tensor for every parameter, starting at 0."""
        return {name: torch.zeros_like(p) for name, p in self.params.items()}

    @abstractmethod
    def update(self, grads: Stack, factor: Tensor) -> None:
        """One step in place; ``factor`` is the schedule's, a scalar on the device."""

    def tensors(self) -> list[Tensor]:
        """Everything a step changes."""
        return [*self.params.values(), *(t for stack in self.state.values() for t in stack.values())]


class SGDRule(Rule):
    """``torch.optim.SGD``: momentum, Nesterov, coupled weight decay."""

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(params, options)
        if self.any("momentum"):
            self.state["momentum"] = self.zeros()

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        lr, decays = self._hyper["lr"] * factor, self.any("weight_decay")
        for name, p in self.params.items():
            g = grads[name]
            if decays:
                g = g + per_run(self._hyper["weight_decay"], p) * p
            if self.state:
                momentum = per_run(self._hyper["momentum"], p)
                buffer = self.state["momentum"][name].mul_(momentum).add_(g)
                g = g + momentum * buffer if self.options[0]["nesterov"] else buffer
            p.sub_(per_run(lr, p) * g)


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
        h = self._hyper
        step = self.state["step"][""].add_(1)
        lr = h["lr"] * factor
        size = -lr / (1 - h["beta1"] ** step)
        root = (1 - h["beta2"] ** step).sqrt()
        decays = self.any("weight_decay")
        for name, p in self.params.items():
            g = grads[name]
            if decays and self._decoupled:
                p.mul_(per_run(1 - lr * h["weight_decay"], p))
            elif decays:
                g = g + per_run(h["weight_decay"], p) * p
            beta2 = per_run(h["beta2"], p)
            mean = self.state["mean"][name].lerp_(g, per_run(1 - h["beta1"], p))
            square = self.state["square"][name].mul_(beta2).add_(g * g * (1 - beta2))
            denominator = (square.sqrt() / per_run(root, p)).add_(per_run(h["eps"], p))
            p.add_(mean / denominator * per_run(size, p))


class MuonRule(Rule):
    """``torch.optim.Muon`` on stacks of matrices ``[runs, k, d]``."""

    def __init__(self, params: Stack, options: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(params, options)
        self.state["momentum"] = self.zeros()

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        lr = self._hyper["lr"] * factor
        for name, p in self.params.items():
            momentum = per_run(self._hyper["momentum"], p)
            buffer = self.state["momentum"][name].lerp_(grads[name], 1 - momentum)
            update = grads[name].lerp(buffer, momentum) if self.options[0]["nesterov"] else buffer
            update = orthogonalise(update, self.options[0]["ns_steps"])
            if self.any("weight_decay"):
                p.mul_(per_run(1 - lr * self._hyper["weight_decay"], p))
            p.sub_(per_run(lr * self._ratio(p), p) * update)

    def _ratio(self, p: Tensor) -> float:
        k, d = p.shape[-2:]
        if self.options[0]["adjust"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(k, d))
        return math.sqrt(max(1.0, k / d))
