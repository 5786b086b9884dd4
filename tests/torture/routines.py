"""Every measure of matrices beside its formula in exact numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from mpmath import mpf
from torch import Tensor

import gramscope as gs
from cases import target_linearity_from_moments
from gramscope.linalg.moments import moments
from gramscope.measures.collapse import neural_collapse_from_rows
from gramscope.measures.linearity import (
    held_out_from_moments,
    label_rows,
    surrogate_from_moments,
)
from gramscope.measures.similarity import linear_cka_from_moments
from gramscope.measures.spectrum import feature_spectrum_from_moments
from gramscope.optim.procrustes import nearest_with_gram
from torture.exact import ZERO, Numbers, eigen, exact, eye, inverse, norm, power, projection, singular_values

GAMMA, RIDGE = 0.25, 0.5
#: sizes of the matrices: samples, features, targets, outputs
TALL = {"n": 7, "d": 3, "c": 2, "k": 5}
WIDE = {"n": 4, "d": 6, "c": 2, "k": 3}


@dataclass(frozen=True)
class Routine:
    """A function under test.

    Args:
        arguments: name -> two letters of :data:`TALL`; two equal ones other than "nn" are positive semidefinite.
        call: takes tensors by name, gives numbers or tensors by name.
        oracle: takes exact numbers by name, gives exact numbers by name, or (number, size of its largest term).
        bound: of the error, in rounding units of the result's dtype times the size of the result.
        unit: the argument whose dtype has these rounding units, if not the result.
        least: exponent of two below which float64 cannot hold what the routine computes on its way.
    """

    arguments: dict[str, str]
    call: Callable[..., dict[str, Any]]
    oracle: Callable[..., dict[str, Any]]
    bound: float = 256
    unit: str = ""
    least: int = -(10**6)


def labels(n: int) -> Tensor:
    return torch.arange(n) % 2


def one_hot(n: int) -> Numbers:
    Y = np.array([[mpf(int(c == i % 2)) for c in range(min(n, 2))] for i in range(n)], dtype=object)
    return centred(Y)


def centred(X: Numbers) -> Numbers:
    return X - X.sum(0) / len(X)


def rho(A: Numbers, B: Numbers, center: bool = False) -> tuple[Any, Any]:
    if center:
        A, B = A - A.sum() / A.size, B - B.sum() / B.size
    return (A * B).sum() / (norm(A) * norm(B)), 1


def cka(X: Numbers, Y: Numbers) -> tuple[Any, Any]:
    a, b = centred(X), centred(Y)
    return norm(a.T @ b) ** 2 / (norm(a.T @ a) * norm(b.T @ b)), 1


def residual(H: Numbers, Y: Numbers, ridge: float) -> Any:
    """``Σ_r (λ / (s_r² + λ))² ‖u_rᵀY‖²`` over all eigenvectors of ``HHᵀ``."""
    squares, U = eigen(H @ H.T)
    squares = np.array([x if x > ZERO * squares[0] else mpf(0) for x in squares], dtype=object)
    share = np.array([mpf(ridge) / (x + ridge) if ridge or x else mpf(1) for x in squares], dtype=object)
    return ((share[:, None] * (U.T @ Y)) ** 2).sum()


def linearity(H: Numbers, Y: Numbers, ridge: float = 0.0, intercept: bool = False) -> tuple[Any, Any]:
    total = (centred(Y) ** 2).sum()
    if intercept:
        H, Y = centred(H), centred(Y)
    value = 1 - residual(H, Y, ridge) / total
    return value, 1 + abs(value)


def spectrum(A: Numbers, values: bool = True) -> dict[str, Any]:
    s = singular_values(A)
    p = s / s.sum()
    found = {
        "effective_rank": mpmath.exp(-sum(x * mpmath.log(x) for x in p if x > mpf(10) ** -25)),
        "stable_rank": (s * s).sum() / s[0] ** 2,
        "participation_ratio": (s * s).sum() ** 2 / (s**4).sum(),
        "rank": mpf(sum(x > mpf(10) ** -12 * s[0] for x in s)),
    }
    return found | ({"values": s} if values else {})


def spectrum_found(found: Any, values: bool = True) -> dict[str, Any]:
    names = ("effective_rank", "stable_rank", "participation_ratio", "rank", *(["values"] if values else []))
    return {name: getattr(found, name) for name in names}


def shift(W: Numbers, D: Numbers, Sigma: Numbers) -> tuple[Numbers, Any]:
    first, second = GAMMA * W.T @ D, GAMMA**2 * W.T @ Sigma @ W
    return second - first - first.T, max(abs(first).max(), abs(second).max())


def collapse(H: Numbers, R: Numbers) -> dict[str, Any]:
    n, classes = len(H), 2
    if n < classes:
        raise ZeroDivisionError
    mean = H.sum(0) / n
    M = np.stack([H[c::2].sum(0) / len(H[c::2]) for c in range(classes)])
    within = sum(np.outer(h - M[i % 2], h - M[i % 2]) for i, h in enumerate(H)) / n
    M = M - mean
    between = M.T @ M / classes
    lengths = [norm(m) for m in M]
    average = sum(lengths) / classes
    cosine = (M[0] @ M[1]) / (lengths[0] * lengths[1])
    return {
        "nc1": (np.trace(within @ inverse(between)) / classes, np.trace(within) / np.trace(between)),
        "nc2_equinorm": (mpmath.sqrt(sum((x - average) ** 2 for x in lengths) / classes) / average, 1),
        "nc2_simplex": (abs(cosine + mpf(1)), 1),
        "nc3": (norm(R / norm(R) - M / norm(M)) ** 2, 1),
    }


def collapse_found(H: Tensor, R: Tensor) -> dict[str, Any]:
    found = neural_collapse_from_rows(H, labels(len(H)), R)
    assert found.nc4 is None or 0 <= found.nc4 <= 1
    return {name: getattr(found, name) for name in ("nc1", "nc2_equinorm", "nc2_simplex", "nc3")}


def bound_of(H: Numbers, Y: Numbers) -> dict[str, Any]:
    values, lam = eigen(H @ H.T)[0], mpf(1e-3)
    M, m = values[0] + lam, max(values[-1], 0) + lam
    S, Q, T = norm(H.T @ Y) ** 2, (Y * Y).sum(), (centred(Y) ** 2).sum()
    lost = lam**2 * (M + m) ** 2 * Q**2 / (4 * M * m**2 * (S + lam * Q) * T)
    return {"bound": (1 - lost, 1 + lost), "surrogate": S}


def moving(H: Numbers, Y: Numbers, F: Numbers) -> dict[str, Any]:
    best = projection(H) @ Y
    size = norm(Y) + norm(F)
    return {"error": (norm(Y - F), size), "features": (norm(Y - best), size), "chase": (norm(best - F), size)}


def moving_found(H: Tensor, Y: Tensor, F: Tensor) -> dict[str, Any]:
    found = gs.moving_target(H, Y, F)
    return {"error": found.error, "features": found.features, "chase": found.chase}


def probe(H: Tensor, Y: Tensor) -> dict[str, Any]:
    fit = gs.fit_linear(H, Y, intercept=True)
    return {"beta": fit.beta, "predicted": fit.predict(H), "held out": gs.held_out_target_linearity(fit, H, Y)}


def fitted(H: Numbers, Y: Numbers) -> dict[str, Any]:
    value = projection(centred(H)) @ Y + Y.sum(0) / len(Y)
    h = centred(H)
    squares = eigen(h.T @ h)[0]
    unique = squares[-1] > ZERO * squares[0]
    return ({"beta": inverse(h.T @ h) @ h.T @ Y} if unique else {}) | {
        "predicted": (value, abs(Y).max()),
        "held out": linearity(H, Y, intercept=True),
    }


def gram_found(W: Tensor, T: Tensor, method: Any) -> dict[str, Any]:
    X = nearest_with_gram(T, W, method)
    return {"gram": X.double().mT @ X.double() if X.numel() else X}


def polar_found(A: Tensor, method: Any) -> dict[str, Any]:
    Q = gs.polar(A, method)
    if not A.numel():
        return {"gram": Q}
    large, small = (Q.mT, A.mT) if A.shape[0] < A.shape[1] else (Q, A)
    inner = large.double().mT @ torch.ldexp(small.double(), -torch.frexp(small.double().abs().max()).exponent)
    return {"gram": large.double().mT @ large.double(), "symmetric": inner - inner.mT}


def simple(name: str) -> Callable[..., dict[str, Any]]:
    return lambda *a, **k: {"": getattr(gs, name)(*a, **k)}


ROUTINES = {
    "cosine": Routine({"A": "nd", "B": "nd"}, simple("cosine"), lambda A, B: {"": rho(A, B)}),
    "cosine centred": Routine(
        {"A": "nd", "B": "nd"}, lambda A, B: {"": gs.cosine(A, B, center=True)}, lambda A, B: {"": rho(A, B, True)}
    ),
    "nfa": Routine({"W": "kd", "K": "kk"}, simple("nfa"), lambda W, K: {"": rho(W.T @ W, W.T @ K @ W)}),
    "nfa centred": Routine(
        {"W": "kd", "K": "kk"},
        lambda W, K: {"": gs.nfa(W, K, center=True)},
        lambda W, K: {"": rho(W.T @ W, W.T @ K @ W, True)},
        1e5,
    ),
    "nfa of the change": Routine(
        {"W": "kd", "K": "kk", "W0": "kd"},
        lambda W, K, W0: {"": gs.nfa(W, K, W0, kind="centered")},
        lambda W, K, W0: {"": rho((W - W0).T @ (W - W0), (W - W0).T @ K @ (W - W0))},
    ),
    "nfa power": Routine(
        {"W": "kd", "K": "kk"},
        lambda W, K: {"": gs.nfa(W, K, power=0.5)},
        lambda W, K: {"": rho(W.T @ W, power(W.T @ K @ W, mpf(0.5)))},
        1e9,  # the root of an eigenvalue that is zero up to rounding
    ),
    "double centred ratio": Routine(
        {"W": "kd", "K": "kk", "W0": "kd", "K_centered": "kk"},
        lambda **a: {"": gs.double_centered_ratio(**a)},
        lambda W, K, W0, K_centered: {
            "": (((V := W - W0).T @ V) * (V.T @ K_centered @ V)).sum() / ((V.T @ V) * (V.T @ K @ V)).sum()
        },
        1e4,
    ),
    "corrupted": Routine(
        {"K": "kk"},
        lambda K: {"": torch.linalg.eigvalsh(gs.corrupted(K, torch.Generator().manual_seed(0))).flip(-1)},
        lambda K: {"": eigen(K)[0]},
    ),
    "weight Gram": Routine({"W": "kd"}, simple("weight_gram"), lambda W: {"": W.T @ W}),
    "Gram shift": Routine(
        {"W": "kd", "D": "kd"},
        lambda W, D: {"": gs.gram_shift(W, D, GAMMA)},
        lambda W, D: {"": (GAMMA**2 * D.T @ D - GAMMA * (W.T @ D + D.T @ W), abs(W.T @ D).max() + abs(D.T @ D).max())},
    ),
    "FLE residual": Routine(
        {"W": "kd", "D": "kd", "G": "dd"},
        simple("fle_residual"),
        lambda W, D, G: {"": (norm(W.T @ D - G) / norm(G), (norm(W.T @ D) + norm(G)) / norm(G))},
    ),
    "virtual shift": Routine(
        {"W": "kd", "D": "kd", "Sigma": "kk"},
        lambda **a: {"": gs.virtual_covariance_shift(**a, gamma=GAMMA)},
        lambda W, D, Sigma: {"": shift(W, D, Sigma)},
    ),
    "virtual update": Routine(
        {"h": "nd", "g": "nd"},
        lambda h, g: {"": gs.virtual_update(h, g, GAMMA)},
        lambda h, g: {"": (h - GAMMA * g, abs(h).max() + abs(g).max())},
    ),
    "target linearity": Routine(
        {"H": "nd", "Y": "nc"}, simple("target_linearity"), lambda H, Y: {"": linearity(H, Y)}, 1e4
    ),
    "target linearity, intercept": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": gs.target_linearity(H, Y, intercept=True)},
        lambda H, Y: {"": linearity(H, Y, intercept=True)},
        1e4,
    ),
    "target linearity, ridge": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": gs.target_linearity(H, Y, RIDGE)},
        lambda H, Y: {"": linearity(H, Y, RIDGE)},
        1e4,
    ),
    "target linearity of labels": Routine(
        {"H": "nd"},
        lambda H: {"": gs.target_linearity(H, labels(len(H)))},
        lambda H: {"": linearity(H, one_hot(len(H)))},
        1e4,
    ),
    "target linearity from moments": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": target_linearity_from_moments(moments(H, Y))},
        lambda H, Y: {"": linearity(H, Y)},
        1e9,
        least=-1000,
    ),
    "held-out linearity from moments": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": held_out_from_moments(moments(H, Y), moments(H, Y), intercept=True)},
        lambda H, Y: {"": linearity(H, Y, intercept=True)},
        1e9,
        least=-1000,
    ),
    "Gram-induced error": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": gs.gram_induced_error(H, Y, RIDGE)},
        lambda H, Y: {"": residual(H, Y, RIDGE)},
        1e4,
    ),
    "surrogate": Routine({"H": "nd", "Y": "nc"}, simple("surrogate"), lambda H, Y: {"": norm(H.T @ Y) ** 2}),
    "normalised surrogate": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": gs.surrogate(H, Y, normalized=True)},
        lambda H, Y: {"": (norm(H.T @ Y) ** 2 / (norm(H @ H.T) * norm(Y @ Y.T)), 1)},
    ),
    "normalised surrogate of a weight": Routine(
        {"H": "nd", "Y": "nc", "W": "kd"},
        lambda H, Y, W: {"": gs.surrogate(H, Y, W, normalized=True)},
        lambda H, Y, W: {"": (norm(W @ H.T @ Y) ** 2 / (norm(H @ W.T @ W @ H.T) * norm(Y @ Y.T)), 1)},
    ),
    "normalised surrogate from moments": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": surrogate_from_moments(moments(H, Y), normalized=True, center=False)},
        lambda H, Y: {"": (norm(H.T @ Y) ** 2 / (norm(H @ H.T) * norm(Y @ Y.T)), 1)},
        least=-1000,
    ),
    "linear CKA": Routine({"X": "nd", "Y": "nc"}, simple("linear_cka"), lambda X, Y: {"": cka(X, Y)}),
    "linear CKA from moments": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"": linear_cka_from_moments(moments(H, Y))},
        lambda H, Y: {"": cka(H, Y)},
        least=-1000,
    ),
    "weight spectrum": Routine(
        {"W": "kd"}, lambda W: spectrum_found(gs.weight_spectrum(W)), lambda W: spectrum(W), 1e4
    ),
    "feature spectrum": Routine(
        {"H": "nd"}, lambda H: spectrum_found(gs.feature_spectrum(H)), lambda H: spectrum(centred(H)), 1e4
    ),
    "feature spectrum from moments": Routine(
        {"H": "nd"},
        lambda H: spectrum_found(feature_spectrum_from_moments(moments(H, H[:, :1])), values=False),
        lambda H: spectrum(centred(H), values=False),
        1e10,
        least=-1000,
    ),
    "neural collapse": Routine(
        {"H": "nd", "readout": "cd"},
        lambda H, readout: collapse_found(H, readout),
        lambda H, readout: collapse(H, readout),
        1e5,
    ),
    "class moments": Routine(
        {"H": "nd"},
        lambda H: {"": moments(H, label_rows(labels(max(len(H), 2)))).class_means()[1]},
        lambda H: {"": (np.stack([H[c::2].sum(0) / len(H[c::2]) for c in range(2)]), abs(H).max())},
    ),
    "moments": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"C_hh": (m := moments(H, Y)).C_hh, "C_hy": m.C_hy, "mean": m.mean_h},
        lambda H, Y: {
            "C_hh": (centred(H).T @ centred(H), abs(H.T @ H).max()),
            "C_hy": (centred(H).T @ centred(Y), norm(H) * norm(Y)),
            "mean": (H.sum(0) / len(H), abs(H).max()),
        },
    ),
    "linear fit": Routine({"H": "nd", "Y": "nc"}, probe, fitted, 1e5, least=-1000),
    "linearity bound": Routine(
        {"H": "nd", "Y": "nc"},
        lambda H, Y: {"bound": (r := gs.linearity_bound(H, Y, 1e-3)).bound, "surrogate": r.surrogate},
        bound_of,
        1e6,
    ),
    "moving target": Routine(
        {"H": "nd", "Y": "nc", "yhat": "nc"},
        lambda H, Y, yhat: moving_found(H, Y, yhat),
        lambda H, Y, yhat: moving(H, Y, yhat),
        1e4,
        least=-1000,
    ),
    "egop": Routine(
        {"inputs": "nd"},
        lambda inputs: {"": gs.egop(lambda x: (x * x).sum(1), inputs)},
        lambda inputs: {"": 4 * inputs.T @ inputs / len(inputs)},
    ),
    **{
        f"polar, {method}": Routine(
            {"A": shape},
            lambda A, method=method: polar_found(A, method),
            lambda A: {"gram": eye(min(A.shape)), "symmetric": (mpf(0) * eye(min(A.shape)), 1)},
            64,
            "A",
        )
        for method in ("svd",)
        for shape in ("kd",)
    },
    **{
        f"nearest with Gram, {method}": Routine(
            {"W": "kd", "T": "kd"},
            lambda W, T, method=method: gram_found(W, T, method),
            lambda W, T: {"gram": W.T @ W},
            64,
            "W",
        )
        for method in ("auto", "svd")
    },
}
__all__ = ["ROUTINES", "TALL", "WIDE", "Routine", "exact"]
