"""The Gram-whitened update, and its complement, around a stacked rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn, vmap
from typing_extensions import override

from gramscope.optim.choose_matrices import choose_matrices
from gramscope.optim.procrustes import nearest_with_gram
from gramscope.optim.weight_matrix import WeightMatrix
from gramscope_lab.training.stacked_rules import Rule, Stack


class GramRule(Rule):
    """``W⁺ = polar(W₁W₂ᵀ) W₂`` for the proposal ``W₂`` of another rule, or with ``fixed`` ``polar(W₂W₁ᵀ) W₁``.

    Args:
        inner: the rule that proposes.
        template: the net, to know its layers.
        fixed: keep the Gram instead of following it.
    """

    capturable = False  # the polar factor chooses its method by looking at numbers

    def __init__(self, inner: Rule, template: nn.Module, *, fixed: bool) -> None:
        super().__init__(inner.params, inner.options)
        self._inner = inner
        self._fixed = fixed
        self.state = inner.state
        names = {id(p): name for name, p in template.named_parameters()}
        first = inner.options[0]
        groups = [{"params": [p for name, p in template.named_parameters() if name in inner.params]}]
        layers = [first["layers"]] if first["layers"] else None
        choice = choose_matrices(groups, template, layers, first["whiten_readout"])
        self._matrices: list[tuple[str, WeightMatrix]] = [(names[id(m.parameter)], m) for m in choice.matrices]

    @override
    def update(self, grads: Stack, factor: Tensor) -> None:
        before = {name: self.params[name].clone() for name, _ in self._matrices}
        self._inner.update(grads, factor)
        for name, matrix in self._matrices:
            old, new = vmap(matrix.view)(before[name]), vmap(matrix.view)(self.params[name])
            new.copy_(self._corrected(old, new))  # a view: this writes the parameter

    def _corrected(self, old: Tensor, new: Tensor) -> Tensor:
        """The correction of every run; one that has diverged keeps what its rule proposed."""
        axes = tuple(range(1, new.dim()))
        sound = new.isfinite().all(dim=axes, keepdim=True) & old.isfinite().all(dim=axes, keepdim=True)
        if bool(sound.all()):
            return self._nearest(old, new)
        stand_in = torch.eye(*new.shape[-2:], dtype=new.dtype, device=new.device)
        return torch.where(
            sound, self._nearest(torch.where(sound, old, stand_in), torch.where(sound, new, stand_in)), new
        )

    def _nearest(self, old: Tensor, new: Tensor) -> Tensor:
        target, source = (new, old) if self._fixed else (old, new)
        return nearest_with_gram(target, source, self.options[0]["polar"])
