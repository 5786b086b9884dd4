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
    generator: torch.Generator,
    *,
    n_train: int = 256,
    n_test: int = 1000,
    d: int = 32,
    alpha: float = 1.0,
) -> DataSet:
    """Gaussian inputs with spectrum 1/(1+k^α) in a random basis and a random linear target wᵀx, w ~ N(0, I/d)."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    teacher = torch.randn(d, generator=generator, dtype=torch.float64) / d**0.5
    return _regression("gaussian", x, x @ teacher, n_train)


def chain_monomial(
    generator: torch.Generator,
    *,
    n_train: int = 256,
    n_test: int = 1000,
    d: int = 32,
    rank: int = 5,
    alpha: float | None = None,
    unit_target: bool = True,
) -> DataSet:
    """y = Σ x_k x_{k+1} over a ring of ``rank`` coordinates ([NFA] eq. 1); isotropic inputs unless ``alpha`` is given."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    return _polynomial("chain-monomial", x, lambda x: synthetic.chain_monomial(x, rank), n_train, unit_target)


def merged_staircase(
    generator: torch.Generator,
    *,
    n_train: int = 1000,
    n_test: int = 1000,
    d: int = 10,
    degree: int = 4,
    alpha: float | None = None,
    unit_target: bool = False,
) -> DataSet:
    """y = x₁ + x₁x₂ + x₁x₂x₃ + … up to ``degree`` factors ([Gram] Fig. 8); isotropic inputs unless ``alpha`` is given."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    return _polynomial("merged-staircase", x, lambda x: synthetic.merged_staircase(x, degree), n_train, unit_target)


def high_rank_polynomial(
    generator: torch.Generator,
    *,
    n_train: int = 128,
    n_test: int = 1000,
    d: int = 128,
    alpha: float | None = None,
    unit_target: bool = True,
) -> DataSet:
    """y = Σ_i (Qx)_i² with standard normal Q ([NFA] Appendix H); isotropic inputs unless ``alpha`` is given."""
    x = _gaussian_inputs(n_train + n_test, d, alpha, generator)
    q = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return _polynomial("high-rank-polynomial", x, lambda x: synthetic.high_rank_polynomial(x, q), n_train, unit_target)


def alignment_reversing(
    generator: torch.Generator,
    *,
    n_train: int = 256,
    n_test: int = 256,
    d: int = 256,
    balance: float = 0.5,
    inverse: Literal["pseudo", "literal"] = "pseudo",
    scale: float = 1.0,
) -> DataSet:
    """Data built so that XᵀX works against XᵀYX ([NFA] Appendix F); the test part is a second, independent construction."""
    train, test = (
        synthetic.alignment_reversing(n, d, balance, generator, inverse=inverse, scale=scale) for n in (n_train, n_test)
    )
    x, y = (torch.cat(pair) for pair in zip(train, test, strict=True))
    return _regression("alignment-reversing", x, y, n_train)


def swiss_roll(generator: torch.Generator, *, n_train: int = 1000, n_test: int = 1000) -> DataSet:
    """Points of a Swiss roll and their position along it, both scaled to [0, 1] by the training part."""
    x, t = synthetic.swiss_roll(n_train + n_test, generator)
    return _regression("swiss-roll", _box(x, n_train), _box(t[:, None], n_train), n_train)


def _box(x: Tensor, n_train: int) -> Tensor:
    """Each column scaled by the map that takes its training samples to [0, 1]."""
    low, high = x[:n_train].amin(0), x[:n_train].amax(0)
    return (x - low) / (high - low)


def modular_arithmetic(
    generator: torch.Generator,
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
    order = torch.randperm(len(pairs), generator=generator)
    x = pairs if encoding == "tokens" else torch.nn.functional.one_hot(pairs, p).flatten(1).float()
    train, test = order[:n_train], order[n_train:]
    return DataSet("modular-arithmetic", x[train], labels[train], x[test], labels[test], p)


#: faces drawn at a time: few enough for the processor's cache
_CHUNK = 32


def faces(
    generator: torch.Generator, *, n_train: int = 2000, n_test: int = 500, image_size: int = 64, noise: float = 0.03
) -> DataSet:
    """Grey faces ``[n, 1, image_size, image_size]`` in [0, 1]; label 1 wears glasses, as does every other face.

    A form of the CelebA experiment that needs no download. Every face is a few soft-edged shapes whose places, sizes and
    greys are drawn at random; nothing but the glasses tells the classes apart. ``noise`` is the standard deviation of the
    noise on each pixel.
    """
    x, y = draw_faces(n_train + n_test, image_size, generator, noise=noise)
    return DataSet("faces", x[:n_train], y[:n_train], x[n_train:], y[n_train:], 2)


def draw_faces(n: int, side: int, generator: torch.Generator, *, noise: float = 0.03) -> tuple[Tensor, Tensor]:
    """``n`` faces ``[n, 1, side, side]`` and their labels ``[n]``, on the generator's device."""
    labels = torch.arange(n, device=generator.device) % 2
    labels = labels[torch.randperm(n, generator=generator, device=generator.device)]
    chunks = [_draw(labels[start : start + _CHUNK], side, generator, noise) for start in range(0, n, _CHUNK)]
    return torch.cat(chunks)[:, None], labels


def _draw(labels: Tensor, side: int, generator: torch.Generator, noise: float) -> Tensor:
    n = len(labels)
    axis = torch.linspace(-1, 1, side, device=generator.device)
    soft = 4.0 / side  # width of an edge

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, 1, 1, generator=generator, device=generator.device)

    def paint(image: Tensor, shape: Tensor, grey: Tensor) -> Tensor:
        return image + shape * (grey - image)

    def inside(distance: Tensor) -> Tensor:
        """1 where the distance is below 0, 0 above, with a soft edge."""
        return (0.5 - distance / soft).clamp(0, 1)

    x = axis[None, None, :] - uniform(-0.08, 0.08)
    y = axis[None, :, None] - uniform(-0.08, 0.08)

    def ellipse(cx: Tensor | float, cy: Tensor | float, rx: Tensor | float, ry: Tensor | float) -> Tensor:
        """Approximate signed distance to an ellipse."""
        radius = torch.sqrt(((x - cx) / rx).square() + ((y - cy) / ry).square())
        return (radius - 1) * torch.as_tensor(rx + ry) / 2

    face_width, face_height = uniform(0.52, 0.66), uniform(0.72, 0.86)
    skin, hair, eye_x, eye_y = uniform(0.55, 0.85), uniform(0.05, 0.4), uniform(0.22, 0.28), uniform(-0.2, -0.1)
    image = uniform(0.2, 0.8) + uniform(-0.15, 0.15) * x + uniform(-0.15, 0.15) * y
    image = paint(image, inside(ellipse(0.0, -0.12, face_width + 0.1, face_height + 0.02)), hair)
    image = paint(image, inside(ellipse(0.0, 0.08, face_width, face_height - 0.08)), skin)

    eye_size, brow = uniform(0.05, 0.08), uniform(-0.22, -0.16)
    for sign in (-1, 1):
        image = paint(image, inside(ellipse(sign * eye_x, eye_y, 1.6 * eye_size, eye_size)), uniform(0.85, 1.0))
        image = paint(image, inside(ellipse(sign * eye_x, eye_y, 0.7 * eye_size, 0.7 * eye_size)), uniform(0.0, 0.2))
        image = paint(image, inside(ellipse(sign * eye_x, eye_y + brow, uniform(0.12, 0.18), 0.025)), hair)
    image = paint(image, inside(ellipse(0.0, uniform(0.1, 0.2), 0.05, uniform(0.1, 0.16))), skin - uniform(0.05, 0.15))
    image = paint(
        image, inside(ellipse(0.0, uniform(0.42, 0.5), uniform(0.15, 0.28), uniform(0.02, 0.07))), uniform(0.2, 0.45)
    )

    rim, lens_x, lens_y = uniform(0.025, 0.05), uniform(0.17, 0.21), uniform(0.12, 0.18)
    glasses = torch.zeros(n, side, side, device=generator.device)
    for sign in (-1, 1):
        glasses = torch.maximum(glasses, inside(ellipse(sign * eye_x, eye_y, lens_x, lens_y).abs() - rim))
        temple = torch.maximum((y - eye_y).abs() - rim, (sign * x - eye_x - lens_x - 0.12).abs() - 0.12)
        glasses = torch.maximum(glasses, inside(temple))
    bridge = torch.maximum((y - eye_y).abs() - rim, x.abs() - (eye_x - lens_x).clamp(min=0.02))
    glasses = torch.maximum(glasses, inside(bridge)) * labels[:, None, None]
    image = paint(image, glasses, uniform(0.0, 0.25))

    light = 1 + uniform(-0.2, 0.2) * x + uniform(-0.1, 0.1) * y
    pixel_noise = noise * torch.randn(n, side, side, generator=generator, device=generator.device)
    return (image * light + pixel_noise).clamp(0, 1)
