"""Which layers of a model are linear-like, under which names, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind, ConvKind, LayerKind, LinearKind, TransposedLinearKind
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import public_name, unwrap

#: every kind of layer that can be captured, asked in this order
KINDS: tuple[LayerKind, ...] = (LinearKind(), ConvKind(), TransposedLinearKind())


ATTENTION_KINDS = tuple(AttentionProjectionKind(part) for part in AttentionProjectionKind.PARTS)


#: names, globs (``"blocks.*.fc1"``), module types, or a sequence of them; ``None`` means every linear-like layer
LayerSelector: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None


@dataclass(frozen=True)
class Selection:
    """The chosen layers in registration order, and what was passed over with the reason."""

    layers: tuple[Layer, ...]
    unsupported: dict[str, str]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen layers."""
        return tuple(layer.name for layer in self.layers)


_REASONS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), "a lookup table: its input is an index, not a vector"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent weights are used inside a fused kernel that exposes no pre-activations"),
    (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "a transposed convolution has no patch form z = W h with one row per site",
    ),
    ((nn.Bilinear,), "bilinear in two inputs"),
    ((nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm), "a normalisation layer with elementwise weights"),
)


def _reason(module: nn.Module) -> str | None:
    """Why a module with matrix-like weights of its own is not supported; ``None`` when it has none."""
    shapes = [
        f"{name} {tuple(p.shape)}"
        for name, p in module.named_parameters(recurse=False)
        if not nn.parameter.is_lazy(p) and p.dim() >= 2
    ]
    if not shapes:
        return None
    for types, reason in _REASONS:
        if isinstance(module, types):
            return reason
    return (
        f"{type(module).__name__} holds {', '.join(shapes)} itself and no layer kind is known for it; "
        "see gramscope.layers.kinds.LayerKind"
    )


def all_layers(model: nn.Module) -> Selection:
    """Every linear-like layer of the model, and every other module that holds matrix-like weights with the reason."""
    model = unwrap(model)
    found: list[Layer] = []
    unsupported: dict[str, str] = {}
    inside_attention: set[int] = set()
    for raw_name, module in model.named_modules():
        name = public_name(raw_name) or "(model)"
        if id(module) in inside_attention or "parametrizations" in raw_name.split("."):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside_attention.add(id(module.out_proj))
            prefix = f"{name}." if raw_name else ""
            new = [Layer(prefix + kind.part, module, kind) for kind in ATTENTION_KINDS]
        else:
            new = [Layer(name, module, kind) for kind in KINDS if kind.matches(module)][:1]
        if not new:
            reason = _reason(module)
            if reason is not None:
                unsupported[name] = reason
            continue
        for layer in new:
            parameter = layer.parameter
            if parameter is not None and not nn.parameter.is_lazy(parameter) and parameter.is_complex():
                unsupported[layer.name] = f"complex weights ({parameter.dtype}); only real layers are measured"
            else:
                found.append(layer)
    return Selection(tuple(found), unsupported)


def select_layers(model: nn.Module, layers: LayerSelector = None) -> Selection:
    """Resolve ``layers`` against the model.

    Args:
        model: any module; compiled and DDP wrappers are looked through.
        layers: ``None`` for every linear-like layer, or names, globs and module types. The name of a module that holds
            layers (a block, an attention module) stands for all layers inside it.

    Raises:
        LayerError: nothing to measure, or a selector that matches no layer.
    """
    available = all_layers(model)
    if layers is None:
        if not available.layers:
            raise LayerError(
                f"{type(unwrap(model)).__name__} has no linear-like layer (Linear, Conv1d/2d/3d, MultiheadAttention, "
                f"transformers' Conv1D){_listing('; passed over: ', available.unsupported)}"
            )
        return available
    single = isinstance(layers, str | type | nn.Module) or not isinstance(layers, Iterable)
    selectors: list[Any] = [layers] if single else list(layers)  # type: ignore[arg-type]
    for given in selectors:
        if not isinstance(given, str | type | nn.Module):
            raise LayerError(f"layers= takes names, globs and module types, not {given!r}")
        if isinstance(given, nn.Module):
            found = [public_name(name) or "(model)" for name, m in unwrap(model).named_modules() if m is given]
            hint = f"; this one is {found[0]!r}" if found else "; this one is not in the model"
            raise LayerError(
                f"layers= takes names, globs and module types, not a module ({type(given).__name__}){hint}"
            )
    if not selectors:
        raise LayerError("layers=[] selects nothing; pass None for every linear-like layer")
    chosen: set[str] = set()
    for selector in selectors:
        hits = {layer.name for layer in available if _matches(layer, selector)}
        if not hits:
            raise LayerError(
                f"layers={selector!r} matches no linear-like layer; there are: {', '.join(available.names) or 'none'}"
                f"{_listing('; passed over: ', available.unsupported)}"
            )
        chosen |= hits
    return Selection(tuple(layer for layer in available if layer.name in chosen), available.unsupported)


def select_modules(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    """Modules of these dotted names; a glob stands for the outermost modules it matches (``h.*`` for the blocks of h)."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    modules = {public_name(name) or "(model)": module for name, module in unwrap(model).named_modules()}
    chosen: dict[str, nn.Module] = {}
    for pattern in wanted:
        hits = [pattern] if pattern in modules else [name for name in modules if fnmatchcase(name, pattern)]
        outermost = [name for name in hits if not any(name.startswith(other + ".") for other in hits)]
        if not outermost:
            raise LayerError(f"outputs={pattern!r} matches no module; there are: {', '.join(modules)}")
        chosen |= {name: modules[name] for name in outermost}
    return chosen


def _matches(layer: Layer, selector: str | type[nn.Module]) -> bool:
    if isinstance(selector, str):
        return layer.name == selector or fnmatchcase(layer.name, selector) or layer.name.startswith(selector + ".")
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return isinstance(layer.module, selector)
    raise LayerError(f"layers= takes names, globs and module types, not {selector!r} of type {type(selector).__name__}")


def _listing(prefix: str, items: dict[str, str]) -> str:
    return prefix + "; ".join(f"{name} ({reason})" for name, reason in items.items()) if items else ""
