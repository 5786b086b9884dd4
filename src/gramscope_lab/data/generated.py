"""Generated sets in catalogue form: training and test part of the same distribution, from one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.psd import random_orthogonal
from gramscope_lab.data import synthetic
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.load_request import LoadRequest


def _regression(name: str, x: Tensor, y: Tensor, n_train: int) -> DataSet:
    """Split samples that were drawn together; the target becomes ``[n, 1]``, everything float32."""
    x, y = x.float(), y.float().reshape(len(y), -1)
    return DataSet(name, x[:n_train], y[:n_train], x[n_train:], y[n_train:])


def _gaussian_inputs(n: int, d: int, alpha: float | None, generator: torch.Generator) -> Tensor:
    """float64 rows of N(0, I), or with a decay ``alpha`` of N(0, Q diag(1/(1+k^α)) Qᵀ) with a random basis Q."""
    if alpha is None:
        return synthetic.gaussian(n, torch.ones(d, dtype=torch.float64), generator)
    spectrum = synthetic.decaying_spectrum(d, alpha, dtype=torch.float64)
    return synthetic.gaussian(n, spectrum, generator, basis=random_orthogonal(d, generator))


def _polynomial(name: str, x: Tensor, target: Callable[[Tensor], Tensor], n_train: int, unit_target: bool) -> DataSet:
    """A polynomial of ``x``; ``unit_target`` gives its training samples standard deviation 1, as [NFA] does."""
    y = target(x)
    return _regression(name, x, y * (synthetic.unit_std(y[:n_train])[0] / y[0]) if unit_target else y, n_train)


def gaussian(
    request: LoadRequest, *, n_train: int = 256, n_test: int = 1000, d: int = 32, alpha: float = 1.0, noise: float = 0.0
) -> DataSet:
    """Gaussian inputs with spectrum 1/(1+k^α) in a random basis and a random linear target wᵀx, w ~ N(0, I/d)."""
    generator = request.generator()
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    teacher = torch.randn(d, generator=generator, dtype=torch.float64) / d**0.5
    y = x @ teacher + noise * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return _regression("gaussian", x, y, n_train)


def chain_monomial(
    request: LoadRequest,
    *,
    n_train: int = 256,
    n_test: int = 1000,
    d: int = 32,
    rank: int = 5,
    alpha: float | None = None,
    unit_target: bool = True,
) -> DataSet:
    """y = Σ x_k x_{k+1} over a ring of ``rank`` coordinates ([NFA] eq. 1); isotropic inputs unless ``alpha`` is given."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, request.generator())
    return _polynomial("chain-monomial", x, lambda x: synthetic.chain_monomial(x, rank), n_train, unit_target)


def merged_staircase(
    request: LoadRequest,
    *,
    n_train: int = 1000,
    n_test: int = 1000,
    d: int = 10,
    degree: int = 4,
    alpha: float | None = None,
    unit_target: bool = False,
) -> DataSet:
    """y = x₁ + x₁x₂ + x₁x₂x₃ + … up to ``degree`` factors ([Gram] Fig. 8); isotropic inputs unless ``alpha`` is given."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, request.generator())
    return _polynomial("merged-staircase", x, lambda x: synthetic.merged_staircase(x, degree), n_train, unit_target)


def high_rank_polynomial(
    request: LoadRequest,
    *,
    n_train: int = 128,
    n_test: int = 1000,
    d: int = 128,
    alpha: float | None = None,
    unit_target: bool = True,
) -> DataSet:
    """y = Σ_i (Qx)_i² with standard normal Q ([NFA] Appendix H); isotropic inputs unless ``alpha`` is given."""
    generator = request.generator()
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    q = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return _polynomial("high-rank-polynomial", x, lambda x: synthetic.high_rank_polynomial(x, q), n_train, unit_target)


def alignment_reversing(
    request: LoadRequest,
    *,
    n_train: int = 256,
    n_test: int = 256,
    d: int = 256,
    balance: float = 0.5,
    inverse: Literal["pseudo", "literal"] = "pseudo",
    scale: float = 1.0,
) -> DataSet:
    """Data built so that XᵀX works against XᵀYX ([NFA] Appendix F); the test part is a second, independent construction."""
    generator = request.generator()
    train, test = (
        synthetic.alignment_reversing(n, d, balance, generator, inverse=inverse, scale=scale) for n in (n_train, n_test)
    )
    x, y = (torch.cat(pair) for pair in zip(train, test, strict=True))
    return _regression("alignment-reversing", x, y, n_train)


def swiss_roll(
    request: LoadRequest,
    *,
    n_train: int = 1000,
    n_test: int = 1000,
    dimensions: Literal[2, 3] = 2,
    noise: float = 0.0,
    unit_target: bool = True,
) -> DataSet:
    """Points of a Swiss roll scaled to [0, 1] by the training part, and their position along it (scaled alike)."""
    x, t = synthetic.swiss_roll(
        n_train + n_test, request.generator(), dimensions=dimensions, noise=noise, dtype=torch.float64
    )
    t = t[:, None]
    return _regression("swiss-roll", _box(x, n_train), _box(t, n_train) if unit_target else t, n_train)


def _box(x: Tensor, n_train: int) -> Tensor:
    """Each column scaled by the map that takes its training samples to [0, 1]."""
    low, high = x[:n_train].amin(0), x[:n_train].amax(0)
    return (x - low) / (high - low)


def modular_arithmetic(
    request: LoadRequest,
    *,
    p: int = 61,
    operation: str = "x+y",
    train_fraction: float = 0.7,
    encoding: Literal["one_hot", "tokens"] = "one_hot",
) -> DataSet:
    """Every pair mod p, split at random ([Gram] Fig. 13): inputs ``[n, 2p]`` one-hot, or ``[n, 2]`` tokens; p classes."""
    if encoding not in ("one_hot", "tokens"):
        raise InputError(f"encoding={encoding!r} is not known; there are: one_hot, tokens")
    pairs, labels = synthetic.modular_arithmetic(p, operation)
    n_train = round(train_fraction * len(pairs))
    if not 0 < n_train < len(pairs):
        raise InputError(f"train_fraction={train_fraction} leaves {n_train} of {len(pairs)} pairs for training")
    order = torch.randperm(len(pairs), generator=request.generator())
    x = pairs if encoding == "tokens" else synthetic.one_hot_pairs(pairs, p, dtype=torch.float32)
    train, test = order[:n_train], order[n_train:]
    return DataSet("modular-arithmetic", x[train], labels[train], x[test], labels[test], p)
