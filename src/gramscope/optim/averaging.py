"""A model that rests at the average of its weights, and takes gradients at the weights that are trained.

Averages are better than the newest weights, but gradients are taken at the newest ones. So an optimizer with averages keeps,
for every parameter, the trained value z, the average x, and of these two

    at rest     the parameter is x, and the optimizer holds ``lead = z − x``
    in a step   from the first forward pass in training mode with gradients until ``step()`` the parameter is z

Whoever evaluates or saves a model between steps sees x and has nothing to call. A change of the parameters between steps (a
checkpoint that is loaded, pruning) changes x and moves z with it, because only their difference is held.

A pre-hook of the model's modules moves the parameters to z; whichever module is called first does it. Nothing else does: not a
forward pass in eval mode or under ``no_grad``. Moves change the parameters in place, by sums that undo each other up to
rounding. ``state_dict()`` of the model or a part of it always gives x.

For parameters of 16 bits ``remainder`` holds in float32 what rounding left off, so that x and z have the digits of float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramscope.optim.processes import local


class Averaging:
    """The parameters of a model that have an average, and where they are.

    Attributes:
        in_step: whether the parameters are z.
    """

    def __init__(self, model: nn.Module, managed: Iterable[Tensor]) -> None:
        self.in_step = False
        self._parameters: list[Tensor] = []
        self._leads: list[Tensor] = []
        self._remainders: list[Tensor | None] = []
        self._handles: list[RemovableHandle] = []
        self._sharded = [m for m in model.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]
        own = set(managed)
        for module in model.modules():
            if not any(p in own for p in module.parameters()):
                continue
            self._handles.append(module.register_forward_pre_hook(_Hook(self, Averaging._called), prepend=True))
            self._handles.append(module.register_state_dict_post_hook(_Hook(self, Averaging._saved)))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self, Averaging._loading)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Return to x and remove every hook."""
        self.rest()
        for handle in self._handles:
            handle.remove()

    def hold(self, states: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        """Take the leads and remainders of these parameters' states; the parameters must be at rest."""
        found = list(states)
        self._parameters = [p for p, _ in found]
        self._leads = [state["lead"] for _, state in found]
        self._remainders = [state.get("remainder") for _, state in found]

    def rest(self) -> None:
        """Let the parameters be x."""
        if self.in_step:
            self._move(-1.0)
            self.in_step = False

    def _move(self, factor: float) -> None:
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]  # the weights that it gathered are those before the move
        self.add(self._parameters, self._leads, self._remainders, factor)

    @staticmethod
    @torch.no_grad()
    def add(parameters: list[Tensor], changes: list[Tensor], remainders: list[Tensor | None], factor: float) -> None:
        """Add ``factor`` times the changes to the parameters, with the digits of float32."""
        parameters, changes = [local(p) for p in parameters], [local(change) for change in changes]
        whole = [i for i, remainder in enumerate(remainders) if remainder is None]
        if whole:
            torch._foreach_add_([parameters[i] for i in whole], [changes[i] for i in whole], alpha=factor)
        for p, change, remainder in zip(parameters, changes, remainders, strict=True):
            if remainder is not None:
                remainder = local(remainder)
                remainder.add_(p).add_(change, alpha=factor)
                p.copy_(remainder)
                remainder.sub_(p)

    def _called(self, module: nn.Module, args: Any) -> None:
        # the flag behind torch.compiler.is_exporting(), which torch 2.11 compiles as true
        if self.in_step or not module.training or not torch.is_grad_enabled() or torch.compiler._is_exporting_flag:
            return
        self._move(1.0)
        self.in_step = True

    def _saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if not self.in_step:
            return
        place = {id(p): i for i, p in enumerate(self._parameters)}
        for name, p in module._parameters.items():
            if id(p) in place and prefix + name in state_dict:
                i = place[id(p)]
                average, remainder = p.detach().clone(), self._remainders[i]  # type: ignore[union-attr]
                remainder = None if remainder is None else remainder.clone()
                self.add([average], [self._leads[i]], [remainder], -1.0)
                state_dict[prefix + name] = average

    def _loading(self, *args: Any) -> None:
        self.rest()


class _Hook:
    """Calls ``method(averaging, …)`` while it lives; the compiler can trace it. In copies of a module it does nothing."""

    def __init__(self, averaging: Averaging | None, method: Callable[..., None]) -> None:
        self._averaging = _nobody if averaging is None else weakref.ref(averaging)
        self._method = method

    def __call__(self, *args: Any) -> None:
        averaging = self._averaging()
        if averaging is not None:
            self._method(averaging, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._method)


def _nobody() -> None:
    return None
