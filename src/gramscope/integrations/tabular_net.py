"""A fully connected net for rows of a table, trained by VCL, that can be pickled with the state of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from gramscope.models.mlp import MLP
from gramscope.optim.vcl import VCL

#: rows that pass through the net at once where no gradient is needed
ROWS = 4096


@dataclass(frozen=True)
class NetOptions:
    """What a :class:`TabularNet` is made from; see :class:`gramscope.integrations.sklearn.VCLClassifier`."""

    inputs: int
    outputs: int
    hidden: tuple[int, ...]
    activation: str
    gamma: float
    alpha: float
    readout_lr: float
    seed: int
    dtype: torch.dtype
    device: str


class TabularNet:
    """An MLP, the loss ``loss(output, target)`` and the VCL optimizer that lowers it."""

    def __init__(self, options: NetOptions, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.options, self.loss = options, loss
        generator = torch.Generator().manual_seed(options.seed)
        self.model = MLP(
            options.inputs, options.outputs, options.hidden, activation=options.activation, generator=generator
        ).to(options.device, options.dtype)
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> VCL:
        readout = partial(AdamW, lr=self.options.readout_lr)
        return VCL(self.model, self.options.gamma, self.options.alpha, readout=readout, solver="recursive")

    def set_rate(self, factor: float) -> None:
        """Make both step sizes this share of their initial values."""
        rates = (self.options.gamma, *[self.options.readout_lr] * (len(self.optimizer.param_groups) - 1))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = factor * rate

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """One training step on a batch; its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self._tensor(x)), self._target(y))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Outputs of the net, ``[n, outputs]``."""
        return np.asarray(self.model(self._tensor(x)).cpu())

    @torch.no_grad()
    def features(self, x: np.ndarray) -> np.ndarray:
        """The inputs of the readout, ``[n, width]``."""
        return np.asarray(self.model[:-1](self._tensor(x)).cpu())

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Go back to weights; the optimizer starts anew."""
        self.optimizer.close()
        self.model.load_state_dict(weights)
        self.optimizer = self._make_optimizer()

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.tensor(x, dtype=self.options.dtype, device=self.options.device)

    def _target(self, y: np.ndarray) -> Tensor:
        dtype = torch.int64 if np.issubdtype(y.dtype, np.integer) else self.options.dtype
        return torch.tensor(y, dtype=dtype, device=self.options.device)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "options": self.options,
            "loss": self.loss,
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], state["loss"])  # type: ignore[misc]
        self.model.load_state_dict(state["weights"])
        self.optimizer = self._make_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
