"""Weight Grams, virtual updates and virtual covariance ([VCL], [Gram]), and how a gradient step moves the weight Gram.

The virtual covariance shift needs only the summed gradient D and ``Σ = Σ_i δ_i δ_iᵀ``: no features are kept and γ can be chosen
afterwards. Matrices come back in the common dtype of the arguments (at least float32), computed in float64; a stack of matrices
(grouped convolutions) gives a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import (
    Array,
    as_float_tensor,
    as_matrices,
    as_weight,
    check_range,
    check_same_device,
    result_dtype,
    to_double,
)
from gramscope.linalg.gram import shift_factor

Activation: TypeAlias = Callable[[Tensor], Tensor]


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


def fle_residual(W: Array, D: Array, G: Array) -> float:
    """``‖WᵀD − G‖_F / ‖G‖_F``, the relative error of the Feature Learning Equation ``WᵀD = Σ_i g_i h_iᵀ`` ([Gram] eq. 1).

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``[..., k, d]``.
        G: ``Σ_i g_i h_iᵀ [..., d, d]`` with ``g_i = ∂L_i/∂h_i``, found without W and D.

    Returns:
        0 when both sides are zero.

    >>> fle_residual(torch.eye(2), torch.eye(2), torch.eye(2))
    0.0
    """
    (weight, gradient, sides), _ = matrices(W=W, D=D, G=G)
    difference, size = (weight.mT @ gradient - sides).norm(), sides.norm()
    return float(difference / size) if bool(difference) else 0.0


def virtual_update(h: Array, g: Array, gamma: float) -> Tensor:
    """``h⁺ = h − γ g`` with ``g_i = ∂L_i/∂h_i`` ([VCL] Definition 1): where descent would move the features themselves.

    >>> virtual_update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0]), gamma=0.5)
    tensor([0.5000, 2.5000])
    """
    features, gradients = as_float_tensor(h, "h"), as_float_tensor(g, "g")
    check_same_device(h=features, g=gradients)
    if features.shape != gradients.shape:
        raise InputError(f"h of shape {tuple(features.shape)} and g of shape {tuple(gradients.shape)} must agree")
    moved = to_double(features) - gamma * to_double(gradients)
    return check_range(moved.to(result_dtype(features, gradients)), "h − γ g")


def virtual_covariance_shift(W: Array, D: Array, Sigma: Array, gamma: float) -> Tensor:
    """``v = Σ_i [h_i⁺h_i⁺ᵀ − h_ih_iᵀ] = WᵀM + MᵀW``, ``M = −γD + ½γ²ΣW`` ([VCL] Theorem 2, [Gram] Theorem 1).

    Args:
        W: weight ``[..., k, d]``.
        D: summed gradient ``Σ_i δ_i h_iᵀ [..., k, d]``.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``.
        gamma: virtual step size γ.

    Returns:
        ``[..., d, d]``, symmetric, of rank at most ``2k``.

    >>> one = torch.ones(1, 1)
    >>> virtual_covariance_shift(one, 2 * one, 4 * one, gamma=0.5)   # h = 1, δ = 2: (1 − ½·2)² − 1
    tensor([[-1.]])
    """
    (weight, gradient, sigma), dtype = matrices(W=W, D=D, Sigma=Sigma)
    half = weight.mT @ shift_factor(weight, gradient, sigma, gamma)
    return check_range((half + half.mT).to(dtype), "the virtual covariance shift")


def virtual_trajectory(x: Array, gradients: Iterable[Array], gamma: float, every: int = 1) -> Tensor:
    """``x̃_t = x − γ Σ_{τ≤t} ∇_x L_τ`` ([Gram] §1), the gradients taken along the real training run.

    Args:
        x: points ``[n, d]`` (any shape).
        gradients: one tensor of that shape per training step.
        gamma: virtual step size.
        every: keep one frame in every so many steps.

    Returns:
        Frames ``[1 + steps // every, n, d]``; frame 0 is x.

    >>> virtual_trajectory(torch.zeros(1, 1), [torch.ones(1, 1)] * 4, gamma=0.5, every=2).flatten()
    tensor([ 0., -1., -2.])
    """
    if every < 1:
        raise InputError(f"every must be at least 1, got {every}")
    start = as_float_tensor(x, "x")
    moved = to_double(start)
    frames = [start]
    for step, gradient in enumerate(gradients, start=1):
        g = as_float_tensor(gradient, f"gradients[{step - 1}]")
        if g.shape != start.shape:
            raise InputError(f"gradients[{step - 1}] has shape {tuple(g.shape)}, x has {tuple(start.shape)}")
        moved = moved - gamma * to_double(g)
        if step % every == 0:
            frames.append(moved.to(start.device, start.dtype))
    return torch.stack(frames)


@dataclass(frozen=True)
class VirtualAgreement:
    """How far the actual update follows the virtual one.

    Args:
        bound: share of coordinates with ``|σ(W⁺h) − σ(Wh)| ≤ L²‖h‖² γ|g|``.
        sign: share of coordinates where both updates have the same sign or one of them is zero.
        lipschitz: the L used.
        largest_ratio: largest ``|σ(W⁺h) − σ(Wh)| / (L²‖h‖² γ|g|)``; above 1 the bound fails somewhere.
        coordinates: how many were compared.
    """

    bound: float
    sign: float
    lipschitz: float
    largest_ratio: float
    coordinates: int


def virtual_against_actual(
    h: Array, z: Array, g: Array, gamma: float, activation: Activation | str, lipschitz: float | None = None
) -> VirtualAgreement:
    """Compare ``σ(W⁺h_{ℓ−1}) − σ(Wh_{ℓ−1})`` with the virtual ``h_ℓ⁺ − h_ℓ = −γ g`` for every sample on its own.

    ``W⁺ = W − γ δ hᵀ`` is a gradient step on that one sample and layer, so ``W⁺h = z − γ ‖h‖² δ`` with ``δ = σ'(z) g``.
    The published bound is for ``‖h‖ = 1``; here it carries the factor ``‖h‖²``.

    Args:
        h: the layer's inputs ``h_{ℓ−1} [n, d]``.
        z: pre-activations ``W h_{ℓ−1} (+ b) [n, k]``.
        g: gradients of each sample's loss at the layer's output ``h_ℓ = σ(z)``, ``[n, k]``.
        gamma: step size γ > 0.
        activation: σ, a function of a tensor, entry by entry, or its name in ``torch.nn.functional``.
        lipschitz: L; default :func:`lipschitz_constant` of σ. (With L = 1, as [VCL] takes for GELU, the bound fails.)

    >>> h, z, g = torch.ones(1, 1), torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.5]])
    >>> virtual_against_actual(h, z, g, gamma=0.1, activation="relu").bound
    1.0
    """
    inputs, pre, gradients = as_float_tensor(h, "h", 2), as_float_tensor(z, "z", 2), as_float_tensor(g, "g", 2)
    check_same_device(h=inputs, z=pre, g=gradients)
    if pre.shape != gradients.shape or inputs.shape[0] != pre.shape[0]:
        raise InputError(
            f"h [n, d], z [n, k] and g [n, k] must fit, got {tuple(inputs.shape)}, {tuple(pre.shape)}, "
            f"{tuple(gradients.shape)}"
        )
    if not gamma > 0:
        raise InputError(f"gamma must be positive, got {gamma}")
    function = _resolve(activation)
    constant = lipschitz_constant(function) if lipschitz is None else float(lipschitz)
    inputs, pre, gradients = to_double(inputs), to_double(pre), to_double(gradients)
    square = inputs.square().sum(1, keepdim=True)
    slope = _slope(function, pre)
    with torch.no_grad():
        before = function(pre)
        actual = function(pre - gamma * square * slope * gradients) - before
    virtual = -gamma * gradients
    limit = constant**2 * square * virtual.abs()
    rounding = 8 * torch.finfo(torch.float64).eps * (before.abs() + 1e-300)
    size = torch.where(actual.abs() <= rounding, 0.0, actual.abs())
    holds = size <= limit * (1 + 1e-12) + rounding
    agrees = (size == 0) | (actual.sign() == virtual.sign())
    ratio = torch.where(limit > 0, size / torch.where(limit > 0, limit, 1.0), 0.0)
    return VirtualAgreement(
        float(holds.double().mean()), float(agrees.double().mean()), constant, float(ratio.max()), actual.numel()
    )


def lipschitz_constant(activation: Activation | str) -> float:
    """The smallest L with ``|σ(a) − σ(b)| ≤ L|a − b|``: the largest slope, found on a grid and refined around it.

    An activation whose slope still grows beyond |z| = 30 (a quadratic one) has none: pass ``lipschitz=`` for the range
    that occurs.

    >>> [round(lipschitz_constant(name), 4) for name in ("relu", "gelu", "silu", "tanh", "sigmoid")]
    [1.0, 1.1289, 1.0998, 1.0, 0.25]
    """
    function = _resolve(activation)
    points = torch.linspace(-30.0, 30.0, 60_001, dtype=torch.float64, device="cpu")
    best = 0.0
    for _ in range(6):
        slopes = _slope(function, points).abs()
        best = max(best, float(slopes.max()))
        centre, width = points[slopes.argmax()], (points[1] - points[0]) * 2
        points = torch.linspace(float(centre - width), float(centre + width), 2_001, dtype=torch.float64, device="cpu")
    far = torch.tensor([-1e3, -60.0, 60.0, 1e3], dtype=torch.float64, device="cpu")
    if float(_slope(function, far).abs().max()) > best * (1 + 1e-9):
        raise InputError("the activation's slope grows without bound: pass lipschitz= for the range of z that occurs")
    return best


def _slope(function: Activation, z: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        value = function(leaf)
        if value.shape != leaf.shape:
            raise InputError(f"activation must act entry by entry, but {tuple(z.shape)} became {tuple(value.shape)}")
        if not value.requires_grad:
            return torch.zeros_like(z)
        return torch.autograd.grad(value.sum(), leaf)[0]


def _resolve(activation: Activation | str) -> Activation:
    if not isinstance(activation, str):
        return activation
    function = getattr(F, activation, None)
    if function is None:
        raise InputError(f"torch.nn.functional has no activation {activation!r}; pass the function itself")
    named: Activation = function
    return named


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
