"""Fused experts of ``transformers``: the matrices of all experts of a layer in one parameter ``[experts, k, d]``.

``transformers`` lets a model choose how its experts are computed. While experts are watched, :func:`run_experts` is that
choice: the same products, one for each expert, on rows ordered by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.layers.kinds import NamedWeightLayer, sum_outer
from gramscope.layers.quantised import from_mxfp4, has_mxfp4

#: ``(name of the weight, where rows go, x [rows, d], z [rows, k]) -> z``, the output to continue with
Report: TypeAlias = Callable[[str, "Routing", Tensor, Tensor], Tensor]

_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def is_quantised(module: nn.Module) -> bool:
    """Whether a module holds fused experts in MXFP4 (gpt-oss)."""
    return has_mxfp4(module, "down_proj")


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
        return tuple(name for name in _NAMES if name in module._parameters or has_mxfp4(module, name))

    @override
    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if is_quantised(module):
            return True
        known = all(hasattr(module, name) for name in ("is_transposed", "has_gate", "_apply_gate", "config"))
        weights = [module._parameters[name] for name in cls.weights(module)]
        return known and bool(weights) and all(p is not None and p.dim() == 3 for p in weights)

    @property
    @override
    def groups(self) -> int:
        return int(self.module.num_experts if self.parameter is None else self.parameter.shape[0])  # type: ignore[arg-type]

    @property
    @override
    def remark(self) -> str:
        return "weights in MXFP4 format, dequantised one layer at a time" if is_quantised(self.module) else ""

    @override
    def stored_weight(self) -> Tensor:
        return from_mxfp4(self.module, self.weight_name) if is_quantised(self.module) else super().stored_weight()

    @override
    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT if getattr(self.module, "is_transposed", False) else weight

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


class _Dequantising(torch.autograd.Function):
    """Rows times the weights of their experts, which are read again on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], read: Callable[[], Tensor]) -> Tensor:
        ctx.counts, ctx.read = counts, read
        return _by_expert(rows, read().to(rows.dtype).mT, counts)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        return _by_expert(dz, ctx.read().to(dz.dtype), ctx.counts), None, None


def _by_expert(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([own @ weight[e] for e, own in enumerate(torch.split(rows, counts))])


@contextmanager
def watched(module: Any, report: Report) -> Iterator[None]:
    """Let :func:`run_experts` compute a module's experts inside this block, and tell ``report`` about it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(module, hidden_states, top_k_index, top_k_weights, report)

    if is_quantised(module):
        before = dict(vars(module))
        module.forward, module._is_hooked = partial(run, module), True  # so that transformers' block calls it
        try:
            yield
        finally:
            for name in ("forward", "_is_hooked"):
                del vars(module)[name]
            vars(module).update({name: before[name] for name in before.keys() & {"forward", "_is_hooked"}})
        return
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
    told = _as_gpt_oss(module) if is_quantised(module) else module
    first = "gate_up_proj" if told.has_gate else "up_proj"
    routing = Routing(chosen, module.num_experts if told is not module else getattr(module, first).shape[0])

    def project(name: str, rows: Tensor) -> Tensor:
        if told is not module:
            z: Tensor = _Dequantising.apply(rows, routing.counts, partial(from_mxfp4, module, name))  # type: ignore[no-untyped-call]
        else:
            weight = getattr(module, name) if module.is_transposed else getattr(module, name).mT
            z = _by_expert(rows, weight, routing.counts)
        if told.has_bias:
            z = z + getattr(module, f"{name}_bias")[routing.expert]
        return report(name, routing, rows, z)

    z = project(first, x[routing.token])
    z = project("down_proj", told._apply_gate(z) if told.has_gate else module.act_fn(z))
    if getattr(told, "has_post_expert_norm", False):
        z = module.post_expert_norm(z)
    z = z * shares.reshape(-1)[routing.order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, routing.token, z.to(x.dtype))


def _as_gpt_oss(module: nn.Module) -> SimpleNamespace:
    """What MXFP4 experts, which are those of gpt-oss, do not say of themselves."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gate = partial(GptOssExperts._apply_gate, module)
    return SimpleNamespace(has_gate=True, has_bias=True, has_post_expert_norm=False, _apply_gate=gate)
