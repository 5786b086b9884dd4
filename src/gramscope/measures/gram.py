"""The weight Gram (neural feature matrix), how a gradient step moves it, and the Feature Learning Equation.

Matrices come back in the common dtype of the arguments (at least float32), computed in float64; a stack of matrices
(grouped convolutions) gives a stack. Numbers come back in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import (
    Array,
    as_matrices,
    as_weight,
    check_range,
    check_same_device,
    result_dtype,
    to_double,
)
from gramscope.linalg.psd import frobenius


def weight_gram(W: Array) -> Tensor:
    """The weight Gram ``WᵀW``, called the neural feature matrix in the NFA papers.

    Args:
        W: weight ``[k, d]`` or a stack of them ``[groups, k, d]``. The weight of a 2- or 3-dimensional convolution
            (four or five axes) is taken in patch space, ``[out, in/groups · kernel]``; for ``nn.Conv1d`` pass
            ``W.flatten(1)``, since three axes are a stack.

    Returns:
        ``[d, d]`` (``[groups, d, d]``).

    >>> weight_gram(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    (weight,), dtype = matrices(W=as_weight(W))
    return check_range((weight.mT @ weight).to(dtype), "WᵀW")


def gram_shift(W: Array, D: Array, gamma: float) -> Tensor:
    """``(W − γD)ᵀ(W − γD) − WᵀW``, the Gram's change in a gradient step, free of cancellation.

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``∇_W Σ_i L_i [..., k, d]``.
        gamma: step size γ.

    >>> gram_shift(torch.tensor([[1.0]]), torch.tensor([[1.0]]), gamma=0.5)
    tensor([[-0.7500]])
    """
    (weight, gradient), dtype = matrices(W=W, D=D)
    half = weight.mT @ gradient
    return check_range((gamma**2 * (gradient.mT @ gradient) - gamma * (half + half.mT)).to(dtype), "the Gram's change")


def gram_shift_residual(W: Array, D: Array, Sigma: Array, gamma: float) -> Tensor:
    """``γ² (DᵀD − WᵀΣW)``: exactly what :func:`gram_shift` has beyond the virtual covariance shift ([Gram] Theorem 1).

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``[..., k, d]``.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``.
        gamma: step size γ.

    >>> one = torch.ones(1, 1)
    >>> gram_shift_residual(one, 2 * one, 3 * one, gamma=0.5)
    tensor([[0.2500]])
    """
    (weight, gradient, sigma), dtype = matrices(W=W, D=D, Sigma=Sigma)
    residual = gamma**2 * (gradient.mT @ gradient - weight.mT @ (sigma @ weight))
    return check_range(residual.to(dtype), "γ² (DᵀD − WᵀΣW)")


def fle_residual(W: Array, D: Array, G: Array) -> Tensor:
    """``‖WᵀD − G‖_F / ‖G‖_F``, the relative error of the Feature Learning Equation ``WᵀD = Σ_i g_i h_iᵀ`` ([Gram] eq. 1).

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``[..., k, d]``.
        G: ``Σ_i g_i h_iᵀ [..., d, d]`` with ``g_i = ∂L_i/∂h_i``, found without W and D.

    Returns:
        A float64 number; 0 when both sides are zero.

    >>> fle_residual(torch.eye(2), torch.eye(2), torch.eye(2)).item()
    0.0
    """
    (weight, gradient, sides), _ = matrices(W=W, D=D, G=G)
    difference, size = frobenius(weight.mT @ gradient - sides), frobenius(sides)
    return check_range(torch.where(difference == 0, difference, difference / size), "the residual divided by ‖G‖")


def matrices(**arguments: Array) -> tuple[list[Tensor], torch.dtype]:
    """The arguments as float64 matrices whose shapes fit, and the dtype of results.

    W and D are ``[..., k, d]``, Sigma, K and their centred forms ``[..., k, k]``, G ``[..., d, d]``.
    """
    tensors = {name: as_matrices(x, name) for name, x in arguments.items()}
    check_same_device(**tensors)
    *stack, k, d = tensors["W"].shape
    expected = {"W": (*stack, k, d), "W0": (*stack, k, d), "D": (*stack, k, d), "G": (*stack, d, d)}
    for name, tensor in tensors.items():
        shape = expected.get(name, (*stack, k, k))
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)} but W of shape {(*stack, k, d)} needs {name} of shape {shape}"
            )
    return [to_double(tensor) for tensor in tensors.values()], result_dtype(*tensors.values())
