"""Drawn faces with and without glasses, so that the CelebA experiment has a form that needs no download.

Every face is a few soft-edged shapes whose places, sizes and greys are drawn at random; half of the faces wear glasses,
and nothing but the glasses tells the classes apart. Coordinates run from −1 to 1, y downwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.load_request import LoadRequest

#: faces drawn at a time: few enough for the processor's cache
_CHUNK = 32


def faces(
    request: LoadRequest, *, n_train: int = 2000, n_test: int = 500, image_size: int = 64, noise: float = 0.03
) -> DataSet:
    """Grey faces ``[n, 1, image_size, image_size]`` in [0, 1]; label 1 wears glasses, as does every other face.

    Args:
        n_train, n_test: number of faces.
        image_size: side of the images.
        noise: standard deviation of the noise on each pixel.
    """
    for name, value in {"n_train": n_train, "n_test": n_test, "image_size": image_size}.items():
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    generator = request.generator()
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
