"""Slow, obvious float64 oracles: every fast path of the package is compared with one of these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

# --- layers: gradients at pre-activations by an added zero, one sample at a time --------------------------------------


def preactivation_gradients(
    model: nn.Module, module: nn.Module, x: Tensor, y: Tensor, losses: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """``∂L_i/∂z`` for every sample i, native layout, applications of the module concatenated in call order.

    The module's output gets a zero tensor added; the gradient of sample i's loss with respect to it is δ_i.
    """
    result = []
    for i in range(x.shape[0]):
        zeros: list[Tensor] = []

        def add_zero(_module: nn.Module, _args: object, z: Tensor, zeros: list[Tensor] = zeros) -> Tensor:
            zeros.append(torch.zeros_like(z, requires_grad=True))
            return z + zeros[-1]

        handle = module.register_forward_hook(add_zero)
        loss = losses(model(x[i : i + 1]), y[i : i + 1]).sum()
        handle.remove()
        result.append(torch.stack(torch.autograd.grad(loss, zeros)))
    return result


def output_jacobian(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
    """``∂f(x_i)/∂z_i`` for one sample ``x [1, ...]``: ``[outputs, *z.shape[1:]]`` summed over no application but one."""
    zeros: list[Tensor] = []

    def add_zero(_module: nn.Module, _args: object, z: Tensor) -> Tensor:
        zeros.append(torch.zeros_like(z, requires_grad=True))
        return z + zeros[-1]

    handle = module.register_forward_hook(add_zero)
    outputs = model(x).flatten()
    handle.remove()
    rows = [torch.autograd.grad(f, zeros, retain_graph=True) for f in outputs]
    return torch.stack([torch.stack(row) for row in rows])  # [outputs, applications, 1, ...]


# --- theory: freeness by its definition, Gaussian averages by quadrature, tangents by autograd ------------------------


def free_moment_by_definition(elements: tuple[tuple[int, str], ...], moments: Callable[[int, str], float]) -> float:
    """``φ`` of a product of elements ``(family, word)``, only from "alternating products of centred elements vanish".

    Neighbours of one family merge; then 0 = φ(Π (x_i − φ(x_i))) is expanded and solved for φ(Π x_i).
    """
    merged: list[tuple[int, str]] = []
    for family, word in elements:
        if merged and merged[-1][0] == family:
            merged[-1] = (family, merged[-1][1] + word)
        else:
            merged.append((family, word))
    if not merged:
        return 1.0
    if len(merged) == 1:
        return moments(*merged[0])
    total = 0.0
    for mask in range(2 ** len(merged) - 1):  # every proper subset is kept, the rest replaced by minus its moment
        kept = tuple(e for i, e in enumerate(merged) if mask >> i & 1)
        factor = 1.0
        for i, element in enumerate(merged):
            if not mask >> i & 1:
                factor *= -moments(*element)
        total += factor * free_moment_by_definition(kept, moments)
    return -total


def gaussian_average(function: Callable[[Tensor], Tensor], covariance: Tensor, nodes: int = 40) -> float:
    """``E[function(u)]`` for u ~ N(0, covariance) by Gauss–Hermite on a grid; ``[points, m]`` are mapped to ``[points]``."""
    points, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes))
    m = covariance.shape[0]
    grid = torch.cartesian_prod(*[points] * m).reshape(-1, m)
    mass = torch.cartesian_prod(*[weights / weights.sum()] * m).reshape(-1, m).prod(1)
    values, vectors = torch.linalg.eigh(covariance)
    return float((mass * function(grid @ (vectors * values.clamp_min(0).sqrt()).mT)).sum())


def mlp_tangents(weights: list[Tensor], x: Tensor, phi: Callable[[Tensor], Tensor], layer: int) -> Tensor:
    """``∂f(x_i)/∂z`` at one layer of a bias-free MLP, one sample at a time by autograd: ``[n, k]``."""
    rows = []
    for sample in x:
        h = sample
        for index, w in enumerate(weights[:-1]):
            z = w @ h
            if index == layer:
                z = z.detach().requires_grad_()
                kept = z
            h = phi(z)
        rows.append(torch.autograd.grad((weights[-1] @ h).sum(), kept)[0])
    return torch.stack(rows)


# --- measures: definitions written out with n×n and d×d matrices and loops over samples ------------------------------


def target_linearity(H: Tensor, Y: Tensor, ridge: float, intercept: bool) -> Tensor:
    """R² from the definition, by a pseudo-inverse; Y is ``[n, c]``."""
    h, y = (H - H.mean(0), Y - Y.mean(0)) if intercept else (H, Y)
    gram = h.T @ h + ridge * torch.eye(h.shape[1]).double()
    beta = torch.linalg.pinv(gram, hermitian=True) @ h.T @ y
    return 1 - (y - h @ beta).square().sum() / (Y - Y.mean(0)).square().sum()


def virtual_shift(W: Tensor, h: Tensor, delta: Tensor, gamma: float) -> Tensor:
    """``Σ_i [h_i⁺h_i⁺ᵀ − h_ih_iᵀ]`` sample by sample, ``h [n, d]``, ``delta [n, k]``."""
    total = torch.zeros(h.shape[1], h.shape[1], dtype=h.dtype)
    for hi, di in zip(h, delta, strict=True):
        moved = hi - gamma * (W.T @ di)
        total += torch.outer(moved, moved) - torch.outer(hi, hi)
    return total


def correlation(A: Tensor, B: Tensor, center: bool) -> Tensor:
    """Cosine of two matrices as vectors, or their Pearson correlation."""
    a, b = A.flatten(), B.flatten()
    if center:
        a, b = a - a.mean(), b - b.mean()
    return (a @ b) / (a.norm() * b.norm())


def power_of(A: Tensor, power: float) -> Tensor:
    """A power of a positive semidefinite matrix, null space excluded."""
    values, vectors = torch.linalg.eigh(A)
    kept = values > 1e-12 * values.max()
    return vectors[:, kept] @ torch.diag(values[kept] ** power) @ vectors[:, kept].T


def scatter_ratio(H: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``tr(Σ_W Σ_B⁺)/C`` and the centred class means, from the definitions of Papyan et al."""
    classes = labels.unique().tolist()
    mean = H.mean(0)
    means = torch.stack([H[labels == c].mean(0) for c in classes])
    within = torch.zeros(H.shape[1], H.shape[1], dtype=H.dtype)
    for i, c in enumerate(classes):
        for h in H[labels == c]:
            within += torch.outer(h - means[i], h - means[i]) / len(H)
    between = (means - mean).T @ (means - mean) / len(classes)
    return torch.trace(within @ torch.linalg.pinv(between, rtol=1e-10)) / len(classes), means - mean


def kernel_alignment(X: Tensor, Y: Tensor) -> Tensor:
    """Linear CKA through centred n×n kernels."""
    n = X.shape[0]
    C = torch.eye(n).double() - 1 / n
    K, L = C @ X @ X.T @ C, C @ Y @ Y.T @ C
    return (K * L).sum() / (K.norm() * L.norm())


# --- linalg: polar factors and Procrustes problems as SciPy and the definitions give them -----------------------------


def polar_factor(A: Tensor) -> Tensor:
    """``U Vᵀ`` in float64, completed on the null spaces by ``U₀ polar(U₀ᵀ I V₀) V₀ᵀ`` (I rectangular where A is)."""
    from scipy.linalg import null_space, svd

    matrix = A.double().numpy()
    U, S, Vh = svd(matrix, full_matrices=False)
    keep = 1e-12 * max(S.max(), 1e-300) < S
    result = U[:, keep] @ Vh[keep]
    if not keep.all():
        U0, V0 = (null_space(X, rcond=1e-12) for X in (result.T, result))
        P, _, Rh = svd(U0.T @ np.eye(*matrix.shape) @ V0, full_matrices=False)
        result = result + U0 @ P @ Rh @ V0.T
    return torch.from_numpy(result)


def nearest_with_gram(target: Tensor, source: Tensor) -> Tensor:
    """The matrix nearest to ``target`` with the Gram of ``source``: SciPy's orthogonal Procrustes on the transposes."""
    from scipy.linalg import orthogonal_procrustes

    rotation, _ = orthogonal_procrustes(source.double().numpy().T, target.double().numpy().T)
    return torch.from_numpy((source.double().numpy().T @ rotation).T.copy())


# --- virtual covariance learning: Algorithm 1 with d×d matrices, one sample at a time, in NumPy -----------------------


def vcl_step(
    W: Tensor,
    V: Tensor,
    h: Tensor,
    delta: Tensor,
    gamma: float,
    alpha: float,
    second_order: bool = True,
    dtype: type = np.float64,
) -> tuple[Tensor, Tensor]:
    """``(W⁺, V⁺)`` of Algorithm 1 for inputs ``h [n, d]`` and ``delta [n, k]``."""
    w, v = W.numpy().astype(dtype), V.numpy().astype(dtype)
    k, d = w.shape
    for hi, di in zip(h.numpy().astype(dtype), delta.numpy().astype(dtype), strict=True):
        g = w.T @ di
        v = v - gamma * (np.outer(g, hi) + np.outer(hi, g))
        if second_order:
            v = v + gamma**2 * np.outer(g, g)
    values, vectors = np.linalg.eigh(w.T @ w + v)
    top = np.argsort(-values)[: min(k, d)]
    kept = np.where(values[top] > 1e-12 * values.max(), values[top], 0)
    proposal = np.diag(kept**alpha) @ vectors[:, top].T
    P, _, R = np.linalg.svd(w @ proposal.T, full_matrices=False)
    return torch.from_numpy(P @ R @ proposal), torch.from_numpy(v)
