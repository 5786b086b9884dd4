from __future__ import annotations

import numpy as np
import pytest
import torch

from gramscope.errors import InputError
from gramscope_lab.data.pixels import scaled
from official_files import random_images


def test_scales() -> None:
    train, test = random_images(50, (2, 3, 3), 2)[0], random_images(9, (2, 3, 3), 2, seed=1)[0]
    unit = scaled(train, test)
    assert torch.equal(unit[0], torch.tensor(train) / 255)
    signed = scaled(train, test, "signed")
    torch.testing.assert_close(signed[1], 2 * torch.tensor(test).float() / 255 - 1)
    standard = scaled(train, test, "standard")
    exact = torch.tensor(train, dtype=torch.float64)
    std, mean = torch.std_mean(exact, (0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(standard[0], ((exact - mean) / std).float())
    torch.testing.assert_close(standard[1], ((torch.tensor(test) - mean) / std).float())
    with pytest.raises(InputError, match="unit, signed, standard"):
        scaled(train, test, "imagenet")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="channel 1 is constant"):
        scaled(train * np.array([1, 0], np.uint8)[:, None, None], test, "standard")
