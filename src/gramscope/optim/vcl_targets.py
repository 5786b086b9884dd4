"""Which weights virtual covariance learning can train, in matrix form, and which layer is executed last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector, select_layers


@dataclass(frozen=True)
class Target:
    """One weight matrix ``[k, d]`` (or stack ``[groups, k, d]``), used by one layer or by several that share it.

    With ``bias`` the layer's bias is the last column, as if the input had a constant 1 there.
    """

    name: str
    layers: tuple[Layer, ...] = field(repr=False)
    parameter: nn.Parameter = field(repr=False)
    bias: nn.Parameter | None = field(default=None, repr=False)

    @property
    def part(self) -> str:
        """Which rows of a packed attention weight this is; empty for a parameter of its own."""
        kind = self.layers[0].kind
        return kind.part if isinstance(kind, AttentionProjectionKind) else ""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What this target trains."""
        return [self.parameter] if self.bias is None else [self.parameter, self.bias]

    def read(self) -> Tensor:
        """The weights, detached, ``[…, k, d]``."""
        return self._joined(self.parameter.detach(), None if self.bias is None else self.bias.detach())

    def gradient(self) -> Tensor | None:
        """The parameters' gradient in the same form, or None when there is none."""
        grad = self.parameter.grad
        if grad is None or (self.bias is not None and self.bias.grad is None):
            return None
        return self._joined(grad.detach(), None if self.bias is None else self.bias.grad)

    @torch.no_grad()
    def write(self, matrix: Tensor) -> None:
        """Set the weights, in place."""
        if self.bias is not None:
            self.bias.copy_(matrix[..., -1].reshape(self.bias.shape))
            matrix = matrix[..., :-1]
        self.layers[0].assign(matrix)

    def rows(self, layer: Layer, x: Tensor) -> Tensor:
        """A native input as ``[…, b, d]``, with the constant column where there is one."""
        h = layer.kind.inputs(layer.module, x).flatten(-3, -2)
        return h if self.bias is None else torch.cat([h, torch.ones_like(h[..., :1])], -1)

    def summed(self, layer: Layer, x: Tensor, dz: Tensor) -> Tensor:
        """``Σ δ hᵀ`` from native input and output gradient, ``[…, k, d]``."""
        D = layer.kind.weight_gradient(layer.module, x, dz)
        if self.bias is None:
            return D
        total = layer.kind.outputs(layer.module, dz).to(D.dtype).sum((-3, -2))
        return torch.cat([D, total.unsqueeze(-1)], -1)

    def _joined(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = self.layers[0].matrix(weight)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.detach().reshape(*matrix.shape[:-1], 1)], -1)


@dataclass(frozen=True)
class Candidates:
    """The weights that can be trained, in registration order, and the layers that cannot, with the reasons."""

    targets: list[Target]
    refused: list[tuple[Layer, str]]
    #: what belongs to the layer registered last
    last: Target | Layer


def find_targets(model: nn.Module, layers: LayerSelector, bias: bool) -> Candidates:
    """The trainable weights of the chosen layers, and why other chosen layers have none.

    Raises:
        LayerError: a layer asked for by ``layers`` cannot be trained, a weight is not there yet, or only some rows of a
            packed attention weight are chosen.
    """
    root = unwrap(model)
    selection = select_layers(root, layers)
    shared = _outside_users(root, selection.layers)
    grouped: dict[tuple[int, str], list[Layer]] = {}
    refused: list[tuple[Layer, str]] = []
    for layer in selection:
        if layer.parameter is not None and nn.parameter.is_lazy(layer.parameter):
            raise LayerError(f"layer {layer.name!r} is lazy: run one forward pass before making the optimizer")
        reason = _refusal(layer, shared)
        if reason is None:
            part = layer.kind.part if isinstance(layer.kind, AttentionProjectionKind) else ""
            grouped.setdefault((id(layer.parameter), part), []).append(layer)
        elif layers is None:
            refused.append((layer, reason))
        else:
            raise LayerError(f"layer {layer.name!r} {reason}; leave it out of layers=")
    targets = [_target(members, bias) for members in grouped.values()]
    for target in targets:
        _check_packed(target, targets)
    if not targets:
        listing = "; ".join(f"{layer.name} {reason}" for layer, reason in refused)
        raise LayerError(f"no layer of {type(root).__name__} can be trained by VCL: {listing}")
    final = selection.layers[-1]
    return Candidates(targets, refused, next((target for target in targets if final in target.layers), final))


def last_executed(order: Sequence[tuple[Target | Layer, Tensor]], targets: Sequence[Target]) -> Target | Layer:
    """What was applied last in one forward, a target or a layer that is none, if every target led up to it.

    Args:
        order: each application with its output, in order of execution.
        targets: all weights that can be trained.

    Raises:
        LayerError: nothing ran, or some target's output does not enter the last one (several heads, for example).
    """
    if not order:
        raise LayerError(
            "no layer was seen in a forward pass, so the last one executed is not known. Run a forward and backward pass "
            "first; a model that ran under torch.compile before VCL was made is not seen (make VCL before its first call)"
        )
    last, output = order[-1]
    reached = _ancestors(output)
    apart = {
        t.name
        for t, z in order
        if isinstance(t, Target) and t is not last and z.grad_fn is not None and z.grad_fn not in reached
    }
    if apart:
        raise LayerError(
            f"which layer is the readout is ambiguous: {last.name!r} ran last, but the outputs of "
            f"{', '.join(sorted(apart))} do not enter it. Name the layers that VCL trains with layers=; there are: "
            f"{', '.join(t.name for t in targets)}"
        )
    return last


def _target(members: list[Layer], bias: bool) -> Target:
    layer = members[0]
    parameter = layer.parameter
    assert parameter is not None
    own_bias = None
    if bias and len(members) == 1 and not isinstance(layer.kind, AttentionProjectionKind):
        candidate = layer.module._parameters.get("bias")
        own_bias = candidate if candidate is not None and candidate.requires_grad else None
    return Target(layer.name, tuple(members), parameter, own_bias)


def _refusal(layer: Layer, shared: dict[int, str]) -> str | None:
    """Why a layer's weight cannot be trained by VCL."""
    parameter = layer.parameter
    if parameter is None:
        return "has a computed weight (a parametrisation), which cannot be set"
    if not parameter.requires_grad:
        return "is frozen (requires_grad=False)"
    if hasattr(parameter, "device_mesh"):
        return "is sharded over devices; whole matrices are needed"
    if parameter.numel() == 0:
        return f"has an empty weight of shape {tuple(parameter.shape)}"
    if id(parameter) in shared:
        return f"shares its weight with {shared[id(parameter)]}, which is no linear-like layer"
    return None


def _check_packed(target: Target, targets: Sequence[Target]) -> None:
    if not target.part or target.part == "out_proj":
        return
    kind = target.layers[0].kind
    assert isinstance(kind, AttentionProjectionKind)
    if kind.weight_attribute(target.layers[0].module) != "in_proj_weight":
        return
    parts = {other.part for other in targets if other.parameter is target.parameter}
    missing = {"q_proj", "k_proj", "v_proj"} - parts
    if missing:
        raise LayerError(
            f"layer {target.name!r} is part of one packed weight with {', '.join(sorted(missing))}; an optimizer trains "
            "whole parameters, so choose all three projections or none"
        )


def _outside_users(model: nn.Module, layers: Iterable[Layer]) -> dict[int, str]:
    """Parameters that are used by a module which is no linear-like layer (tied embeddings)."""
    inside = {id(layer.module) for layer in layers}
    inside |= {id(child) for layer in layers for child in layer.module.modules()}
    inside |= {id(m) for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)}
    users: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] = name or type(module).__name__
    return users


def _ancestors(output: Tensor) -> set[object]:
    """All autograd nodes that ``output`` depends on."""
    found: set[object] = set()
    stack: list[object] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack.extend(edge[0] for edge in node.next_functions)  # type: ignore[attr-defined]
    return found
