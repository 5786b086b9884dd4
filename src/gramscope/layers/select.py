"""Which layers of a model are linear-like, under which names, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from gramscope.errors import LayerError, no_such
from gramscope.layers.convolution import ConvLayer, TransposedConvLayer
from gramscope.layers.experts import ExpertsLayer
from gramscope.layers.kinds import (
    AttentionProjection,
    EmbeddingLayer,
    Layer,
    LinearLayer,
    NamedWeightLayer,
    OwnLinearLayer,
    TransposedLinearLayer,
)
from gramscope.layers.modules import names_in_code, public_name, unwrap
from gramscope.layers.quantised import LoraLayer, QuantisedLayer
from gramscope.layers.recurrent import RecurrentLayer
from gramscope.names import match_names

#: every kind of layer that can be captured, asked in this order
KINDS: tuple[type[Layer], ...] = (
    QuantisedLayer,
    LinearLayer,
    ConvLayer,
    TransposedConvLayer,
    TransposedLinearLayer,
    LoraLayer,
    EmbeddingLayer,
    OwnLinearLayer,
)
#: kinds of modules with several weights, each of which is a layer
SEVERAL: tuple[type[NamedWeightLayer], ...] = (AttentionProjection, RecurrentLayer, ExpertsLayer)

#: names, globs (``"blocks.*.fc1"``), module types, or a sequence of them; ``None`` means every linear-like layer
LayerSelector: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None


@dataclass(frozen=True)
class Selection:
    """The chosen layers in registration order, and those left out with the reason."""

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
    ((nn.EmbeddingBag,), "a lookup table that sums rows: its inputs are indices and offsets"),
    (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "a transposed convolution whose output_padding reaches its stride",
    ),
    ((nn.Bilinear,), "bilinear in two inputs"),
    ((nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm), "a normalisation layer with elementwise weights"),
)


def _reason(module: nn.Module) -> str | None:
    """Why a module with matrix-like weights of its own is not supported; ``None`` when it has none."""
    shapes = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters(recurse=False) if p.dim() >= 2]
    if not shapes:
        return None
    for types, reason in _REASONS:
        if isinstance(module, types):
            return reason
    return (
        f"{type(module).__name__} holds {', '.join(shapes)} itself; no layer applies them, so they are not measured "
        "(gramscope.layers.kinds.Layer teaches new kinds)"
    )


def all_layers(model: nn.Module) -> Selection:
    """Every linear-like layer of the model, and every other module that holds matrix-like weights with the reason.

    A LoRA layer W + BA is followed by the layers of its factors, which name it as ``part_of``.
    """
    model = unwrap(model)
    lazy = next((name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise LayerError(f"{lazy!r} has no shape yet (a lazy layer): run one forward pass first")
    layers: list[Layer] = []
    unsupported: dict[str, str] = {}
    hidden: set[int] = set()
    factor_of: dict[int, str] = {}
    modules = dict(model.named_modules())
    for raw_name, module in modules.items():
        name = public_name(raw_name) or "(model)"
        weightless = not (module._parameters or module._modules or module._buffers)
        if weightless or id(module) in hidden or "parametrizations" in raw_name.split("."):
            continue
        if isinstance(module, nn.MultiheadAttention):
            hidden.add(id(module.out_proj))
        own = _layers_of(name if raw_name else "", module, modules.get(raw_name.rpartition(".")[0]))
        reason = None if own else _reason(module)
        if reason is not None:
            unsupported[name] = reason
        for layer in own:
            if isinstance(layer, LoraLayer):
                factor_of |= dict.fromkeys(map(id, layer.factors()), layer.name)
            if layer.parameter is not None and layer.parameter.is_complex():
                unsupported[layer.name] = f"complex weights ({layer.parameter.dtype}); only real layers are measured"
            else:
                layers.append(replace(layer, part_of=factor_of.get(id(module), "")))
    return Selection(tuple(layers), unsupported)


def _layers_of(name: str, module: nn.Module, parent: nn.Module | None) -> list[Layer]:
    """The layers of a module itself: one for each of its weights, or the one layer that it is."""
    for kind in KINDS:
        if kind.matches(module):
            layer = kind(name or "(model)", module)
            if isinstance(layer, QuantisedLayer):
                return [layer]
            if not layer.is_standard() and not isinstance(layer, LoraLayer):
                return [replace(layer, scope=module)]
            used = parent is not None and layer.weight_name in names_in_code(type(parent))
            return [replace(layer, scope=parent) if used else layer]
    for several in SEVERAL:
        if several.matches(module):
            weights = several.weights(module)
            return [several(f"{name}.{weight}" if name else weight, module, weight) for weight in weights]
    return []


def select_layers(model: nn.Module, layers: LayerSelector | Selection = None, factors: bool = False) -> Selection:
    """Resolve ``layers`` against the model.

    Args:
        model: any module; compiled and DDP wrappers are looked through.
        layers: ``None`` for every linear-like layer, or names, globs and module types. The name of a module that holds
            layers (a block, an attention module) stands for all layers inside it; that of a LoRA layer for W + BA, whose
            factors must be named themselves (``"*.lora_A.*"``). A selection is returned as it is.
        factors: take the factors of LoRA layers in place of W + BA, as optimizers do.

    Raises:
        LayerError: nothing to measure, or a selector that matches no layer.
    """
    if isinstance(layers, Selection):
        return layers
    available = all_layers(model)
    others = "; ".join(f"{name} ({reason})" for name, reason in available.unsupported.items())
    others = f"; not supported: {others}" if others else ""
    if factors:
        composed = {layer.part_of for layer in available}
        available = replace(
            available, layers=tuple(replace(a, part_of="") for a in available if a.name not in composed)
        )
    if layers is None:
        if not available.layers:
            raise LayerError(
                f"{type(unwrap(model)).__name__} has no linear-like layer (Linear, Conv1d/2d/3d, MultiheadAttention, "
                f"Embedding, recurrent modules, transformers' Conv1D){others}"
            )
        return replace(available, layers=tuple(layer for layer in available if not layer.part_of))
    single = isinstance(layers, str | type | nn.Module) or not isinstance(layers, Iterable)
    selectors: list[Any] = [layers] if single else list(layers)  # type: ignore[arg-type]
    if not selectors:
        raise LayerError("layers=[] selects nothing; pass None for every linear-like layer")
    chosen: set[str] = set()
    for selector in selectors:
        matching = [layer for layer in available if _matches(layer, selector, model)]
        names = {layer.name for layer in matching}
        hits = {layer.name for layer in matching if layer.part_of not in names}
        if not hits:
            raise LayerError(f"layers: {no_such('linear-like layer', str(selector), available.names)}{others}")
        chosen |= hits
    return replace(available, layers=tuple(layer for layer in available if layer.name in chosen))


def matched_layers(a: nn.Module, b: nn.Module, layers: LayerSelector = None) -> dict[str, tuple[Layer, Layer]]:
    """The layers of ``a`` with those of ``b`` that have the same name but for what wrappers and adapters add to it."""
    mine = {layer.name: layer for layer in select_layers(a, layers)}
    theirs = {layer.name: layer for layer in select_layers(b)}
    names = match_names(mine, theirs)
    if not names:
        raise LayerError(
            f"0 of {len(mine)} names match: one model has {', '.join(list(mine)[:3])}, the other {', '.join(list(theirs)[:3])}"
        )
    return {name: (mine[name], theirs[other]) for name, other in names.items()}


def _matches(layer: Layer, selector: Any, model: nn.Module) -> bool:
    if isinstance(selector, str):
        return layer.name == selector or fnmatchcase(layer.name, selector) or layer.name.startswith(selector + ".")
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return isinstance(layer.module, selector)
    known = next((public_name(name) or "(model)" for name, m in unwrap(model).named_modules() if m is selector), None)
    hint = "" if known is None else f"; this one is {known!r}"
    raise LayerError(
        f"layers= takes names, globs and module types, not {selector!r} of type {type(selector).__name__}{hint}"
    )


def select_modules(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    """Modules of these dotted names; a glob stands for the outermost modules it matches (``h.*`` for the blocks of h)."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    modules = {public_name(name) or "(model)": module for name, module in unwrap(model).named_modules()}
    chosen: dict[str, nn.Module] = {}
    for pattern in wanted:
        hits = [pattern] if pattern in modules else [name for name in modules if fnmatchcase(name, pattern)]
        outermost = [name for name in hits if not any(name.startswith(other + ".") for other in hits)]
        if not outermost:
            raise LayerError(f"outputs: {no_such('module', pattern, modules)}")
        chosen |= {name: modules[name] for name in outermost}
    return chosen
