"""From bytes to floats: the documented ``scale`` option of every image set."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramscope.errors import InputError

#: ``unit``: [0, 1]; ``signed``: [−1, 1]; ``standard``: mean 0 and variance 1 per channel over the training set
Scale: TypeAlias = Literal["unit", "signed", "standard"]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def scaled(train: Bytes, test: Bytes, scale: Scale = "unit", top: int = 255) -> tuple[Tensor, Tensor]:
    """Images ``[n, c, h, w]`` of bytes 0 … ``top`` as float32 ``(x − centre)/spread``, one pair for train and test."""
    images, tests = (torch.from_numpy(np.require(part, requirements=["C", "W"])) for part in (train, test))
    channels = images.shape[1]
    if scale == "unit":
        centre, spread = np.zeros(channels), np.full(channels, float(top))
    elif scale == "signed":
        centre, spread = np.full(channels, top / 2), np.full(channels, top / 2)
    elif scale == "standard":
        centre, spread = _channel_statistics(images)
        if not (spread > 0).all():
            raise InputError(f"scale='standard': channel {int(np.argmin(spread))} is constant over the training set")
    else:
        raise InputError(f"scale={scale!r} is not known; there are: unit, signed, standard")
    return _affine(images, centre, spread), _affine(tests, centre, spread)


def _channel_statistics(images: Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Exact mean and standard deviation of each channel, from counts of the 256 values."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).numpy()
    values = np.arange(256)
    total = counts.sum(1)
    mean = counts @ values / total
    return mean, np.sqrt(counts @ values**2 / total - mean**2)


def _affine(images: Tensor, centre: npt.NDArray[Any], spread: npt.NDArray[Any]) -> Tensor:
    x = images.to(torch.float32)
    if centre.any():
        x.sub_(torch.from_numpy(centre).float()[:, None, None])
    return x.div_(torch.from_numpy(spread).float()[:, None, None])
