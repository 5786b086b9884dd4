"""Whole weights, for a while, of a model that is sharded over processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange
from gramscope.errors import LayerError

#: where modules keep their hooks
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process holds a part."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def check_not_flattened(model: nn.Module) -> None:
    """Raise if the model is wrapped by the first FSDP, whose parameters are pieces of flattened vectors."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel" and type(module).__module__.startswith("torch."):
            raise LayerError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which keeps pieces of vectors in "
                "place of weight matrices; shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )


@contextmanager
def gathered(model: nn.Module, exchange: Exchange | None = None) -> Iterator[None]:
    """Within this the model has whole weights and runs in this process alone; other models are left as they are.

    For models sharded by ``fully_shard`` or other ``DTensor`` parameters. Every process of the mesh must enter, as the weights
    are sent to all; then each may run any number of batches. It takes the memory of the whole model in every process.

    Args:
        model: the model.
        exchange: the processes that are expected to enter.
    """
    check_not_flattened(model)
    modules = list(model.modules())
    if not any(is_sharded(p) for p in (*model.parameters(), *model.buffers())):
        yield
        return
    if exchange is not None:
        exchange.wait_for_all()
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    hidden: list[tuple[nn.Module, str, OrderedDict[int, Callable[..., Any]]]] = []
    whole: dict[int, Tensor] = {}
    try:
        for module in modules:
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()  # type: ignore[operator]
        for module in modules:
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place in places:
                for name, tensor in place.items():
                    if tensor is not None and is_sharded(tensor):
                        if id(tensor) not in whole:
                            whole[id(tensor)] = _whole(tensor)
                        replaced.append((place, name, tensor))
                        place[name] = whole[id(tensor)]
            for kind in _HOOKS:
                hooks = getattr(module, kind)
                if any(_is_of_torch_distributed(hook) for hook in hooks.values()):
                    hidden.append((module, kind, hooks.copy()))
                    for key in [key for key, hook in hooks.items() if _is_of_torch_distributed(hook)]:
                        del hooks[key]
        yield
    finally:
        for place, name, tensor in replaced:
            place[name] = tensor
        for module, kind, before in hidden:
            hooks = getattr(module, kind)
            now = OrderedDict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in before.items() if key in now or _is_of_torch_distributed(hook)})
            hooks.update({key: hook for key, hook in now.items() if key not in before})


def _whole(tensor: Any) -> Tensor:
    with torch.no_grad():
        full: Tensor = tensor.detach().full_tensor()
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _is_of_torch_distributed(hook: Any) -> bool:
    """Whether torch put this hook on a module to gather its weights or to distribute its inputs and outputs."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
