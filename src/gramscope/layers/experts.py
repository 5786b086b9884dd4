"""Fused experts of ``transformers``: the matrices of all experts of a layer in one parameter ``[experts, k, d]``.

``transformers`` lets a model choose how its experts are computed. While experts are watched, :func:`run_experts` is that
choice: the same products, one for each expert, on rows ordered by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import NamedWeightLayer, sum_outer

#: ``(name of the weight, where rows go, x [rows, d], z [rows, k]) -> z``, the output to continue with
Report: TypeAlias = Callable[[str, "Routing", Tensor, Tensor], Tensor]

_NAMES = ("gate_up_proj", "up_proj", "down_proj")


class Routing:
    """Which row belongs to which token and expert; rows are ordered by expert.

    Args:
        chosen: experts of each token, ``[tokens, choices]``.
        experts: how many there are.
    """

    def __init__(self, chosen: Tensor, experts: int) -> None:
        tokens, choices = chosen.shape
        self.order = chosen.reshape(-1).argsort(stable=True)
        self.token, self.expert = self.order // choices, chosen.reshape(-1)[self.order]
        self.counts: list[int] = torch.bincount(self.expert, minlength=experts).tolist()
        #: row of each expert and token, ``[experts, tokens]``; the number of rows where the token does not reach the expert
        self.row = self.expert.new_full((experts, tokens), len(self.order))
        self.row[self.expert, self.token] = torch.arange(len(self.order), dtype=torch.int64, device=chosen.device)

    def spread(self, x: Tensor) -> Tensor:
        """``[rows, d]`` as ``[experts, tokens, 1, d]``, zero where a token does not reach an expert."""
        return torch.cat([x, x.new_zeros(1, x.shape[-1])])[self.row].unsqueeze(-2)


@dataclass(frozen=True)
class ExpertsLayer(NamedWeightLayer):
    """One fused weight of a layer's experts, a stack of matrices like the groups of a convolution.

    Native inputs and outputs are rows ``[rows, d]`` of the tokens that reach an expert. In normal form, ``[experts, tokens,
    1, d]``, the others are zero.
    """

    not_for_vcl = "holds fused experts"
    #: of the rows that are seen
    routing: Routing | None = field(default=None, repr=False, compare=False)

    @override
    @classmethod
    def weights(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name in _NAMES if name in module._parameters)

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        known = all(hasattr(module, name) for name in ("is_transposed", "has_gate", "_apply_gate", "config"))
        weights = [module._parameters[name] for name in cls.weights(module)]
        return known and bool(weights) and all(p is not None and p.dim() == 3 for p in weights)

    @property
    @override
    def groups(self) -> int:
        return int(self.module._parameters[self.weight_name].shape[0])  # type: ignore[union-attr]

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT if self.module.is_transposed else weight

    @override
    def from_matrix(self, matrix: Tensor, shape: Any) -> Tensor:
        return matrix.mT if self.module.is_transposed else matrix

    @override
    def is_unbatched(self, x: Tensor) -> bool:
        return False

    @override
    def samples(self, x: Tensor, batch_dim: int = 0) -> int:
        return self._routing.row.shape[1]

    @override
    def inputs(self, x: Tensor, batch_dim: int = 0) -> Tensor:
        return self._routing.spread(x)

    @override
    def outputs(self, z: Tensor, batch_dim: int = 0) -> Tensor:
        return self._routing.spread(z)

    @override
    def normal_bytes(self, native: int) -> int:
        return native * self._routing.row.numel() // max(len(self._routing.order), 1)

    @override
    def weight_gradient(self, x: Tensor, dz: Tensor) -> Tensor:
        pairs = zip(torch.split(dz, self._routing.counts), torch.split(x, self._routing.counts), strict=True)
        return torch.stack([sum_outer(delta.unsqueeze(1), h.unsqueeze(1)) for delta, h in pairs])

    @property
    def _routing(self) -> Routing:
        assert self.routing is not None, "rows of experts are seen with their routing"
        return self.routing


@contextmanager
def watched(module: Any, report: Report) -> Iterator[None]:
    """Let :func:`run_experts` compute a module's experts inside this block, and tell ``report`` about it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(module, hidden_states, top_k_index, top_k_weights, report)

    choice = f"gramscope-{id(module)}"
    before = module.config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register(choice, run)
    module.config._experts_implementation = choice
    try:
        yield
    finally:
        module.config._experts_implementation = before
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(choice, None)


def run_experts(module: Any, x: Tensor, chosen: Tensor, shares: Tensor, report: Report) -> Tensor:
    """``Σ_e share_e(token) · expert_e(x[token])``, ``[tokens, d]``.

    Args:
        module: holds the weights, and says how they are stored.
        x: tokens, ``[tokens, d]``.
        chosen: experts of each token, ``[tokens, choices]``.
        shares: their weights, ``[tokens, choices]``.
        report: called for both products.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    routing = Routing(chosen, getattr(module, first).shape[0])

    def project(name: str, rows: Tensor) -> Tensor:
        weight = getattr(module, name) if module.is_transposed else getattr(module, name).mT
        z = torch.cat([own @ weight[e] for e, own in enumerate(torch.split(rows, routing.counts))])
        if module.has_bias:
            z = z + getattr(module, f"{name}_bias")[routing.expert]
        return report(name, routing, rows, z)

    z = project(first, x[routing.token])
    z = project("down_proj", module._apply_gate(z) if module.has_gate else module.act_fn(z))
    if getattr(module, "has_post_expert_norm", False):
        z = module.post_expert_norm(z)
    z = z * shares.reshape(-1)[routing.order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, routing.token, z.to(x.dtype))
