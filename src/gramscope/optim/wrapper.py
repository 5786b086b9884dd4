"""Base class for optimizers that wrap another: same groups, same state, same checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from gramscope.errors import InputError


class _Shared:
    """An attribute that lives in the wrapped optimizer, so that it stays shared when that one replaces it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.optimizer, self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.optimizer, self.name, value)


class OptimizerWrapper(Optimizer):
    """Base of optimizers that adjust what another optimizer proposes.

    It is a full :class:`torch.optim.Optimizer`: learning-rate schedulers, step hooks and ``GradScaler`` take it like any
    other. ``param_groups``, ``state`` and ``defaults`` are those of the wrapped optimizer at all times, also after
    ``load_state_dict`` of either, which replaces these objects. Checkpoints are those of the wrapped optimizer.

    Args:
        optimizer: any constructed torch optimizer; kept as the attribute ``optimizer``.
    """

    param_groups = _Shared()
    state = _Shared()
    _ready = False

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{name} wraps a constructed torch optimizer such as torch.optim.SGD(model.parameters(), lr=0.1), "
                f"not {type(optimizer).__name__}"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise InputError(
                f"{name} cannot wrap {type(optimizer).__name__}(differentiable=True): its step has no gradient"
            )
        # Optimizer.__init__ sets up hooks and profiling, and groups and state of its own, which go to a stand-in.
        self.optimizer = cast(Optimizer, SimpleNamespace())
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.optimizer = optimizer
        self._ready = True

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        self.optimizer.load_state_dict(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "step"}

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
