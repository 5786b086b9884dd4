"""Linear interpolation of codes and its bound through target linearity ([Gram] Proposition 3)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError, ResultWarning
from gramscope.linalg.arrays import Array, Rows, as_float_tensor, check_pair, spans, to_double
from gramscope.measures.linearity import fit_linear, held_out_target_linearity


@dataclass(frozen=True)
class Interpolation:
    """Interpolation error of a decoder and what bounds it: ``error ≤ decoder_gap + pair_residual`` always.

    Over all pairs ``pair_residual ≤ ols_residual ≤ bound``, so for the best decoder of a class that contains the linear
    map the error is at most ``ols_residual``. Low training error of a given decoder bounds nothing.

    Args:
        error: mean ``‖D(z_λ) − x_λ‖`` over pairs, ``z_λ = λz_i + (1−λ)z_j``.
        decoder_gap: mean ``‖D(z_λ) − Wz_λ‖`` over the same pairs, W the least-squares map from codes to inputs.
        pair_residual: mean ``‖Wz_λ − x_λ‖`` over the same pairs.
        ols_residual: mean ``‖x_i − Wz_i‖`` over samples.
        bound: ``√((1 − TL) · mean‖x − x̄‖²)``.
        target_linearity: TL of the codes with the inputs as targets.
        pairs: how many were used.
    """

    error: float
    decoder_gap: float
    pair_residual: float
    ols_residual: float
    bound: float
    target_linearity: float
    pairs: int


def interpolation_error(
    decoder: Callable[[Tensor], Tensor],
    Z: Array,
    X: Array,
    lam: float = 0.5,
    pairs: int | None = None,
    generator: torch.Generator | None = None,
    intercept: bool = False,
) -> Interpolation:
    """Compare decoded interpolations of codes with interpolations of the inputs ([Gram] Proposition 3).

    Args:
        decoder: maps codes ``[m, d]`` of Z's dtype to inputs ``[m, ...]``.
        Z: codes ``[n, d]``.
        X: inputs ``[n, ...]``, flattened.
        lam: λ in [0, 1].
        pairs: number of random pairs of distinct samples; all n² ordered pairs by default.
        generator: source of the pairs, needed with ``pairs``.
        intercept: let the linear map have a constant, as a decoder with biases has.

    >>> Z = torch.tensor([[1.0], [2.0], [3.0]])
    >>> result = interpolation_error(lambda z: 2 * z, Z, 2 * Z)
    >>> round(result.error, 9), round(result.bound, 6), result.pairs
    (0.0, 0.0, 9)
    """
    if not 0.0 <= lam <= 1.0:
        raise InputError(f"lam must be between 0 and 1, got {lam}")
    codes = as_float_tensor(Z, "Z", dim=2)
    inputs = as_float_tensor(X, "X")
    inputs = inputs[:, None] if inputs.dim() == 1 else inputs.flatten(1)
    rows = Rows(inputs, "X")
    check_pair(Rows(codes, "Z"), rows)
    fit = fit_linear(codes, inputs, intercept=intercept)
    if fit.rank >= codes.shape[0]:
        warnings.warn(
            f"{codes.shape[0]} samples and codes of rank {fit.rank}: the linear map fits anything; take more samples",
            ResultWarning,
            stacklevel=2,
        )
    linearity = float(held_out_target_linearity(fit, codes, inputs))
    mean = rows.mean()
    spread = sum(float((block - mean).square().sum()) for block in rows.blocks()) / rows.n
    residual = sum(
        float(_norms(to_double(inputs[i:j]) - fit.predict_block(to_double(codes[i:j]))).sum())
        for i, j in spans(rows.n, rows.width + codes.shape[1])
    )
    sums = torch.zeros(3, dtype=torch.float64, device=fit.beta.device)
    for first, second in pair_blocks(rows.n, pairs, generator, rows.width + codes.shape[1]):
        a, b = first.to(codes.device), second.to(codes.device)
        z = lam * codes[a] + (1 - lam) * codes[b]
        x = lam * to_double(inputs[a]) + (1 - lam) * to_double(inputs[b])
        linear = fit.predict_block(lam * to_double(codes[a]) + (1 - lam) * to_double(codes[b]))
        decoded = _decode(decoder, z, x)
        sums += torch.stack([_norms(decoded - x).sum(), _norms(decoded - linear).sum(), _norms(linear - x).sum()])
    count = rows.n**2 if pairs is None else pairs
    error, gap, between = (sums / count).tolist()
    bound = math.sqrt(max(0.0, 1.0 - linearity) * spread)
    return Interpolation(error, gap, between, residual / rows.n, bound, linearity, count)


def pair_blocks(
    n: int, pairs: int | None, generator: torch.Generator | None, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices of all n² ordered pairs, or of ``pairs`` random ones of distinct samples, in blocks for ``width`` columns.

    >>> list(pair_blocks(2, None, None, 1))
    [(tensor([0, 0, 1, 1]), tensor([0, 1, 0, 1]))]
    """
    if pairs is None:
        for start, stop in spans(n * n, width):
            index = torch.arange(start, stop, dtype=torch.int64, device="cpu")
            yield index // n, index % n
        return
    if generator is None or pairs < 1 or n < 2:
        raise InputError(f"random pairs need a generator, pairs ≥ 1 and two samples; got {pairs} pairs of {n} samples")
    first = torch.randint(n, (pairs,), generator=generator, dtype=torch.int64, device=generator.device)
    second = (
        first + torch.randint(1, n, (pairs,), generator=generator, dtype=torch.int64, device=generator.device)
    ) % n
    for start, stop in spans(pairs, width):
        yield first[start:stop], second[start:stop]


def _decode(decoder: Callable[[Tensor], Tensor], z: Tensor, like: Tensor) -> Tensor:
    with torch.no_grad():
        decoded = to_double(as_float_tensor(decoder(z), "decoder output")).flatten(1)
    if decoded.shape != like.shape:
        raise InputError(f"the decoder gave {tuple(decoded.shape)} for inputs of shape {tuple(like.shape)}")
    return decoded


def _norms(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()
