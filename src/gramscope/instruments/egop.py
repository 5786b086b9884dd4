"""Expected gradient outer product of a known function, which acts on each row of its input on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_float_tensor, to_double

#: rows for which a function is called at once: a kernel machine makes a row of all its centres for each
ROWS = 256

RowFunction = Callable[[Tensor], Tensor]


def egop(function: RowFunction, inputs: Array) -> Tensor:
    """``E_x[∇f ∇fᵀ]`` of a known target over sampled inputs, ``[d, d]`` in float64; several outputs are summed.

    Args:
        function: maps rows ``[n, d]`` to ``[n]`` or ``[n, c]``, each row on its own; it is called in float64.
        inputs: samples ``[n, d]``.

    >>> egop(lambda x: 3 * x[:, 0] - x[:, 1], torch.zeros(4, 2))
    tensor([[ 9., -3.],
            [-3.,  1.]], dtype=torch.float64)
    """
    samples = as_float_tensor(inputs, "inputs", dim=2)
    n, d = samples.shape
    total = torch.zeros(d, d, dtype=torch.float64, device=to_double(samples[:1]).device)
    for rows in torch.split(samples, ROWS):
        gradients = row_gradients(function, rows)[1].flatten(0, 1)
        total.addmm_(gradients.mT, gradients)
    return total / n


def row_gradients(function: RowFunction, X: Array) -> tuple[Tensor, Tensor]:
    """Values ``[n, c]`` and gradients ``[n, c, d]`` of a function from rows ``[n, d]`` to ``[n]`` or ``[n, c]``.

    The rows must not influence each other (no batch normalisation in training mode): the gradient of the sum over rows
    is then every row's own. The function is called in float64.

    >>> row_gradients(lambda x: x.square().sum(1), torch.tensor([[1.0, 2.0]]))
    (tensor([[5.]], dtype=torch.float64), tensor([[[2., 4.]]], dtype=torch.float64))
    """
    leaf = to_double(as_float_tensor(X, "X", dim=2)).clone().requires_grad_()
    with torch.enable_grad():
        values = function(leaf)
        if values.dim() not in (1, 2) or values.shape[0] != leaf.shape[0]:
            raise InputError(
                f"the function must map [n, d] to [n] or [n, c], but {tuple(leaf.shape)} became {tuple(values.shape)}"
            )
        values = values[:, None] if values.dim() == 1 else values
        if not values.requires_grad:
            return values, leaf.new_zeros(*values.shape, leaf.shape[1])
        gradients = [
            torch.autograd.grad(column.sum(), leaf, retain_graph=True, allow_unused=True)[0]
            for column in values.unbind(1)
        ]
    zeros = torch.zeros_like(leaf).detach()
    return values.detach(), torch.stack([zeros if g is None else g for g in gradients], 1)
