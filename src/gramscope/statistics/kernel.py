"""``K = Σ_i J_iᵀJ_i``: the tangent kernel of a layer's pre-activations, and its distance from a reference network."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.statistics.square_sum import SquareSum, thin_of_kernel
from gramscope.statistics.sums import Seen

#: outputs of a sample up to which jacobians="auto" takes all of them
OUTPUT_LIMIT = 256
#: random combinations of outputs that it takes above; each costs a backward pass
SKETCH = 4
#: independent parts of a sketch that are kept, for the standard error
PARTS = 4


class Kernel(SquareSum):
    """``Σ_i J_iᵀJ_i [k, k]`` with ``J_i = ∂f(x_i)/∂z_i`` at every site."""

    needs: ClassVar[frozenset[str]] = frozenset({"J"})
    symbol: ClassVar[str] = "K"

    @override
    def add(self, seen: Seen) -> None:
        J = self.jacobians(seen)
        parts = 1 if seen.sketch is None else min(seen.sketch, PARTS)
        for part in range(parts):  # combinations go to parts in turn
            chosen = J[(part - seen.first) % parts :: parts]
            if chosen.shape[0]:  # outputs, samples and sites are rows
                self.add_rows(seen, chosen.movedim(0, -2).flatten(-4, -2), part, parts)

    def jacobians(self, seen: Seen) -> Tensor:
        """What is summed, ``[m, ..., batch, sites, k]``."""
        assert seen.J is not None
        return seen.J

    @override
    def thin(self, seen: Seen) -> Tensor:
        W, W0 = self.weight, seen.reference_weight
        return self._sides(W) if W0 is None else self._sides(W, W - W0)

    def _sides(self, *weights: Tensor) -> Tensor:
        count = self.budget.probes(self.weight.shape[-1])
        return torch.cat([thin_of_kernel(W, count) for W in weights], -1)


class CenteredKernel(Kernel):
    """``Σ_i (J_i − J_i⁰)ᵀ(J_i − J_i⁰)`` against a reference network."""

    needs: ClassVar[frozenset[str]] = frozenset({"J", "J_reference"})
    symbol: ClassVar[str] = "K"

    @override
    def jacobians(self, seen: Seen) -> Tensor:
        assert seen.J is not None
        assert seen.J_reference is not None
        return seen.J - seen.J_reference

    @override
    def thin(self, seen: Seen) -> Tensor:
        assert seen.reference_weight is not None
        return self._sides(self.weight - seen.reference_weight, seen.reference_weight)
